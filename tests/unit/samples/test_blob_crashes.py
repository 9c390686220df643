"""Blobs and pins under kill -9, torn writes, and a collector that runs beside writers."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import xxhash

from sluice.durable import LockTimeoutError, locked
from sluice.samples.blob_store import BlobStore, PinBoard
from sluice.samples.blobs import BlobNotFoundError, BlobReference
from tests.patience import PATIENCE

HERE = Path(__file__).parent
CONTENTS = 200
REMOVALS = 150
CONTEXT = multiprocessing.get_context("fork")


def check(root: Path, told: list[str]) -> None:
    store = BlobStore(root, sync=False)
    digests = dict(reversed(line.split()) for line in told if " " in line)
    for path in (root / "blobs").glob("?" * 32):
        store.get(BlobReference(path.name, path.stat().st_size))  # whole, or an error
    for digest, promise in digests.items():
        if promise == "pinned":
            assert digest in store.pinned("ledger")
        if promise != "free":
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
        timeout=PATIENCE,
        env={"PYTHONPATH": str(HERE.parents[2])},
    )
    runs = sorted(tmp_path.glob("*.told"))
    assert len(runs) > 50
    for path in runs:
        check(path.with_suffix(""), path.read_text().splitlines())


def put_and_pin(root: Path, seed: int, stop: Event, failures: multiprocessing.Queue[str]) -> None:
    """Name contents that are old and unnamed by now, use them and let go of them."""
    store = BlobStore(root, sync=False)
    draw = random.Random(seed)
    while not stop.is_set():
        content = b"%d" % draw.randrange(CONTENTS)
        reference = BlobReference(xxhash.xxh3_128_hexdigest(content), len(content))
        put = draw.random() < 0.5  # else pin what may be collected this moment
        with locked(root / "aging.lock", shared=True):
            try:
                if put:
                    store.put(content)
                store.pin(f"batch/{seed}", [reference.digest])
            except BlobNotFoundError:
                if put:
                    failures.put(f"{content!r} was taken between its put and its pin")
                continue
        try:
            store.get(reference)
        except BlobNotFoundError:
            failures.put(f"{content!r} was taken in spite of its pin")
        store.unpin(f"batch/{seed}", [reference.digest] if draw.random() < 0.8 else None)


def fill_and_age(root: Path, stop: Event) -> None:
    """Keep all contents there and old, except between a put and its pin."""
    store = BlobStore(root, sync=False)
    while not stop.is_set():
        for number in range(CONTENTS):
            store.put(b"%d" % number)
        with locked(root / "aging.lock"):
            for path in root.glob("blobs/" + "?" * 32):
                with suppress(FileNotFoundError):
                    os.utime(path, (0, 0))


def collect_on(root: Path, stop: Event) -> None:
    """Collect until enough was removed for the races to have happened."""
    store = BlobStore(root, sync=False)
    removed = 0
    while removed < REMOVALS and not stop.is_set():
        removed += len(store.collect(grace_seconds=3600))
    stop.set()


def test_a_collector_beside_writers_takes_nothing_that_is_named(tmp_path: Path) -> None:
    failures: multiprocessing.Queue[str] = CONTEXT.Queue()
    stop = CONTEXT.Event()
    (tmp_path / "aging.lock").touch()
    processes = [
        CONTEXT.Process(target=fill_and_age, args=(tmp_path, stop)),
        CONTEXT.Process(target=collect_on, args=(tmp_path, stop)),
        *(
            CONTEXT.Process(target=put_and_pin, args=(tmp_path, seed, stop, failures))
            for seed in range(2)
        ),
    ]
    for process in processes:
        process.start()
    finished = stop.wait(PATIENCE)
    stop.set()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert failures.empty(), failures.get()
    assert finished, "the collector had nothing to do"


def stop_at(limit: int, act: Callable[[], object]) -> None:
    """Act in this process, which stops itself at its file operation number `limit`."""
    count = 0

    def watch(event: str, _: tuple[object, ...]) -> None:
        nonlocal count
        count += event.startswith(("open", "os.", "fcntl.")) and event != "os.kill"
        if count == limit:
            count += 1
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(watch)
    act()


def at_every_moment(act: Callable[[], object], meanwhile: Callable[[int], object]) -> Iterator[int]:
    """Start `act` in a process, stop it at operation 1, then 2 ..., do `meanwhile`, let it end.

    Yields the number of the operation after each run.
    """
    for limit in itertools.count(1):
        process = CONTEXT.Process(target=stop_at, args=(limit, act))
        process.start()
        assert process.pid is not None
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return
        try:
            meanwhile(limit)
        finally:
            os.kill(process.pid, signal.SIGCONT)
            _, status = os.waitpid(process.pid, 0)
        assert status == 0
        yield limit


def is_free(store: BlobStore) -> bool:
    """Whether the stopped process does not hold the lock."""
    try:
        with locked(store.root / "blobs.lock", timeout_seconds=0):
            return True
    except LockTimeoutError:
        return False


def make_old(store: BlobStore) -> None:
    for path in store.root.glob("blobs/" + "?" * 32):
        os.utime(path, (0, 0))


def test_what_is_named_at_any_moment_of_a_collection_stays(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, sync=False)
    late = store.put(b"late").digest
    store.put(b"again")
    make_old(store)
    named: set[str] = set()

    def name(_: int) -> None:
        if is_free(store):
            named.add(store.put(b"again").digest)
            with suppress(BlobNotFoundError):
                store.pin("late", [late])
                named.add(late)

    both = 0
    for _ in at_every_moment(lambda: store.collect(grace_seconds=3600), name):
        assert {digest for digest in named if store.exists(BlobReference(digest, 0))} == named
        both += len(named) == 2
        named.clear()
        store.unpin("late")
        store.put(b"late")
        store.put(b"again")
        make_old(store)
    assert both > 5


def test_a_collection_at_any_moment_of_a_pin_breaks_no_promise(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, sync=False)
    digest = store.put(b"old").digest
    make_old(store)

    def pin() -> None:
        with suppress(BlobNotFoundError):
            store.pin("ledger", [digest])

    def collect(_: int) -> None:
        if is_free(store):
            store.collect(grace_seconds=3600)

    pinned = 0
    for _ in at_every_moment(pin, collect):
        if digest in store.pinned("ledger"):
            pinned += 1
            assert store.exists(BlobReference(digest, 0))
        store.unpin("ledger")
        store.put(b"old")
        make_old(store)
    assert pinned > 2


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
