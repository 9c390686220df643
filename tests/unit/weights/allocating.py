"""A process that takes numbers of a store. Imports no torch: it is there soon."""

from __future__ import annotations

import multiprocessing

from sluice.weights.store import WeightStore


def allocate_many(root: str, count: int, found: multiprocessing.Queue[list[int]]) -> None:
    store = WeightStore(root, durable=False)
    versions = []
    for _ in range(count):
        staging = store.allocate(None)
        versions.append(staging.version)
        store.abort(staging)
    found.put(versions)
