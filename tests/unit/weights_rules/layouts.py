"""The Megatron side of every family as digests, kept in layouts.json.

`python -m tests.unit.weights_rules.layouts` writes it anew. It is right where test_megatron.py
of tests/converter passes, and by hand in test_layouts.py for what Megatron-Core has no layers of.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from sluice.weights.convert.torch_dist_source import Naming
from sluice.weights.rules.packing import Partition, pack, padded_rows, source_slices
from sluice.weights.rules.rule import Family
from sluice.weights.rules.shape import read_shape
from sluice.weights.rules.weight_map import Binding, WeightMap, family_of
from tests.unit.weights_rules.models import HUGGING_FACE

FILE = Path(__file__).with_name("layouts.json")
Layout = dict[str, str]


def config_of(name: str) -> dict[str, Any]:
    """`config.json` of a model, without making the model."""
    import transformers

    config_name, model_name, arguments = HUGGING_FACE[name]
    config = getattr(transformers, config_name)(**arguments).to_dict()
    return {**json.loads(json.dumps(config, default=str)), "architectures": [model_name]}


def layout_of(family: Family, config: dict[str, Any]) -> Layout:
    """A digest for every Megatron name, numbers in it left out: names, places and shares.

    Raises what a wrong table raises.
    """
    weights = WeightMap(family, read_shape(family, config))
    naming = Naming(weights, stacking="auto")
    hashers: dict[str, Any] = {}
    for binding in weights.bindings():
        hasher = hashers.setdefault(re.sub(r"\d+", "*", binding.megatron), xxhash.xxh3_64())
        place = naming.place(binding)
        described = [binding.megatron, binding.stage, binding.cut, binding.alias, binding.padded]
        described += [str(place), binding.section_keys, [c.name for c in binding.copies]]
        hasher.update(json.dumps(described).encode())
        hasher.update(shares_digest(binding, weights.shape.vocab))
    return {name: hasher.hexdigest() for name, hasher in sorted(hashers.items())}


@cache
def shares_digest(binding: Binding, vocab: int) -> bytes:
    """Of what one rank, and each of two, holds of tensors that are numbers by name."""
    hasher = xxhash.xxh3_64()
    for size in (1, 2):
        padded = padded_rows(vocab, multiple=4, size=size)
        for rank in range(size):
            own = share(binding, Partition(rank, size, padded))
            hasher.update(own.contiguous().numpy().tobytes() + str(own.shape).encode())
    digest: bytes = hasher.digest()
    return digest


def share(binding: Binding, partition: Partition) -> torch.Tensor:
    parts = []
    for part in source_slices(binding, partition):
        (source,) = (s for s in binding.sources if s.name == part.name)
        whole = numbers(source.name, source.shape)
        whole = whole if part.index is None else whole[part.index]
        bounds = slice(part.start, part.stop)
        parts.append(whole[bounds] if part.axis == 0 else whole[:, bounds])
    return pack(binding, parts, partition)


@cache
def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers from 1 to 2 that no other name has: multiples of a small power of two."""
    seed = xxhash.xxh32_intdigest(name.encode())
    generator = torch.Generator().manual_seed(seed)
    return 1 + torch.randint(0, 1 << 20, shape, generator=generator).float() / (1 << 20)


def main() -> None:
    layouts = {}
    for name in HUGGING_FACE:
        config = config_of(name)
        layouts[name] = layout_of(family_of(config), config)
    FILE.write_text(json.dumps(layouts, indent=1) + "\n")


if __name__ == "__main__":
    main()
