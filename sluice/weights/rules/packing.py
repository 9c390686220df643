"""HF tensors to a rank's share of a Megatron tensor and back, by the words of its rule.

Everything follows from one list: the runs of rows, in the order of the share, that each are
consecutive rows of one source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules.rule import Pack, ShardAxis
from sluice.weights.rules.weight_map import Binding, HfTensor

if TYPE_CHECKING:  # shapes are read by processes that have no torch
    import torch


# Of these a rank has its rows of every section
BY_SECTION = (Pack.GATED, Pack.SECTIONS, Pack.GROUPED_SECTIONS)


class PartitionError(ValueError):
    """A tensor cannot be divided over so many ranks."""


class InexactTensorError(InvalidCheckpointError):
    """A number would not come back as it was."""


@dataclass(frozen=True)
class Partition:
    """The share of tensor-parallel rank `rank` of `size`; `padded_vocab` counts rows."""

    rank: int = 0
    size: int = 1
    padded_vocab: int = 0


@dataclass(frozen=True)
class Slice:
    """Part start..stop (exclusive) along `axis` of the HF tensor `name`, as it is stored.

    `index` is the expert where the tensor holds all of them; `axis` counts after that.
    """

    name: str
    axis: int
    start: int
    stop: int
    index: int | None = None


@dataclass(frozen=True)
class RowCopy:
    """`rows` rows of source number `source` from `start` on, at `row` of the share."""

    source: int
    start: int
    rows: int
    row: int


def row_runs(binding: Binding, partition: Partition) -> tuple[RowCopy, ...]:
    """List the rows of a rank's share in order, padding left out.

    Raises PartitionError when the tensor does not divide evenly.
    """
    if binding.cut is not ShardAxis.ROWS:
        return tuple(_place((0, 0, source.part[0]) for source in binding.sources))
    if binding.pack in BY_SECTION:
        return tuple(_place(_section_shares(binding, partition)))
    whole = tuple(_place(_whole(binding)))
    rows = partition.padded_vocab if binding.padded else binding.shape[0]
    if rows < binding.shape[0]:
        raise PartitionError(
            f"{binding.megatron!r}: {binding.shape[0]} rows in a vocabulary of {rows}"
        )
    step = _divide(binding, rows, partition)
    first = partition.rank * step
    return tuple(_clip(whole, first, first + step))


def source_slices(binding: Binding, partition: Partition) -> tuple[Slice, ...]:
    """List what a rank must read to make its share, one slice for every source.

    Raises PartitionError when the tensor does not divide evenly.
    """
    if binding.cut is ShardAxis.COLUMNS:
        return tuple(
            Slice(s.name, int(not s.transposed), *_share(binding, s.part[1], partition), s.index)
            for s in binding.sources
        )
    bounds = _bounds(binding, row_runs(binding, partition))
    return tuple(
        Slice(source.name, int(source.transposed), *bound, source.index)
        for source, bound in zip(binding.sources, bounds, strict=True)
    )


def pack(binding: Binding, parts: Sequence[torch.Tensor], partition: Partition) -> torch.Tensor:
    """Make a rank's share of the Megatron tensor of its `source_slices`, in their order.

    Raises InexactTensorError where Pack.SHIFTED would lose a bit.
    """
    import torch

    if binding.pack is Pack.SHIFTED:
        return _shift(binding, parts[0])
    if binding.rearranged:
        parts = [_arrange(*pair) for pair in zip(binding.sources, parts, strict=True)]
    if binding.cut is ShardAxis.COLUMNS:
        return parts[0]
    runs = row_runs(binding, partition)
    bounds = _bounds(binding, runs)
    pieces = [
        parts[run.source][run.start - bounds[run.source][0] :][: run.rows]
        for run in runs
        if run.rows
    ]
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [parts[0][:0]])
    if binding.pack is Pack.SWAPPED:
        return _swap(packed)
    if not binding.padded:
        return packed
    missing = partition.padded_vocab // partition.size - packed.shape[0]
    return torch.nn.functional.pad(packed, (0, 0) * (packed.dim() - 1) + (0, missing))


def unpack(binding: Binding, shares: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make the HF tensors of the shares of all tensor-parallel ranks, in rank order.

    The inverse of `pack`: padding is dropped; a tensor that is not cut is taken from rank 0. Of a
    tensor that holds all experts this is the part of the binding's own.
    """
    whole = _unpack(binding, shares)
    return {source.name: _as_stored(source, whole[source.name]) for source in binding.sources}


def _unpack(binding: Binding, shares: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    if binding.pack is Pack.SHIFTED:
        return {binding.sources[0].name: _unshift(binding, shares[0])}
    if binding.cut is ShardAxis.COLUMNS:
        return {binding.sources[0].name: torch.cat(tuple(shares), dim=1)}
    parts: list[list[tuple[int, torch.Tensor]]] = [[] for _ in binding.sources]
    ranks = 1 if binding.cut is ShardAxis.NONE else len(shares)
    padded = sum(share.shape[0] for share in shares)
    for rank in range(ranks):
        for run in row_runs(binding, Partition(rank, ranks, padded)):
            parts[run.source].append((run.start, shares[rank][run.row : run.row + run.rows]))
    whole = {}
    for source, pieces in zip(binding.sources, parts, strict=True):
        ordered = [piece for _, piece in sorted(pieces, key=lambda item: item[0])]
        whole[source.name] = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
    if binding.pack is Pack.SWAPPED:
        return {name: _swap(tensor) for name, tensor in whole.items()}
    return whole


def share_shape(binding: Binding, partition: Partition) -> tuple[int, ...]:
    """Return the shape of a rank's share of the Megatron tensor."""
    shape = list(binding.shape)
    if binding.padded:
        shape[0] = partition.padded_vocab
    if binding.cut is not ShardAxis.NONE:
        axis = 0 if binding.cut is ShardAxis.ROWS else 1
        shape[axis] = _divide(binding, shape[axis], partition)
    return tuple(shape)


def padded_rows(rows: int, *, multiple: int, size: int) -> int:
    """`rows` filled up so that each of `size` ranks holds a multiple of `multiple` rows."""
    step = multiple * size
    return (rows + step - 1) // step * step


def _whole(binding: Binding) -> Iterator[tuple[int, int, int]]:
    """(source, start, rows) of the uncut tensor."""
    sections = binding.sections()
    if binding.pack not in (Pack.QKV, Pack.GATED_QKV):
        yield from sections
        return
    query, *others = sections
    for group in range(binding.groups):
        for source, start, rows in _heads(binding, query, group):
            yield source, start, rows
        for source, start, rows in others:
            step = rows // binding.groups
            yield source, start + group * step, step


def _heads(
    binding: Binding, query: tuple[int, int, int], group: int
) -> Iterator[tuple[int, int, int]]:
    """List the query rows of a group; with gates, those of all its heads, then their gates."""
    source, start, rows = query
    step = rows // binding.groups
    first = start + group * step
    if binding.pack is Pack.QKV:
        yield source, first, step
        return
    width = rows // binding.heads // 2
    for gate in (0, 1):
        for head in range(binding.heads // binding.groups):
            yield source, first + (2 * head + gate) * width, width


def _section_shares(binding: Binding, partition: Partition) -> Iterator[tuple[int, int, int]]:
    for source, start, rows in binding.sections():
        step = _divide(binding, rows, partition)
        if binding.pack is not Pack.GROUPED_SECTIONS:
            yield source, start + partition.rank * step, step
            continue
        groups = _divide(binding, binding.groups, partition)
        stride, width = binding.sources[source].part[0] // binding.groups, rows // binding.groups
        for group in range(partition.rank * groups, (partition.rank + 1) * groups):
            yield source, group * stride + start // binding.groups, width


def _place(parts: Iterator[tuple[int, int, int]]) -> Iterator[RowCopy]:
    row = 0
    for source, start, rows in parts:
        yield RowCopy(source, start, rows, row)
        row += rows


def _clip(runs: Sequence[RowCopy], first: int, last: int) -> Iterator[RowCopy]:
    """Cut rows first..last, counted from `first`."""
    for run in runs:
        low, high = max(run.row, first), min(run.row + run.rows, last)
        if low < high:
            yield RowCopy(run.source, run.start + low - run.row, high - low, low - first)


def _bounds(binding: Binding, runs: Sequence[RowCopy]) -> list[tuple[int, int]]:
    """First and last row of every source that the runs touch."""
    bounds = []
    for index, source in enumerate(binding.sources):
        touched = [run for run in runs if run.source == index]
        end = source.part[0]
        if source.alternating:  # taken whole, to be put in order
            bounds.append((0, end))
            continue
        bounds.append(
            (min(r.start for r in touched), max(r.start + r.rows for r in touched))
            if touched
            else (end, end)
        )
    return bounds


def _share(binding: Binding, length: int, partition: Partition) -> tuple[int, int]:
    step = _divide(binding, length, partition)
    return partition.rank * step, (partition.rank + 1) * step


def _divide(binding: Binding, length: int, partition: Partition) -> int:
    if length % partition.size:
        raise PartitionError(
            f"{binding.megatron!r}: {length} does not divide over {partition.size} ranks"
        )
    return length // partition.size


def _arrange(source: HfTensor, stored: torch.Tensor) -> torch.Tensor:
    """Put rows where the rules count them."""
    import torch

    rows = stored.T if source.transposed else stored
    if not source.alternating:
        return rows
    return torch.cat([rows[section :: len(source.rows)] for section in range(len(source.rows))])


def _as_stored(source: HfTensor, rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `_arrange`."""
    if source.alternating:
        rows = rows.unflatten(0, (len(source.rows), -1)).transpose(0, 1).flatten(0, 1)
    return rows.T.contiguous() if source.transposed else rows


def _shift(binding: Binding, tensor: torch.Tensor) -> torch.Tensor:
    shifted = tensor - 1
    if not (shifted + 1).equal(tensor):  # exact from 0.5 to 2, where a norm's weights are
        raise InexactTensorError(f"{binding.sources[0].name!r} less 1 cannot be stored exactly")
    return shifted


def _swap(tensor: torch.Tensor) -> torch.Tensor:
    """Exchange the halves of the columns."""
    return tensor.roll(tensor.shape[1] // 2, dims=1)


def _unshift(binding: Binding, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1
