"""Two versions, the first pinned and then removed; tells what each call has promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sluice.weights.checkpoint import describe_shard, encode_header
from sluice.weights.store import WeightStore


def scenario(root: Path, tell: Callable[[str], object]) -> None:
    store = WeightStore(root, durable=False)
    parent = None
    for number in (1, 2):
        staging = store.allocate(parent)
        tell(f"allocated {staging.version}")
        header, _ = encode_header({"w": ("U8", (64,))})
        path = staging.directory / "model.safetensors"
        path.write_bytes(header + bytes([number]) * 64)
        parent = store.commit(staging, [describe_shard(path)], [Path(__file__)], 0).version
        tell(f"committed {parent}")
        store.pin(parent, "engine")
        tell(f"pinned {parent}")
    store.unpin(1, "engine")
    store.retain(1)
    tell("removed 1")
