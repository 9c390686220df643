"""DirectoryJournals and the spool: what is durable of a rollout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.episodes import spool as spool_module
from services.rollout.episodes.spool import (
    ABANDONED_SECONDS,
    TOGETHER,
    DirectoryJournals,
    Spool,
    StoreFailedError,
)
from sluice.samples.arrow import decode_group, read_metadata
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample
from tests.durable_disk import DurableDisk
from tests.open_files import open_below
from tests.patience import PATIENCE


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, sync=False)


def journals(blobs: BlobStore) -> DirectoryJournals:
    return DirectoryJournals(blobs.root, blobs, sync=False)


def put(blobs: BlobStore, *texts: str) -> dict[str, BlobReference]:
    return {text: blobs.put(text.encode()) for text in texts}


def samples(group_id: str) -> list[Sample]:
    return [
        Sample(
            sample_id=f"{group_id}/{i}",
            group_id=group_id,
            token_ids=np.arange(4, dtype=np.int32),
            prompt_length=2,
            columns={"reward": float(i)},
        )
        for i in range(2)
    ]


@pytest.mark.parametrize("request_id", ["plain", "a/../b", "x.settled", "ünï", "a b.open"])
def test_progress_survives_the_process(blobs: BlobStore, request_id: str) -> None:
    first = journals(blobs)
    assert first.open(request_id, "body").finished == {}
    groups = put(blobs, "a", "b")
    first.record(request_id, groups)
    first.cancel(request_id, ["c"])
    for settled in (False, True):
        if settled:
            first.settle(request_id, keep=5)
        progress = journals(blobs).open(request_id, "other body")
        assert (progress.body, progress.finished) == ("body", groups)
        assert progress.cancelled == {"c"}
    assert blobs.pinned(f"rollout/{request_id}") == {blob.digest for blob in groups.values()}
    assert blobs.owners() == [f"rollout/{request_id}"]


def test_a_line_torn_by_a_crash_is_forgotten_for_good(blobs: BlobStore) -> None:
    store = journals(blobs)
    store.open("r", "body")
    store.record("r", put(blobs, "a"))
    path = blobs.root / "rollouts" / "r.open"
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        progress = journals(blobs).open("r", "body")
        assert progress.finished.keys() <= {"a"}
        store.record("r", put(blobs, "b"))
        again = journals(blobs).open("r", "body")
        assert again.finished.keys() == progress.finished.keys() | {"b"}, f"cut at {cut}"


def test_a_line_cut_off_by_a_full_disk_spoils_no_other(blobs: BlobStore) -> None:
    store = journals(blobs)
    store.open("r", "body")
    path = blobs.root / "rollouts" / "r.open"
    store.record("r", put(blobs, "a"))
    whole = path.stat().st_size
    store.record("r", put(blobs, "b"))
    for size in range(whole, path.stat().st_size):
        data = path.read_bytes()[:size]
        path.write_bytes(data)
        store.record("r", put(blobs, "c"))  # by a process that has not read it anew
        assert journals(blobs).open("r", "body").finished.keys() == {"a", "c"}, f"cut at {size}"
        path.write_bytes(data)
        store.record("r", put(blobs, "b"))


def test_a_flipped_bit_costs_a_line_and_neither_moves_nor_bars_a_group(blobs: BlobStore) -> None:
    store = journals(blobs)
    store.open("r", "body")
    groups = put(blobs, "group-0", "group-1", "group-2")
    store.record("r", groups)
    store.cancel("r", ["c"])
    path = blobs.root / "rollouts" / "r.open"
    whole = path.read_bytes()
    for index in range(len(whole)):
        changed = whole[index] ^ (1 << index % 7)
        path.write_bytes(whole[:index] + bytes([changed]) + whole[index + 1 :])
        progress = journals(blobs).open("r", "body")
        assert (progress.body, progress.cancelled - {"c"}) == ("body", set()), index
        assert progress.finished.items() <= groups.items(), index
        assert len(progress.finished) > 0, index  # those that are whole stay


def test_a_rollout_settled_in_the_middle_of_a_write_keeps_the_line(blobs: BlobStore) -> None:
    def cancel_and_settle(name: str) -> None:
        store = journals(blobs)
        store.open(name, "body")
        calls = [lambda: store.cancel(name, ["c"]), lambda: store.settle(name, keep=999)]
        for future in [pool.submit(call) for call in calls]:
            future.result()
        progress = store.open(name, "body")
        assert (progress.body, progress.cancelled) == ("body", {"c"})
        assert not (blobs.root / "rollouts" / f"{name}.open").exists()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for index in range(300):
                cancel_and_settle(f"r{index}")
    finally:
        sys.setswitchinterval(interval)


def test_what_is_forgotten_is_not_begun_again_by_a_late_write(blobs: BlobStore) -> None:
    store = journals(blobs)
    store.open("r", "body")
    store.record("r", put(blobs, "a"))
    store.settle("r", keep=0)
    store.cancel("r", ["c"])
    with pytest.raises(FileNotFoundError):
        store.record("r", put(blobs, "b"))
    assert list((blobs.root / "rollouts").iterdir()) == []
    store.settle("another", keep=0)
    assert blobs.owners() == []
    assert store.open("r", "another body").body == "another body"


def test_what_is_recorded_while_its_rollout_is_forgotten_stays_pinned_by_nobody(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, unpin, late = journals(blobs), blobs.unpin, put(blobs, "b")

    def unpin_before_a_record(owner: str) -> None:
        unpin(owner)
        with contextlib.suppress(FileNotFoundError):
            store.record("r", late)

    store.open("r", "body")
    store.record("r", put(blobs, "a"))
    with monkeypatch.context() as patched:
        patched.setattr(blobs, "unpin", unpin_before_a_record)
        store.settle("r", keep=0)
    store.settle("another", keep=0)
    assert blobs.owners() == []


def test_what_a_crash_leaves_pinned_without_a_journal_is_unpinned_later(blobs: BlobStore) -> None:
    store = journals(blobs)
    blobs.pin("record/r", [blob.digest for blob in put(blobs, "of another kind").values()])
    for name in ("running", "kept", "forgotten"):
        store.open(name, "body")
        store.record(name, put(blobs, name))
    store.settle("kept", keep=9)
    (blobs.root / "rollouts" / "forgotten.open").unlink()
    store.settle("another", keep=9)
    assert set(blobs.owners()) == {"record/r", "rollout/running", "rollout/kept"}


def test_two_workers_that_begin_a_rollout_at_once_agree(blobs: BlobStore) -> None:
    first, second = journals(blobs), journals(blobs)
    first.open("r", "body")
    path = blobs.root / "rollouts" / "r.open"
    path.write_bytes(
        path.read_bytes() + path.read_bytes().replace(b'body": "body', b'body": "late')
    )
    second.record("r", put(blobs, "a"))
    progress = second.open("r", "late")
    assert (progress.body, progress.finished.keys()) == ("body", {"a"})


def test_what_has_just_settled_is_the_latest_though_the_clock_was_set_back(
    blobs: BlobStore,
) -> None:
    store = journals(blobs)
    for name in ("first", "second", "last"):
        store.open(name, "body")
        store.record(name, put(blobs, name))
        store.settle(name, keep=2)
        later = time.time() + 3600  # as it was when they were written
        if name != "last":
            os.utime(blobs.root / "rollouts" / f"{name}.settled", (later, later))
    assert store.open("last", "body").finished.keys() == {"last"}
    assert "rollout/last" in blobs.owners()


def test_retention_keeps_the_latest_settled_and_all_that_go_on(blobs: BlobStore) -> None:
    store = journals(blobs)
    now = time.time()
    for age, name in enumerate(["new", "middle", "old"]):
        store.open(name, "body")
        store.record(name, put(blobs, name))
        store.settle(name, keep=9)
        os.utime(blobs.root / "rollouts" / f"{name}.settled", (now - age, now - age))
    for name, age in (("running", 3600.0), ("abandoned", ABANDONED_SECONDS + 60)):
        store.open(name, "body")
        store.record(name, put(blobs, name))
        os.utime(blobs.root / "rollouts" / f"{name}.open", (now - age, now - age))
    store.open("last", "body")
    store.settle("last", keep=3)
    names = {path.name for path in (blobs.root / "rollouts").iterdir()}
    assert names == {"new.settled", "middle.settled", "last.settled", "running.open"}
    assert set(blobs.owners()) == {"rollout/new", "rollout/middle", "rollout/running"}


async def test_groups_spooled_together_share_a_write(blobs: BlobStore) -> None:
    spool = Spool(blobs, journals(blobs))
    await spool.open("r", "body")
    references = await asyncio.gather(
        *(spool.put("r", samples(f"g{i}"), {"answer": str(i)}) for i in range(5))
    )
    for i, reference in enumerate(references):
        data = blobs.get(reference)
        assert [sample.sample_id for sample in decode_group(data)] == [f"g{i}/0", f"g{i}/1"]
        assert read_metadata(data) == {"answer": str(i)}
    progress = await spool.open("r", "body")
    assert progress.finished == {f"g{i}": references[i] for i in range(5)}
    await spool.close()


def test_what_a_journal_says_outlives_the_machine(tmp_path: Path) -> None:
    """From the call that says it on, and from the first one in a new store."""
    disk = DurableDisk(tmp_path)
    with disk.in_use():
        blobs = BlobStore(tmp_path)
        journal = DirectoryJournals(tmp_path, blobs, sync=True)
        for say, said in (
            (lambda: journal.open("r", "the request"), b"the request"),
            (lambda: journal.record("r", put(blobs, "finished")), b"finished"),
            (lambda: journal.cancel("r", ["not wanted"]), b"not wanted"),
        ):
            say()
            (inode,) = disk.entries("rollouts").values()
            assert said in disk.contents[inode]


async def test_groups_spooled_together_share_the_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, waits, sync = TOGETHER, 0, os.fsync

    def counted(descriptor: int) -> None:
        nonlocal waits
        waits += 1
        sync(descriptor)

    blobs = BlobStore(tmp_path)
    spool = Spool(blobs, DirectoryJournals(tmp_path, blobs, sync=True))
    await spool.open("r", "body")
    monkeypatch.setattr(os, "fsync", counted)
    await asyncio.gather(*(spool.put("r", samples(f"g{i}"), {}) for i in range(count)))
    assert count > 8 and waits <= 5  # the file and its names; pins and theirs; the journal
    await spool.close()


@pytest.mark.parametrize(("tokens", "files"), [(1, 9), (1 << 22, 1)])
async def test_groups_share_a_file_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, files: int
) -> None:
    monkeypatch.setattr(spool_module, "TOKENS_TOGETHER", tokens)
    blobs = BlobStore(tmp_path)
    spool = Spool(blobs, DirectoryJournals(tmp_path, blobs, sync=False))
    await spool.open("r", "body")
    await asyncio.gather(*(spool.put("r", samples(f"g{i}"), {}) for i in range(9)))
    await spool.close()
    assert inodes(tmp_path) == (9, files)


def inodes(store: Path) -> tuple[int, int]:
    """Names of blobs, and files."""
    paths = list(store.glob("blobs/" + "?" * 32))
    return len(paths), len({path.stat().st_ino for path in paths})


async def test_any_number_of_groups_that_end_at_once_leave_others_files_to_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls and engines need some as well."""
    blobs, open_files = BlobStore(tmp_path), list[int]()
    spool = Spool(blobs, journals(blobs))
    await spool.open("r", "body")
    before = len(open_below(tmp_path))
    monkeypatch.setattr(os, "fsync", lambda _: open_files.append(len(open_below(tmp_path))))
    names = [f"g{i}" for i in range(3 * TOGETHER)]
    await asyncio.gather(*(spool.put("r", samples(name), {}) for name in names))
    assert open_files and max(open_files) - before <= 16
    assert (await spool.open("r", "body")).finished.keys() == set(names)
    await spool.close()


async def test_a_store_that_cannot_be_written_is_a_typed_error(
    blobs: BlobStore, tmp_path: Path
) -> None:
    spool = Spool(blobs, journals(blobs))
    await spool.open("r", "body")
    (tmp_path / "rollouts" / "r.open").unlink()
    (tmp_path / "rollouts" / "r.open").mkdir()
    puts = [spool.put("r", samples(f"g{i}"), {}) for i in range(2)]
    for outcome in await asyncio.gather(*puts, return_exceptions=True):
        assert isinstance(outcome, StoreFailedError)
    await spool.close()


async def test_a_bug_in_the_writer_leaves_nobody_waiting(blobs: BlobStore) -> None:
    spool = Spool(blobs, journals(blobs))
    await spool.open("r", "body")
    broken = [Sample(sample_id="s", group_id="g", token_ids=np.zeros(1), prompt_length=1)]
    bad = Sample(
        sample_id="s", group_id="g", token_ids=np.zeros(1), prompt_length=1, columns={"no": 1.0}
    )
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(ValueError, match="unknown"):
            await spool.put("r", [*broken, bad], {})
        await spool.put("r", samples("g"), {})
    await spool.close()


async def test_a_group_that_cannot_be_stored_fails_alone(blobs: BlobStore) -> None:
    """Beside others of its batch, of its rollout too."""
    store = journals(blobs)
    spool = Spool(blobs, store)
    for request_id in ("r", "s", "forgotten"):
        await spool.open(request_id, "body")
    store.settle("forgotten", keep=0)
    wrong: dict[str, Any] = {"answer": 5}
    puts = {
        "bug": spool.put("r", samples("bug"), wrong),
        "beside": spool.put("r", samples("beside"), {}),
        "late": spool.put("forgotten", samples("late"), {}),
        "other": spool.put("s", samples("other"), {}),
    }
    outcomes = await asyncio.gather(*puts.values(), return_exceptions=True)
    kinds = dict(zip(puts, map(type, outcomes), strict=True))
    assert issubclass(kinds.pop("bug"), TypeError | AttributeError)
    assert kinds == {"beside": BlobReference, "late": StoreFailedError, "other": BlobReference}
    assert (await spool.open("r", "body")).finished.keys() == {"beside"}
    assert (await spool.open("s", "body")).finished.keys() == {"other"}
    await spool.close()


async def test_a_cancelled_write_is_waited_for(blobs: BlobStore) -> None:
    go, store = threading.Event(), journals(blobs)
    spool = Spool(blobs, store)
    await spool.open("r", "body")
    record = store.record

    def held_record(request_id: str, groups: Mapping[str, BlobReference]) -> None:
        assert go.wait(PATIENCE)
        record(request_id, groups)

    store.record = held_record  # type: ignore[method-assign]
    writes = [asyncio.create_task(spool.put("r", samples(f"g{i}"), {})) for i in range(2)]
    await asyncio.sleep(0)  # both have been put, for one batch
    writes[0].cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not writes[0].done()
    go.set()
    first, second = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError) and isinstance(second, BlobReference)
    assert (await spool.open("r", "body")).finished.keys() == {"g0", "g1"}
    await spool.close()
