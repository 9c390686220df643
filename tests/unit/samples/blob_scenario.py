"""Blobs put, pinned, let go and collected; tells what each call has promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sluice.samples.blob_store import BlobStore


def scenario(root: Path, tell: Callable[[str], object]) -> None:
    store = BlobStore(root, sync=False)
    kept = store.put(b"kept").digest
    tell(f"put {kept}")
    store.pin("ledger", [kept])
    tell(f"pinned {kept}")
    for number in range(2):
        passing = store.put(b"passing %d" % number).digest
        store.pin("ledger", [passing])
        store.put(b"passing %d" % number)
        store.unpin("ledger", [passing])
        tell(f"free {passing}")
    store.pin("engine", [kept])
    store.collect(grace_seconds=-5)  # even the youngest
    tell("collected")
    store.unpin("engine")
    tell("unpinned")
    _, one, _, two = store.put_all([b"kept", b"one!", b"one!", b"two!"])
    tell(f"put {one.digest}")
    tell(f"put {two.digest}")
    store.pin("ledger", [one.digest])
    tell(f"pinned {one.digest}")
