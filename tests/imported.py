"""A checkpoint as a version of a store."""

from __future__ import annotations

import shutil
from pathlib import Path

from sluice.weights.checkpoint import companion_files, describe_shard, shard_paths
from sluice.weights.store import StoredVersion, WeightStore


def import_checkpoint(
    store: WeightStore, source: Path, parent: int | None, step: int
) -> StoredVersion:
    """Copy a HF checkpoint in safetensors into the store as a new version."""
    paths = shard_paths(source)
    staging = store.allocate(parent)
    try:
        for path in paths:
            shutil.copyfile(path, staging.directory / path.name)
        shards = [describe_shard(staging.directory / path.name) for path in paths]
        return store.commit(staging, shards, companion_files(source), step)
    except BaseException:
        store.abort(staging)
        raise
