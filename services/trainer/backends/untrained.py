"""Layers of multi-token prediction that a backend does not train: published as they were.

transformers does not load them. Engines that draft by them look for them in every version.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from sluice.weights.checkpoint import load_json, shard_paths

APART = re.compile(r"(?:model\.)?mtp\..+")
IN_STACK = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\..+")


def untrained_names(directory: Path, published: Collection[str]) -> tuple[str, ...]:
    """Names of the layers of multi-token prediction in a HF checkpoint, but for `published` ones.

    They are named apart, or follow the layers that `config.json` counts.
    """
    config = load_json((directory / "config.json").read_bytes())
    layers = config.get("text_config", config).get("num_hidden_layers")
    found = set()
    for path in shard_paths(directory):
        with safe_open(path, framework="pt", device="cpu") as file:
            found.update(name for name in file.keys() if _predicts(name, layers))  # noqa: SIM118
    return tuple(sorted(found - set(published)))


def _predicts(name: str, layers: int | None) -> bool:
    if APART.fullmatch(name):
        return True
    place = IN_STACK.fullmatch(name)
    return place is not None and layers is not None and int(place[1]) >= layers


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
