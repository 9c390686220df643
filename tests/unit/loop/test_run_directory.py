"""What a run directory must be for a run to begin or go on in it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import socket
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sluice import cli
from sluice.bucket import ObjectsError
from sluice.config import ConfigError, parse_config
from sluice.durable import DirectoryError, LockTimeoutError
from sluice.loop.config import RunConfig
from sluice.loop.journal import RunJournal
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.prompts import load_prompts
from sluice.loop.run_directory import (
    LEDGER,
    PLACE,
    RunCheckpoint,
    RunDirectoryError,
    check_layouts,
    check_ledger,
    check_resumed,
    check_trainers,
    damaged_run_checkpoints,
    digest_of,
    last_step_of_samples,
    latest_run_checkpoint,
    list_run_checkpoints,
    notice_copy,
    owned,
    set_aside,
    settings_digests,
    sole_driver,
    write_run_checkpoint,
)
from sluice.samples.blobs import BlobReference
from sluice.weights.manifest import seal

RUN_CHECKPOINT = RunCheckpoint(
    step=2,
    optimizer_step=2,
    checkpoint="checkpoints/x",
    weight_version=3,
    weight_digest="d",
    position=4,
    seed=0,
)

KEPT_DIGESTS = json.loads((Path(__file__).parents[1] / "data/settings_digests.json").read_text())


def config(folder: Path, **changes) -> RunConfig:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text(json.dumps({"prompt": "1="}) + "\n")
    values = {
        "run_dir": str(folder / "run"),
        "trainer": "a:1",
        "router": "a:2",
        "prompts": {"file": str(prompts)},
        "environment": {"name": "prompts"},
        "sampling": {"max_new_tokens": 5},
        "resume": True,
        **changes,
    }
    return parse_config(RunConfig, values)


def digests(settings: RunConfig) -> dict[str, str]:
    return settings_digests(settings, load_prompts(settings.prompts, settings.seed).digest)


def train(ledger: Ledger, steps: int) -> None:
    """Two groups a step."""
    for step in range(steps):
        numbers = [2 * step, 2 * step + 1]
        ledger.issue([(number, f"g{number}") for number in numbers], step)
        for number in numbers:
            group = LedgerGroup(
                position=number,
                group_id=f"g{number}",
                state="generated",
                issue_step=step,
                blob=BlobReference("0" * 32, 1),
            )
            ledger.generated(group)
        ledger.consume([f"g{number}" for number in numbers], step + 1)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    yield ledger
    ledger.close()


def test_a_directory_is_of_one_loop_at_a_time(tmp_path) -> None:
    with (
        owned(tmp_path / "run"),
        pytest.raises(DirectoryError, match=rf"process {os.getpid()} .*works in .*run"),
        owned(tmp_path / "run"),
    ):
        raise AssertionError("two loops")
    with owned(tmp_path / "run"):
        """The lock ends with its owner."""


def test_a_trainer_is_of_one_loop_at_a_time(tmp_path) -> None:
    store, first, second = tmp_path / "store", tmp_path / "first", tmp_path / "second"
    with sole_driver(store, first, ["host:1"]), sole_driver(store, second, ["host:1"]):
        assert not store.exists()  # the run says so
    store.mkdir()
    with sole_driver(store, first, ["host:1", "[::1]:2"]):
        for taken in ("host:1", "[::1]:2"):
            with (
                pytest.raises(DirectoryError, match=rf"driven by process {os.getpid()} .*/first"),
                sole_driver(store, second, ["host:3", taken]),
            ):
                raise AssertionError("two loops")
        with sole_driver(store, second, ["host:3"]):  # that of a refused loop is free again
            """Another trainer of the same store."""
    with sole_driver(store, second, ["host:1"]):
        """The claim ends with its owner."""
    with sole_driver(store, first, ["host:1", "host:1"]):
        """A critic that is given as the trainer itself: that it has no value head is told later."""


@pytest.mark.parametrize("other", ["127.0.0.1", "LOCALHOST", "[::1]", socket.gethostname()])
def test_a_trainer_is_the_same_by_whatever_name(tmp_path, other) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with sole_driver(store, tmp_path / "first", ["localhost:5"]):
        with (
            pytest.raises(DirectoryError, match=rf"{re.escape(other)}:5 is driven by process"),
            sole_driver(store, tmp_path / "second", [f"{other}:5"]),
        ):
            raise AssertionError("two loops")
        with sole_driver(store, tmp_path / "second", [f"{other}:6"]):
            """Another trainer of the same host."""


@pytest.mark.parametrize("host", ["a" * 70, "x..y", f"[{'1' * 5000}]"])
def test_a_host_that_can_have_no_number_is_a_place_of_that_name(tmp_path, host) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with (
        sole_driver(store, tmp_path / "first", [f"{host}:5"]),
        pytest.raises(DirectoryError, match="is driven by process"),
        sole_driver(store, tmp_path / "second", [f"{host}:5"]),
    ):
        raise AssertionError("two loops")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"run, or the store: No space left"),
        (OSError(errno.EROFS, "Read-only file system", "/x/cut"), r"^/x/cut: Read-only file"),
        (sqlite3.OperationalError("database or disk is full"), r"ledger.sqlite: database or disk"),
        (ObjectsError("s3://bucket/key", "it is down"), r"^s3://bucket/key: it is down$"),
        (LockTimeoutError(Path("/x/lock"), 60), r"^lock '/x/lock' was not free within 60 s$"),
    ],
)
def test_what_the_disk_refuses_is_told_in_one_line(tmp_path, error, message) -> None:
    with pytest.raises(RunDirectoryError, match=message), owned(tmp_path / "run"):
        raise error


def test_a_run_directory_that_cannot_be_made_is_told(tmp_path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(DirectoryError, match="file/run: Not a directory"),
        owned(tmp_path / "file" / "run"),
    ):
        raise AssertionError("made")


def test_a_deadline_is_no_fault_of_the_disk(tmp_path) -> None:
    with pytest.raises(TimeoutError), owned(tmp_path / "run"):
        raise TimeoutError


def test_a_ledger_that_fits_the_run_checkpoint_is_taken(ledger) -> None:
    check_ledger(ledger, None)
    train(ledger, 3)
    check_ledger(ledger, RUN_CHECKPOINT)
    ledger.roll_back(2)
    check_ledger(ledger, RUN_CHECKPOINT)


def test_a_ledger_that_lost_groups_is_refused(ledger) -> None:
    message = r"group 0 and step 0, before the last run.*put a copy back"
    with pytest.raises(RunDirectoryError, match=message):
        check_ledger(ledger, RUN_CHECKPOINT)


def _rows(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        tables = ("groups", "versions", "run")
        return [str(row) for t in tables for row in database.execute(f"SELECT * FROM {t}")]


def _is_told(path: Path, expected: list[str]) -> bool:
    """Whether a run would end with one line; else the ledger must say what it always said."""
    try:
        with owned(path.parent):
            ledger = Ledger(path)
            try:
                check_ledger(ledger, RUN_CHECKPOINT)
                ledger.groups("consumed")
            finally:
                ledger.close()
    except RunDirectoryError:
        return True
    assert _rows(path) == expected
    return False


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[bytes, list[str]]:
    """A ledger of a run that has ended, and its rows."""
    path = tmp_path_factory.mktemp("written") / "ledger.sqlite"
    ledger = Ledger(path)
    train(ledger, 6)
    for step in range(7):
        ledger.record_version(step + 1, f"digest{step}", step)
    ledger.close()
    return path.read_bytes(), _rows(path)


@pytest.mark.parametrize("offset", range(8))
def test_a_flipped_bit_of_the_ledger_is_found_or_changes_nothing(tmp_path, written, offset) -> None:
    """A run that takes a consumed group for another would train twice, or never."""
    data, rows = written
    used = [index for index in range(offset, len(data), 8) if data[index]]  # not the empty space
    told = 0
    for index in used[:: max(1, len(used) // 40)]:
        path = tmp_path / str(index) / "ledger.sqlite"
        path.parent.mkdir()
        path.write_bytes(data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :])
        told += _is_told(path, rows)
    assert told > 10


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_ledger_that_was_cut_off_is_refused(tmp_path, written, share) -> None:
    data, rows = written
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(data[: int(share * len(data))])
    assert _is_told(path, rows)


def test_a_ledger_that_lost_a_step_is_refused(ledger) -> None:
    train(ledger, 1)
    ledger.issue([(2, "g2"), (3, "g3")], 1)
    with pytest.raises(RunDirectoryError, match="group 4 and step 1, before the last run"):
        check_ledger(ledger, RUN_CHECKPOINT)


def test_a_ledger_whose_run_checkpoints_are_lost_is_refused(ledger) -> None:
    """It would begin at step 1 again, with groups that were trained on."""
    train(ledger, 3)
    with pytest.raises(RunDirectoryError, match=r"no run checkpoint is left in cuts/, and 3 steps"):
        check_ledger(ledger, None)


@pytest.fixture
def cuts(tmp_path) -> Path:
    """Two run checkpoints."""
    directory = tmp_path / "run" / "cuts"
    write_run_checkpoint(directory, RUN_CHECKPOINT)
    write_run_checkpoint(directory, replace(RUN_CHECKPOINT, step=4))
    return directory


@pytest.mark.parametrize("where", range(0, 440, 20))
def test_no_byte_of_a_run_checkpoint_may_change(cuts, where) -> None:
    path = cuts / "00000004.json"
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 0x10
    path.write_bytes(data)
    assert latest_run_checkpoint(cuts) == RUN_CHECKPOINT
    assert list(damaged_run_checkpoints(cuts)) == [4]


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_run_checkpoint_that_was_cut_off_is_none(cuts, size) -> None:
    path = cuts / "00000004.json"
    path.write_bytes(path.read_bytes()[:size])
    assert [each.step for each in list_run_checkpoints(cuts)] == [2]
    assert list(damaged_run_checkpoints(cuts)) == [4]
    set_aside(cuts, 4)
    assert damaged_run_checkpoints(cuts) == {}
    assert (cuts / "00000004.json.damaged").exists()


def test_a_run_checkpoint_under_the_name_of_another_is_none(cuts) -> None:
    """Going on from it would repeat steps without a word, and forget the newer one."""
    (cuts / "00000004.json").write_bytes((cuts / "00000002.json").read_bytes())
    assert latest_run_checkpoint(cuts) == RUN_CHECKPOINT
    assert damaged_run_checkpoints(cuts) == {4: "it is that of step 2"}


def test_a_run_checkpoint_of_a_newer_release_is_refused(cuts, tmp_path, ledger) -> None:
    """Going back to the one before would throw away what that release has trained."""
    document = {**asdict(RUN_CHECKPOINT), "format": 6, "moon": "full"}
    (cuts / "00000004.json").write_bytes(seal(document, "manifest_digest"))
    settings = config(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"00000004\.json: was written by a newer release"):
        check_resumed(settings, digests(settings), print)


def test_a_run_whose_run_checkpoints_are_all_damaged_is_told_of_the_newest(
    cuts, tmp_path, ledger
) -> None:
    train(ledger, 4)
    first, newest = cuts / "00000002.json", cuts / "00000004.json"
    newest.write_bytes(first.read_bytes())
    first.write_bytes(first.read_bytes()[:-1])
    settings = config(tmp_path)
    message = r"no run checkpoint in .*cuts is intact; the newest, of step 4: it is that of step 2"
    with pytest.raises(RunDirectoryError, match=message):
        check_resumed(settings, digests(settings), print)


def test_a_run_checkpoint_of_an_earlier_release_is_taken(cuts) -> None:
    document = asdict(replace(RUN_CHECKPOINT, step=6))
    del document["layouts"], document["settings"], document["critic_optimizer_step"]
    (cuts / "00000006.json").write_text(json.dumps(document))
    assert latest_run_checkpoint(cuts) == replace(RUN_CHECKPOINT, step=6)


def test_the_step_of_a_critic_is_of_a_format_that_earlier_releases_refuse(cuts) -> None:
    """They took a manifest with what they do not know for a damaged one, and went further back."""
    with_critic = replace(RUN_CHECKPOINT, step=6, critic_optimizer_step=9)
    write_run_checkpoint(cuts, with_critic)
    assert latest_run_checkpoint(cuts) == with_critic
    formats = [json.loads(path.read_text())["format"] for path in sorted(cuts.iterdir())]
    assert formats == [2, 2, 3]
    assert "critic_optimizer_step" not in (cuts / "00000004.json").read_text()


def test_a_reference_of_its_own_is_of_a_format_that_earlier_releases_refuse(cuts) -> None:
    """They would go on with the reference that the run began with."""
    moved = replace(RUN_CHECKPOINT, step=6, reference_version=9, reference_step=5)
    write_run_checkpoint(cuts, moved)
    assert latest_run_checkpoint(cuts) == moved
    formats = [json.loads(path.read_text())["format"] for path in sorted(cuts.iterdir())]
    assert formats == [2, 2, 4]
    assert "reference" not in (cuts / "00000004.json").read_text()


def test_settings_of_trainers_are_of_a_format_that_earlier_releases_refuse(cuts) -> None:
    told = replace(RUN_CHECKPOINT, step=6, trainers={"trainer": {"seed": "0"}})
    write_run_checkpoint(cuts, told)
    assert latest_run_checkpoint(cuts) == told
    formats = [json.loads(path.read_text())["format"] for path in sorted(cuts.iterdir())]
    assert formats == [2, 2, 5]
    assert "trainers" not in (cuts / "00000004.json").read_text()


@pytest.mark.parametrize("role", ["trainer", "critic"])
def test_other_settings_of_a_trainer_are_told_or_refused(role) -> None:
    """They are in no setting of the run: another learning rate, or another reference of its KL."""
    had = {"optim.learning_rate": "0.001", "model": '"/models/a"', "gone": "1"}
    before = {"trainer": had, "critic": had}
    run_checkpoint = replace(RUN_CHECKPOINT, trainers=before)
    for deterministic in (True, False):
        check_trainers(run_checkpoint, before, pytest.fail, deterministic=deterministic)
        check_trainers(RUN_CHECKPOINT, before, pytest.fail, deterministic=deterministic)
        check_trainers(run_checkpoint, {}, pytest.fail, deterministic=deterministic)
    has = {"optim.learning_rate": "0.0005", "model": f'"/{"b" * 80}"', "new": "1"}
    notes: list[str] = []
    check_trainers(run_checkpoint, {**before, role: has}, notes.append, deterministic=False)
    assert notes == [
        f'resumed with other settings of the {role} (model: "/models/a", now "/{"b" * 58}...; '
        "optim.learning_rate: 0.001, now 0.0005)"
    ]
    message = rf"^deterministic: the {role} of the run to resume .*0.001, now 0.0005\); set them"
    with pytest.raises(ConfigError, match=message):
        check_trainers(run_checkpoint, {**before, role: has}, pytest.fail, deterministic=True)


@pytest.mark.parametrize(
    ("settings", "trainer", "last"),
    [
        ({}, {}, None),
        ({"later": "x"}, {"later": "1"}, None),  # which the run checkpoint does not know
        ({"initial_checkpoint": "x"}, {}, None),
        ({"algorithm": "x"}, {}, 2),
        ({"groups_per_step": "x"}, {"threads": "4"}, 2),
        ({}, {"optim.learning_rate": "0.1"}, 2),
        ({}, {"threads": "4", "max_tokens_per_micro_batch": "8", "operations.x": "1"}, None),
        ({}, {"megatron.recompute": "1"}, None),  # after a want of memory, say
        ({"sampling": "x"}, {}, -1),
        ({"environment": "x", "algorithm": "x"}, {"optim.learning_rate": "0.1"}, -1),
    ],
)
def test_what_other_settings_make_of_groups_that_wait(
    settings: dict[str, str], trainer: dict[str, str], last: int | None
) -> None:
    """What was sampled by weights of later steps is of none that the run will have."""
    names = ("algorithm", "groups_per_step", "sampling", "environment", "initial_checkpoint")
    had = dict.fromkeys(names, "d")
    said = {name: "0" for name in ("threads", "max_tokens_per_micro_batch", "operations.x")}
    said["megatron.recompute"] = "0"
    said["optim.learning_rate"] = "0"
    run_checkpoint = replace(RUN_CHECKPOINT, settings=had, trainers={"trainer": said})
    now = {"trainer": {**said, **trainer}}
    assert last_step_of_samples(run_checkpoint, {**had, **settings}, now) == last
    assert last_step_of_samples(RUN_CHECKPOINT, {**had, **settings}, now) is None
    engines = {"engines": {"dtype": "0"}}  # whose numbers are in what they sampled
    of_engines = replace(run_checkpoint, trainers=engines)
    assert last_step_of_samples(of_engines, had, {"engines": {"dtype": "1"}}) is None


@pytest.mark.parametrize("role", ["trainer", "critic"])
def test_ranks_that_are_laid_out_otherwise_are_told_or_refused(role) -> None:
    """Sums of floats in another order are other numbers."""
    before = {"trainer": {"data": 2, "tensor": 1}, "critic": {"data": 2}}
    run_checkpoint = replace(RUN_CHECKPOINT, layouts=before)
    notes: list[str] = []
    for deterministic in (True, False):
        check_layouts(run_checkpoint, before, pytest.fail, deterministic=deterministic)
        check_layouts(RUN_CHECKPOINT, before, pytest.fail, deterministic=deterministic)
    now = {**before, role: {"data": 1}}
    check_layouts(run_checkpoint, now, notes.append, deterministic=False)
    (note,) = notes
    assert f"{role}: data 2" in note and "now data 1" in note
    with pytest.raises(ConfigError, match=rf"^deterministic: .*\({role}: data 2.*now data 1\)"):
        check_layouts(run_checkpoint, now, pytest.fail, deterministic=True)


def test_a_run_of_a_release_without_stop_strings_has_the_same_digest(tmp_path: Path) -> None:
    then = {"max_new_tokens": 5, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}
    assert digests(config(tmp_path))["sampling"] == digest_of(then)
    stops = config(tmp_path, sampling={"max_new_tokens": 5, "stop": ["</s>"]})
    assert digests(stops)["sampling"] != digest_of(then)


def test_run_checkpoint_without_a_ledger_are_no_new_run(tmp_path) -> None:
    write_run_checkpoint(tmp_path / "run" / "cuts", RUN_CHECKPOINT)
    settings = config(tmp_path)
    message = r"has run checkpoints and no ledger.*put a copy back"
    with pytest.raises(RunDirectoryError, match=message):
        check_resumed(settings, digests(settings), print)


@pytest.fixture
def resumed(tmp_path, ledger):
    """Checks a changed configuration against that of `config(tmp_path)`; returns the notes."""
    write_run_checkpoint(
        tmp_path / "run" / "cuts", replace(RUN_CHECKPOINT, settings=digests(config(tmp_path)))
    )

    def check(**changes) -> list[str]:
        settings, notes = config(tmp_path, **changes), list[str]()
        check_resumed(settings, digests(settings), notes.append)
        return notes

    return check


def test_the_same_settings_and_more_steps_are_nothing_to_tell(resumed) -> None:
    assert resumed() == []
    assert resumed(steps=7, checkpoint_every=3, deterministic=True) == []


def test_other_settings_are_told(resumed) -> None:
    assert resumed(sampling={"max_new_tokens": 6}, samples_per_group=4) == [
        "resumed with another samples_per_group, sampling"
    ]


@pytest.mark.parametrize("kept", KEPT_DIGESTS, ids=lambda kept: json.dumps(kept["changes"])[:40])
def test_settings_have_the_digests_that_earlier_releases_wrote(kept: dict[str, Any]) -> None:
    """And those that came later change none where they say what was done before."""
    base = {"run_dir": "run", "trainer": "a:1", "router": "a:2", "resume": True}
    base |= {"environment": {"name": "prompts"}, "prompts": {"file": "p.jsonl"}}
    values = {**base, "sampling": {"max_new_tokens": 5}, **kept["changes"]}
    values = {name: value for name, value in values.items() if value is not None}
    assert settings_digests(parse_config(RunConfig, values), "p").items() >= kept["digests"].items()
    values["algorithm"] = {"epochs": 1, **values.get("algorithm", {})}
    shares = values.get("environments", {}).values()
    for given in (values["sampling"], *(s["sampling"] for s in shares if "sampling" in s)):
        given.setdefault("stop", [])
    assert settings_digests(parse_config(RunConfig, values), "p").items() >= kept["digests"].items()


def test_settings_that_differ_are_named_with_both_values(tmp_path, resumed) -> None:
    had, later = config(tmp_path), config(tmp_path, algorithm={"mini_batches": 3})
    former = had.model_dump(mode="json")
    del former["algorithm"]["epochs"]  # as a release without them wrote it
    journal = RunJournal(tmp_path / "run")
    journal.start("train", 1, former)
    journal.start("train", 1, later.model_dump(mode="json"))  # which made no run checkpoint
    algorithm = {"epochs": 2, "loss": {"name": "ppo_clip", "clip_low": 0.1}}
    sampling = {"max_new_tokens": 6, "stop": ["="]}
    assert resumed(algorithm=algorithm, sampling=sampling) == [
        "resumed with another algorithm (algorithm.epochs: 1, now 2; algorithm.loss.clip_low: 0.2, "
        'now 0.1), sampling (sampling.max_new_tokens: 5, now 6; sampling.stop: [], now ["="])'
    ]
    with pytest.raises(ConfigError, match=r"had another sampling \(.*max_new_tokens: 5, now 6\)$"):
        resumed(sampling={"max_new_tokens": 6}, deterministic=True)
    settings = {"api_key": "hush", "reward": "x" * 200}
    (told,) = resumed(environment={"name": "prompts", "settings": settings})
    assert "hush" not in told
    assert 'environment.settings.reward: null, now "' + "x" * 59 + "..." in told


def test_a_deterministic_run_has_no_other_settings(resumed) -> None:
    with pytest.raises(ConfigError, match="deterministic: the run to resume had another sampling"):
        resumed(sampling={"max_new_tokens": 6}, deterministic=True)


def test_other_prompts_are_refused_wherever_they_are(resumed, tmp_path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((tmp_path / "prompts.jsonl").read_bytes())
    assert resumed(prompts={"file": str(copy)}) == []
    copy.write_text(json.dumps({"prompt": "2="}) + "\n")
    for prompts in ({"file": str(copy)}, {"index_count": 1}):
        with pytest.raises(ConfigError, match="prompts: are not those of the run"):
            resumed(prompts=prompts)
    with pytest.raises(ConfigError, match="prompts: are not"):
        resumed(prompts={"file": str(tmp_path / "prompts.jsonl"), "shuffle": False})


def test_prompts_that_differ_are_named_with_both_values(resumed, tmp_path) -> None:
    """As they were when the run last went on, not when it was refused."""
    journal = RunJournal(tmp_path / "run")
    had = config(tmp_path).model_dump(mode="json")
    journal.start("train", 1, had)
    journal.start("train", 1, {**had, "prompts": {"file": "refused.jsonl"}})
    journal.write("end", outcome="failed", text="ConfigError: prompts: are not those")
    (told,) = {refusal(resumed, prompts={"index_count": index}) for index in (7, 7)}
    assert "of the run to resume (prompts.file: " in told and "now null" in told
    assert "prompts.index_count: null, now 7)" in told and "refused" not in told
    copy = tmp_path / "prompts.jsonl"
    copy.write_text(json.dumps({"prompt": "2="}) + "\n")
    assert "of the run to resume, some would" in refusal(resumed)


def refusal(resumed: Callable[..., Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        resumed(**changes)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_staleness", 2), ("over_sampling", 2.0), ("pause_mode", "abort")],
)
def test_settings_of_the_schedule_are_told_too(resumed, name: str, value: object) -> None:
    """They change which groups a step is of, and which weights sampled them."""
    assert resumed(**{name: value}) == [f"resumed with another {name}"]


def test_a_teacher_may_move_and_its_pool_is_no_other(tmp_path) -> None:
    learning = {"algorithm": {"advantage": {"name": "distillation"}}}
    here, there, pool = (
        digests(config(tmp_path, **learning, teachers={"maths": teacher}))["teachers"]
        for teacher in ({"address": "a:1"}, {"address": "b:2"}, {"pool": "large"})
    )
    assert here == there != pool


def test_a_run_that_goes_on_begins_with_no_other_checkpoint(tmp_path, ledger) -> None:
    """It went on from its own without a word."""
    began = config(tmp_path, initial_checkpoint="checkpoints/a")
    cuts = tmp_path / "run" / "cuts"
    write_run_checkpoint(cuts, replace(RUN_CHECKPOINT, settings=digests(began)))
    for taken in (began, config(tmp_path)):
        check_resumed(taken, digests(taken), pytest.fail)
        assert digests(taken)["initial_checkpoint"] == digests(began)["initial_checkpoint"]
    other = config(tmp_path, initial_checkpoint="checkpoints/b")
    with pytest.raises(ConfigError, match=r"initial_checkpoint: .* checkpoints/b, and .* step 2"):
        check_resumed(other, digests(other), pytest.fail)
    write_run_checkpoint(cuts, RUN_CHECKPOINT)  # of a release that did not say
    check_resumed(other, digests(other), pytest.fail)
    assert "initial_checkpoint" not in digests(other)


def test_a_run_checkpoint_of_before_settings_were_kept_is_taken(tmp_path, ledger) -> None:
    write_run_checkpoint(tmp_path / "run" / "cuts", RUN_CHECKPOINT)
    settings = config(tmp_path)
    check_resumed(settings, digests(settings), print)


def test_a_start_that_failed_before_the_first_group_may_be_made_again(tmp_path, ledger) -> None:
    again = config(tmp_path, resume=False)
    check_resumed(again, {}, pytest.fail)
    ledger.issue([(0, "g0")], 0)
    with pytest.raises(ConfigError, match=r"holds a run; give resume: true \(--resume\)"):
        check_resumed(again, {}, pytest.fail)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [([], r"holds a run; give resume: true"), (["--resume", "--seed=4"], "seed: is 4")],
)
def test_a_run_that_is_refused_starts_no_services(tmp_path, ledger, flags, refused) -> None:
    """They are not even read."""
    write_run_checkpoint(tmp_path / "run" / "cuts", RUN_CHECKPOINT)
    run = tmp_path / "run.yaml"
    run.write_text(config(tmp_path, resume=False).model_dump_json(exclude_unset=True))
    with pytest.raises(ConfigError, match=refused):
        asyncio.run(cli.train([str(run), "--up", str(tmp_path / "none.yaml"), *flags]))


def test_a_copy_is_told_from_a_directory_that_was_moved(tmp_path: Path) -> None:
    """Whatever bytes their names are of."""
    original = tmp_path / os.fsdecode(b"run-\xff")
    ledger = Ledger(original / LEDGER)
    run_id = ledger.run_id
    assert notice_copy(original, ledger) is None
    assert notice_copy(original, ledger) is None  # once more, by what it left
    ledger.close()
    moved = tmp_path / "moved"
    original.rename(moved)
    ledger = Ledger(moved / LEDGER)
    assert notice_copy(moved, ledger) is None
    ledger.close()
    shutil.copytree(moved, original)
    copied = Ledger(original / LEDGER)
    assert notice_copy(original, copied) == moved
    assert copied.run_id != run_id
    assert notice_copy(original, copied) is None  # it is a run of its own
    copied.close()


@pytest.mark.parametrize(
    "content", [b"", b"..", b"\xff\xfe", b"a\0b", b"/" * 5000, b"/" + b"x" * 5000, b"relative"]
)
def test_a_damaged_note_of_the_place_makes_no_copy(tmp_path: Path, content: bytes) -> None:
    ledger = Ledger(tmp_path / "run" / LEDGER)
    run_id = ledger.run_id
    (tmp_path / "run" / PLACE).write_bytes(content)
    assert notice_copy(tmp_path / "run", ledger) is None
    assert ledger.run_id == run_id
    assert (tmp_path / "run" / PLACE).read_bytes() == os.fsencode((tmp_path / "run").resolve())
    ledger.close()
