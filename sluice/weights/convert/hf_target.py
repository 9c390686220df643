"""Layout of an HF checkpoint: safetensors shards of bounded size and their index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.weights.checkpoint import INDEX_NAME, SINGLE_NAME
from sluice.weights.convert.pieces import Content
from sluice.weights.convert.work import Group, OutputFile, Task
from sluice.weights.header import encode_header, parse_extents
from sluice.weights.shards import DTYPE_NAMES


@dataclass(frozen=True)
class Part:
    """Content that fills an HF tensor, or the part of expert `index` of one."""

    name: str
    content: Content
    index: int | None = None
    count: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that it belongs to."""
        return self.content.shape if self.index is None else (self.count, *self.content.shape)


def lay_out_hf(
    groups: Sequence[tuple[str, Sequence[Part]]], *, max_file_bytes: int
) -> tuple[tuple[OutputFile, ...], tuple[Group, ...], dict[str, bytes]]:
    """Files, work and the index of tensors given in groups, each under a name.

    A shard is closed when the next tensor would make it larger than `max_file_bytes`.
    """
    tensors = {part.name: part for _, parts in groups for part in parts}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, part in tensors.items():
        size = part.content.size * part.count
        if shards[-1] and filled + size > max_file_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files, places = [], {}
    for number, names in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = SINGLE_NAME if len(shards) == 1 else file_name
        described = {n: (DTYPE_NAMES[tensors[n].content.dtype], tensors[n].shape) for n in names}
        header, _ = encode_header(described)
        extents = parse_extents(header, file_name=file_name)
        size = max((extent.end for extent in extents.values()), default=len(header))
        files.append(OutputFile(file_name, size, ((0, header),)))
        places.update({name: (file_name, extent.begin) for name, extent in extents.items()})
    work = tuple(Group(name, tuple(_task(part, places) for part in ps)) for name, ps in groups)
    texts = {}
    if len(shards) > 1:
        texts[INDEX_NAME] = _index(tensors, {name: place[0] for name, place in places.items()})
    return tuple(files), work, texts


def _task(part: Part, places: dict[str, tuple[str, int]]) -> Task:
    file_name, offset = places[part.name]
    if part.index is None:
        return Task(part.name, part.content, file_name, offset)
    at = offset + part.index * part.content.size
    return Task(f"{part.name}[{part.index}]", part.content, file_name, at)


def _index(tensors: dict[str, Part], weight_map: dict[str, str]) -> bytes:
    total = sum(part.content.size * part.count for part in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()
