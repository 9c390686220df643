"""Blobs and pins under kill -9, torn writes, and a collector that runs beside writers."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from sluice.durable import LockTimeoutError, locked
from sluice.samples.blobs import BlobNotFoundError, BlobReference, BlobStore
from sluice.samples.pins import PinBoard

HERE = Path(__file__).parent
CONTEXT = multiprocessing.get_context("fork")


def check(root: Path, told: list[str]) -> None:
    store = BlobStore(root, sync=False)
    digests = dict(reversed(line.split()) for line in told if " " in line)
    for path in (root / "blobs").glob("??/*"):
        store.get(BlobReference(path.name, path.stat().st_size))  # whole, or an error
    for digest, promise in digests.items():
        if promise == "pinned":
            assert digest in store.pinned("ledger")
            store.get(BlobReference(digest, 4))
    late = store.put(b"late").digest
    store.pin("ledger", [late])
    store.collect(grace_seconds=-5)
    store.get(BlobReference(late, 4))
    for digest, promise in digests.items():
        assert store.exists(BlobReference(digest, 0)) is (promise == "pinned")
    assert "unpinned" not in told or store.owners() == ["ledger"]


def test_a_crash_at_any_operation_loses_nothing_promised(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, HERE.parent / "crash_points.py", HERE / "blob_scenario.py", tmp_path],
        check=True,
        timeout=120,
        env={"PYTHONPATH": str(HERE.parents[2])},
    )
    runs = sorted(tmp_path.glob("*.told"))
    assert len(runs) > 50
    for path in runs:
        check(path.with_suffix(""), path.read_text().splitlines())


def put_and_pin(root: Path, seed: int, failures: multiprocessing.Queue[str]) -> None:
    """Put contents that are old and unnamed already, pin, use and let go of them."""
    store = BlobStore(root, sync=False)
    draw = random.Random(seed)
    for _ in range(300):
        content = b"%d" % draw.randrange(6)
        try:
            with locked(root / "aging.lock", shared=True):
                reference = store.put(content)
                store.pin(f"batch/{seed}", [reference.digest])
            if store.get(reference) != content:
                failures.put(f"{content!r} has other bytes")
        except BlobNotFoundError as error:
            failures.put(f"{content!r}: {error}")
        store.unpin(f"batch/{seed}", [reference.digest] if draw.random() < 0.8 else None)


def age_and_collect(root: Path, stop: Event, removed: multiprocessing.Queue[int]) -> None:
    """Between a put and its pin no blob grows old; at any other time it may."""
    store = BlobStore(root, sync=False)
    count = 0
    while not stop.is_set():
        with locked(root / "aging.lock"):
            for path in root.glob("blobs/??/*"):
                os.utime(path, (0, 0))
        count += len(store.collect(grace_seconds=3600))
    removed.put(count)


def test_a_collector_beside_writers_takes_nothing_that_is_put_again(tmp_path: Path) -> None:
    failures: multiprocessing.Queue[str] = CONTEXT.Queue()
    removed: multiprocessing.Queue[int] = CONTEXT.Queue()
    stop = CONTEXT.Event()
    collector = CONTEXT.Process(target=age_and_collect, args=(tmp_path, stop, removed))
    writers = [
        CONTEXT.Process(target=put_and_pin, args=(tmp_path, seed, failures)) for seed in range(2)
    ]
    for process in (collector, *writers):
        process.start()
    for writer in writers:
        writer.join(60)
    stop.set()
    assert removed.get(timeout=30) > 10, "the collector had nothing to do"
    collector.join(30)
    assert [process.exitcode for process in (collector, *writers)] == [0, 0, 0]
    assert failures.empty(), failures.get()


def test_a_torn_pin_is_no_pin_and_spoils_no_other(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, sync=False)
    one, two, three = (store.put(text).digest for text in (b"1", b"2", b"3"))
    store.pin("ledger", [one, two])
    (path,) = (tmp_path / "blob_pins").iterdir()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        survivors = {digest for digest, end in ((one, 68), (two, 102)) if length >= end}
        assert store.pinned("ledger") == survivors
        store.pin("ledger", [three])
        assert store.pinned("ledger") == {*survivors, three}


def test_a_new_pin_file_is_never_taken_for_the_old_one(tmp_path: Path) -> None:
    """File systems give the inode of a removed file to the next one."""
    store = BlobStore(tmp_path, sync=False)
    old, new, later = (store.put(text).digest for text in (b"1", b"2", b"3"))
    board = PinBoard(tmp_path / "blob_pins")
    store.pin("batch", [old])
    board.refresh()
    store.unpin("batch")
    store.pin("batch", [new])
    store.pin("batch", [later])
    board.refresh()
    assert [board.names(digest) for digest in (old, new, later)] == [False, True, True]


def test_a_lock_held_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with (
        locked(path, shared=True),
        locked(path, shared=True, timeout_seconds=0),
        pytest.raises(LockTimeoutError, match=r"x\.lock"),
        locked(path, timeout_seconds=0.01),
    ):
        pass
    with locked(path, timeout_seconds=0):
        pass
