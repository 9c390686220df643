"""Two versions that are promised, then written; tells what each call has promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sluice.weights.checkpoint import describe_shard, encode_header
from sluice.weights.store import WeightStore


def scenario(root: Path, tell: Callable[[str], object]) -> None:
    store = WeightStore(root / "store", durable=False)
    parent = None
    header, _ = encode_header({"w": ("U8", (64,))})
    for number in (1, 2):
        staging = store.allocate(parent)
        tell(f"allocated {staging.version}")
        kept = root / f"{number}.safetensors"  # as a rank has it in memory
        kept.write_bytes(header + bytes([number]) * 64)
        promised = store.promise(staging, [describe_shard(kept)], [Path(__file__)], number)
        tell(f"promised {promised.version} {promised.digest}")
        store.pin(promised.version, "engine")
        kept.rename(staging.directory / kept.name)
        parent = store.fulfil(staging).version
        tell(f"fulfilled {parent}")
