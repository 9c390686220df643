"""HF tensors to a rank's share of a Megatron tensor and back, by the words of its rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sluice.weights.rules.rule import Cut, Pack
from sluice.weights.rules.weight_map import Binding


class PartitionError(ValueError):
    """A tensor cannot be divided over so many ranks."""


@dataclass(frozen=True)
class Partition:
    """The share of tensor-parallel rank `rank` of `size`; `padded_vocab` counts rows."""

    rank: int = 0
    size: int = 1
    padded_vocab: int = 0


@dataclass(frozen=True)
class Slice:
    """Part start..stop (exclusive) along `axis` of the HF tensor `name`."""

    name: str
    axis: int
    start: int
    stop: int


def source_slices(binding: Binding, partition: Partition) -> tuple[Slice, ...]:
    """What a rank must read to make its share, one slice for every source.

    Raises PartitionError when the tensor does not divide evenly.
    """
    if binding.pack is Pack.QKV:
        first, last = _groups(binding, partition)
        heads = [source.shape[0] // binding.groups for source in binding.sources]
        bounds = [(0, first * rows, last * rows) for rows in heads]
    elif binding.cut is Cut.NONE:
        bounds = [(0, 0, source.shape[0]) for source in binding.sources]
    else:
        axis = 0 if binding.cut is Cut.ROWS else 1
        bounds = [_share(binding, axis, s.shape[axis], partition) for s in binding.sources]
    return tuple(
        Slice(source.name, *bound) for source, bound in zip(binding.sources, bounds, strict=True)
    )


def pack(binding: Binding, parts: Sequence[torch.Tensor], partition: Partition) -> torch.Tensor:
    """A rank's share of the Megatron tensor from its `source_slices`, in their order."""
    if binding.pack is Pack.QKV:
        return _pack_groups(binding, parts, partition)
    if binding.pack is Pack.GATED:
        return torch.cat(tuple(parts))
    (part,) = parts
    if not binding.padded:
        return part
    rows = partition.padded_vocab // partition.size
    return torch.nn.functional.pad(part, (0, 0) * (part.dim() - 1) + (0, rows - part.shape[0]))


def unpack(binding: Binding, shares: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The HF tensors from the shares of all tensor-parallel ranks, in rank order.

    The inverse of `pack`: padding is dropped; a tensor that is not cut is taken from rank 0.
    """
    if binding.cut is Cut.NONE:
        whole = [shares[0]]
    elif binding.pack is Pack.QKV:
        whole = _split_groups(binding, torch.cat(tuple(shares)))
    elif binding.pack is Pack.GATED:
        halves = [share.chunk(2) for share in shares]
        whole = [torch.cat([half[index] for half in halves]) for index in (0, 1)]
    else:
        whole = [torch.cat(tuple(shares), dim=0 if binding.cut is Cut.ROWS else 1)]
    if binding.padded:
        whole = [whole[0][: binding.sources[0].shape[0]]]
    return {s.name: tensor for s, tensor in zip(binding.sources, whole, strict=True)}


def share_shape(binding: Binding, partition: Partition) -> tuple[int, ...]:
    """Shape of a rank's share of the Megatron tensor."""
    shape = list(binding.shape)
    if binding.padded:
        shape[0] = partition.padded_vocab
    if binding.cut is not Cut.NONE:
        axis = 0 if binding.cut is Cut.ROWS else 1
        shape[axis] = _divide(binding, shape[axis], partition)
    return tuple(shape)


def padded_rows(rows: int, *, multiple: int, size: int) -> int:
    """`rows` filled up so that each of `size` ranks holds a multiple of `multiple` rows."""
    step = multiple * size
    return (rows + step - 1) // step * step


def _share(binding: Binding, axis: int, length: int, partition: Partition) -> tuple[int, int, int]:
    whole = partition.padded_vocab if binding.padded else length
    if whole < length:
        raise PartitionError(f"{binding.megatron!r}: {length} rows in a vocabulary of {whole}")
    step = _divide(binding, whole, partition)
    start = partition.rank * step
    return axis, min(start, length), min(start + step, length)


def _divide(binding: Binding, length: int, partition: Partition) -> int:
    if length % partition.size:
        raise PartitionError(
            f"{binding.megatron!r}: {length} does not divide over {partition.size} ranks"
        )
    return length // partition.size


def _group_rows(binding: Binding) -> int:
    return binding.shape[0] // binding.groups


def _groups(binding: Binding, partition: Partition) -> tuple[int, int]:
    """The KV groups that a rank's rows lie in; with more ranks than groups, parts of one."""
    step, rows = _divide(binding, binding.shape[0], partition), _group_rows(binding)
    start = partition.rank * step
    return start // rows, -(-(start + step) // rows)


def _pack_groups(
    binding: Binding, parts: Sequence[torch.Tensor], partition: Partition
) -> torch.Tensor:
    first, last = _groups(binding, partition)
    rest = parts[0].shape[1:]
    grouped = [part.reshape(last - first, -1, *rest) for part in parts]
    packed = torch.cat(grouped, dim=1).reshape(-1, *rest)
    step = _divide(binding, binding.shape[0], partition)
    start = partition.rank * step - first * _group_rows(binding)
    return packed[start : start + step]


def _split_groups(binding: Binding, packed: torch.Tensor) -> list[torch.Tensor]:
    rest = packed.shape[1:]
    sizes = [source.shape[0] // binding.groups for source in binding.sources]
    grouped = torch.split(packed.reshape(binding.groups, -1, *rest), sizes, dim=1)
    return [part.reshape(-1, *rest) for part in grouped]
