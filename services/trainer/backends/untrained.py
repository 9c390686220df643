"""Layers of multi-token prediction that a backend does not train: published as they were.

transformers does not load them. Engines that draft by them look for them in every version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from sluice.json_values import load_json
from sluice.weights.checkpoint import shard_paths
from sluice.weights.prediction import predicts


def untrained_names(directory: Path, published: Collection[str]) -> tuple[str, ...]:
    """Names of layers of multi-token prediction in a HF checkpoint, but for `published` ones."""
    config = load_json((directory / "config.json").read_bytes())
    found: set[str] = set()
    for path in shard_paths(directory):
        with safe_open(path, framework="pt", device="cpu") as file:
            found.update(name for name in file.keys() if predicts(name, config))  # noqa: SIM118
    return tuple(sorted(found - set(published)))


def untrained_tensors(
    directory: Path, names: Sequence[str], *, rank: int, world_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's part of `names`, one at a time, as the checkpoint in `directory` has them.

    With those of the other ranks it is every name once.
    """
    mine = set(names[rank::world_size])
    if not mine:
        return
    for path in shard_paths(directory):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in sorted(mine.intersection(file.keys())):
                yield {name: file.get_tensor(name)}
