"""Run checkpoints in a bucket: what is left of them after deaths, damage and rivals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import faults
from sluice.bucket import ObjectBucket
from sluice.config import ConfigError, parse_config
from sluice.driver import run_training
from sluice.loop.config import RunConfig
from sluice.loop.ledger import Ledger
from sluice.loop.run_archive import OVER, Cut, RunArchive, RunTakenError, owned_archive
from sluice.loop.run_directory import (
    RunCheckpoint,
    RunDirectoryError,
    list_run_checkpoints,
    write_run_checkpoint,
)
from tests.patience import PATIENCE
from tests.s3_server import Faults, environment, make_bucket, running_s3

URL = "s3://runs/one"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Faults]]:
    faults_of_server = Faults()
    with running_s3(faults_of_server) as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "runs")
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield endpoint, faults_of_server


@pytest.fixture
def bucket(server: tuple[str, Faults]) -> ObjectBucket:
    bucket = ObjectBucket(URL)
    bucket.delete(bucket.keys(""))
    return bucket


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "a run"


def cut(step: int) -> RunCheckpoint:
    return RunCheckpoint(
        step=step,
        optimizer_step=step,
        checkpoint=f"checkpoints/{step}",
        weight_version=step,
        weight_digest="",
        position=step,
        seed=0,
    )


def begin(run_dir: Path, *, resume: bool = False, seconds: float = 30) -> RunArchive:
    """As a loop does, without looking whether another one lives."""
    run_dir.mkdir(parents=True, exist_ok=True)
    archive = RunArchive(URL, run_dir, seconds)
    entries = archive.read()
    archive.restore(entries, resume=resume)
    archive.claim(max(entries, default=0))
    return archive


def step(archive: RunArchive, run_dir: Path, number: int) -> None:
    """A step that trains on a group, and its run checkpoint."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    position = ledger.next_position()
    ledger.issue([(position, f"g{position}")], number)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {number}}}\n')
    archive.record(cut(number), ledger.run_id)
    write_run_checkpoint(run_dir / "cuts", cut(number))
    ledger.close()


def state(run_dir: Path) -> tuple[int, list[int], str]:
    ledger = Ledger(run_dir / "ledger.sqlite")
    try:
        ledger.check()
        position = ledger.next_position()
    finally:
        ledger.close()
    cuts = [each.step for each in list_run_checkpoints(run_dir / "cuts")]
    return position, cuts, (run_dir / "metrics.jsonl").read_text()


def lose(run_dir: Path) -> None:
    shutil.rmtree(run_dir)


def rows(count: int) -> str:
    return "".join(f'{{"step": {number}}}\n' for number in range(1, count + 1))


def test_a_directory_that_is_lost_comes_back_as_it_was(bucket: ObjectBucket, run_dir: Path) -> None:
    archive = begin(run_dir)
    for number in (1, 2, 3):
        step(archive, run_dir, number)
    lose(run_dir)
    with pytest.raises(ConfigError, match=r"loops/.*give resume: true"):
        begin(run_dir)
    archive = begin(run_dir, resume=True)
    assert state(run_dir) == (3, [1, 2, 3], rows(3))
    assert archive.notes == [f"{run_dir} is that of step 3 in {archive.url}"]
    step(archive, run_dir, 4)
    archive.retain([3, 4])
    lose(run_dir)
    begin(run_dir, resume=True)
    assert state(run_dir) == (4, [3, 4], rows(4))


def test_a_directory_that_is_newer_than_the_bucket_stays(
    bucket: ObjectBucket, run_dir: Path
) -> None:
    step(begin(run_dir), run_dir, 1)
    ledger = Ledger(run_dir / "ledger.sqlite")
    ledger.issue([(1, "since")], 1)
    ledger.close()
    assert begin(run_dir, resume=True).notes == []
    assert state(run_dir)[0] == 2


def test_a_directory_that_another_loop_has_overtaken_is_put_aside(
    bucket: ObjectBucket, run_dir: Path, tmp_path: Path
) -> None:
    step(begin(run_dir), run_dir, 1)
    shutil.move(run_dir, tmp_path / "first host")
    step(begin(run_dir, resume=True), run_dir, 2)
    lose(run_dir)
    shutil.move(tmp_path / "first host", run_dir)
    archive = begin(run_dir, resume=True)
    assert state(run_dir) == (2, [1, 2], rows(2))
    (aside,) = run_dir.glob("replaced.*")
    assert state(aside) == (1, [1], rows(1))
    assert any(str(aside) in note for note in archive.notes)


def test_a_directory_of_another_run_is_refused(bucket: ObjectBucket, run_dir: Path) -> None:
    step(begin(run_dir), run_dir, 1)
    lose(run_dir)
    ledger = Ledger(run_dir / "ledger.sqlite")
    ledger.issue([(0, "of another")], 0)
    ledger.close()
    with pytest.raises(ConfigError, match="holds another run than s3://runs/one/loops/"):
        begin(run_dir, resume=True)


LOOP = """
import sys
from pathlib import Path
from tests.unit.loop.test_run_archive import begin, step
run_dir, first = Path(sys.argv[1]), int(sys.argv[2])
archive = begin(run_dir, resume=True)
step(archive, run_dir, first)
archive.retain([first - 1, first])
"""


@pytest.mark.parametrize(
    ("point", "lasts"),
    [
        ("archive.cuts_restored", 2),
        ("archive.restored", 2),
        ("archive.claimed", 2),
        ("archive.uploaded", 2),
        ("archive.recorded", 3),
        ("archive.retained", 3),
    ],
)
def test_a_loop_that_dies_at_any_point_leaves_a_run_checkpoint(
    bucket: ObjectBucket, run_dir: Path, tmp_path: Path, point: str, lasts: int
) -> None:
    archive = begin(run_dir)
    step(archive, run_dir, 1)
    step(archive, run_dir, 2)
    lose(run_dir)
    faults.arm(tmp_path / "faults", point)
    loop = [sys.executable, "-m", "tests.program", LOOP, str(run_dir), "3"]
    died = subprocess.run(
        loop, env={**os.environ, faults.VARIABLE: str(tmp_path / "faults")}, timeout=PATIENCE
    )
    assert died.returncode == -signal.SIGKILL
    shutil.copytree(run_dir, tmp_path / "left")
    lose(run_dir)
    archive = begin(run_dir, resume=True)  # on another host
    assert state(run_dir) == (
        lasts,
        [1, 2, 3][:lasts][-2 if point.endswith("retained") else 0 :],
        rows(lasts),
    )
    bucket.delete([archive._entry(archive._number)])  # as if it had not been
    lose(run_dir)
    shutil.move(tmp_path / "left", run_dir)
    begin(run_dir, resume=True)  # where it died
    position, cuts, _ = state(run_dir)
    assert position >= lasts and cuts[-1] == lasts


@pytest.mark.parametrize("damage", ["entry", "piece", "cut piece", "lost piece"])
def test_a_damaged_run_checkpoint_is_passed_over_and_told(
    bucket: ObjectBucket, run_dir: Path, damage: str
) -> None:
    archive = begin(run_dir)
    step(archive, run_dir, 1)
    kept = set(bucket.keys(""))
    step(archive, run_dir, 2)
    new = [key for key in bucket.keys("") if key not in kept]
    (key,) = [key for key in new if ("/log/" in key) == (damage == "entry")][:1]
    data = bytearray(bucket.get(key))
    data[len(data) // 2] ^= 1
    bucket.delete([key])
    if damage != "lost piece":
        bucket.put(key, bytes(data[: len(data) // 2] if damage == "cut piece" else data))
    lose(run_dir)
    archive = begin(run_dir, resume=True)
    assert state(run_dir) == (1, [1], rows(1))
    assert "entry 3 is damaged and left out" in archive.notes[0]
    step(archive, run_dir, 2)
    lose(run_dir)
    begin(run_dir, resume=True)
    assert state(run_dir) == (2, [1, 2], rows(2))


def test_where_nothing_is_intact_the_newest_is_named(bucket: ObjectBucket, run_dir: Path) -> None:
    step(begin(run_dir), run_dir, 1)
    bucket.delete(key for key in bucket.keys("") if "/pieces/" in key)
    lose(run_dir)
    with pytest.raises(RunDirectoryError, match=r"no run checkpoint is intact; .*entry 2: .*gone"):
        begin(run_dir, resume=True)
    assert not (run_dir / "ledger.sqlite").exists()


def test_a_loop_of_before_writes_and_removes_nothing_any_more(
    bucket: ObjectBucket, run_dir: Path, tmp_path: Path
) -> None:
    stale = begin(run_dir)
    step(stale, run_dir, 1)
    shutil.move(run_dir, tmp_path / "stale")
    newer = begin(run_dir, resume=True)
    step(newer, run_dir, 2)
    newer.retain([2])
    before = sorted(bucket.keys(""))
    stale._run_dir = tmp_path / "stale"
    for act in (stale.verify, lambda: stale.record(cut(9), "x"), lambda: stale.retain([9])):
        with pytest.raises(RunTakenError, match=r"process \d+ on .* has taken over"):
            act()
    gone = set(before) - set(bucket.keys(""))
    assert not gone
    stale.claim(stale._number + 5)  # negative control: who claims after the newest may
    lose(run_dir)
    begin(run_dir, resume=True)
    assert state(run_dir)[1] == [2]


def test_of_two_that_claim_at_once_one_is_refused(bucket: ObjectBucket, run_dir: Path) -> None:
    run_dir.mkdir()
    one, other = RunArchive(URL, run_dir, 30), RunArchive(URL, run_dir, 30)
    one.claim(0)
    with pytest.raises(RunTakenError, match="has taken over"):
        other.claim(0)


def test_pieces_that_stay_are_uploaded_once_and_go_when_nothing_names_them(
    bucket: ObjectBucket, run_dir: Path, server: tuple[str, Faults]
) -> None:
    def puts() -> int:
        return sum(method == "PUT" and "/pieces/" in path for method, path in server[1].calls)

    archive = begin(run_dir)
    with (run_dir / "metrics.jsonl").open("wb") as file:
        file.write(b"".join(b"%07d\n" % number for number in range(3 << 17)))  # 3 MiB
    before = puts()
    step(archive, run_dir, 1)
    first = puts() - before
    step(archive, run_dir, 2)
    assert first >= 4
    assert puts() - before - first == 2  # the ends of the ledger and of the metrics
    archive.retain([2])
    entries = archive.read()
    kept = entries[max(entries)]
    assert isinstance(kept, Cut)
    pieces = {key.rpartition("/")[2] for key in bucket.keys("") if "/pieces/" in key}
    assert pieces == {digest for _, digest in kept.pieces()}
    assert len(pieces) == first
    lose(run_dir)
    begin(run_dir, resume=True)
    assert (run_dir / "metrics.jsonl").read_bytes().startswith(b"0000000\n0000001\n")


def test_an_answer_that_is_lost_is_no_rival(
    bucket: ObjectBucket, run_dir: Path, server: tuple[str, Faults]
) -> None:
    archive = begin(run_dir)
    server[1].add("lose", "PUT", "/log/", 1)
    step(archive, run_dir, 1)
    assert server[1].met[-1] == "lose"
    archive.verify()
    lose(run_dir)
    begin(run_dir, resume=True)
    assert state(run_dir)[0] == 1


async def owning(run_dir: Path, seconds: float, block=None) -> RunArchive:
    archive = RunArchive(URL, run_dir, seconds)
    async with asyncio.timeout(PATIENCE), owned_archive(archive, resume=True):
        if block is not None:
            await block(archive)
    return archive


def test_a_loop_that_lives_is_not_taken_over(
    bucket: ObjectBucket, run_dir: Path, tmp_path: Path
) -> None:
    async def rival(_: RunArchive) -> None:
        shutil.move(run_dir, tmp_path / "first")
        with pytest.raises(RunTakenError, match=r"process \d+ on .* trains this run \(s3://"):
            await owning(run_dir, 8)

    asyncio.run(owning(run_dir, 8, rival))
    lose(run_dir)
    asyncio.run(owning(run_dir, 3600))  # it said that it ended: nobody waits for an hour


def test_a_loop_that_died_is_taken_over_after_its_silence(
    bucket: ObjectBucket, run_dir: Path, tmp_path: Path
) -> None:
    dead = begin(run_dir, seconds=0.5)
    dead.beat(7)
    shutil.move(run_dir, tmp_path / "first")

    async def whole() -> None:
        began = asyncio.get_running_loop().time()
        await owning(run_dir, 0.25)
        assert asyncio.get_running_loop().time() - began >= 0.5  # that of the dead one counts

    asyncio.run(whole())
    with pytest.raises(RunTakenError):
        dead.verify()


def test_a_loop_that_is_taken_over_ends_where_it_waits(bucket: ObjectBucket, run_dir: Path) -> None:
    async def waits_for_ever(archive: RunArchive) -> None:
        rival = RunArchive(URL, run_dir, 0.3)
        await asyncio.to_thread(rival.claim, max(rival.read()))
        await asyncio.Event().wait()

    with pytest.raises(RunTakenError, match="has taken over"):
        asyncio.run(owning(run_dir, 0.3, waits_for_ever))
    (sign,) = [key for key in bucket.keys("") if "/alive/00000001" in key]
    assert bucket.get(sign) == OVER


def test_an_outage_of_the_bucket_is_an_error_that_names_it(run_dir: Path) -> None:
    lost = ObjectBucket("s3://no-such-bucket/one", request_seconds=1, retry_seconds=0.1)
    run_dir.mkdir()
    with pytest.raises(RunDirectoryError, match="s3://no-such-bucket/one/loops/"):
        RunArchive("s3://no-such-bucket/one", run_dir, 30, lost).claim(0)


def test_seconds_of_a_takeover_are_refused_where_nothing_is_taken_over(run_dir: Path) -> None:
    config = parse_config(
        RunConfig,
        {
            "run_dir": str(run_dir),
            "store": str(run_dir / "store"),
            "takeover_seconds": 5,
            "trainer": "127.0.0.1:1",
            "router": "127.0.0.1:1",
            "server": None,
            "prompts": {"file": "none.jsonl"},
            "environment": {"name": "prompts", "settings": {"reward": "position_match"}},
            "sampling": {"max_new_tokens": 5},
        },
    )
    with pytest.raises(ConfigError, match="takeover_seconds: has no effect"):
        asyncio.run(run_training(config))


@pytest.mark.parametrize("name", ["../../run", "r/./s//t", "%2F", "r" * 900, "ein Läufer"])
def test_any_name_of_a_directory_has_a_place_of_its_own(
    bucket: ObjectBucket, tmp_path: Path, name: str
) -> None:
    archive = RunArchive(URL, Path(name), 30)
    archive._run_dir = tmp_path  # which the names need not be good for
    archive.claim(0)
    (key,) = bucket.keys("")
    assert key.startswith("loops/") and key.count("/") == 3
    assert list(RunArchive(URL, Path(name), 30).read()) == [1]
    assert RunArchive(URL, Path(f"{name}2"), 30).read() == {}
