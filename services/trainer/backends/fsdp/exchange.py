"""Whole tensors of the parts that ranks have, and parts of whole ones: by data and tensor ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from services.trainer.backends.fsdp.tensor_parallel import TensorCut


def gather_rows(
    part: torch.Tensor, length: int, to: int, group: dist.ProcessGroup
) -> torch.Tensor | None:
    """All `length` rows on one rank of the group, None elsewhere; the last ranks may have fewer."""
    size = group.size()
    if size == 1:
        return part
    rows = -(-length // size)
    if len(part) < rows:
        part = torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
    mine = group.rank() == to
    whole = part.new_empty(rows * size, *part.shape[1:]) if mine else None
    shares = list(whole.chunk(size)) if whole is not None else None
    dist.gather(part.contiguous(), shares, dst=dist.get_global_rank(group, to), group=group)
    return None if whole is None else whole[:length]


def scatter_rows(
    whole: torch.Tensor | None, like: torch.Tensor, length: int, of: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """What `gather_rows` gathered, or of its form, from the rank `of` of the group to all.

    `like`: the part that this rank gave.
    """
    size = group.size()
    if size == 1:
        assert whole is not None
        return whole
    rows = -(-length // size)
    shares = None
    if whole is not None:
        padded = whole.new_zeros(rows * size, *whole.shape[1:])
        padded[:length] = whole
        shares = list(padded.chunk(size))
    part = like.new_empty(rows, *like.shape[1:])
    dist.scatter(part, shares, src=dist.get_global_rank(group, of), group=group)
    return part[: len(like)]


def all_parts(part: torch.Tensor, cut: TensorCut | None, group: dist.ProcessGroup) -> torch.Tensor:
    """Put together the parts of all tensor ranks, on each of them; whole where there is no cut."""
    if cut is None:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return join_parts(parts, cut)


def own_part(whole: torch.Tensor, cut: TensorCut | None, group: dist.ProcessGroup) -> torch.Tensor:
    """The part of this tensor rank."""
    if cut is None:
        return whole
    pieces = [matrix.chunk(group.size(), cut.dim) for matrix in whole.chunk(cut.matrices, cut.dim)]
    return torch.cat([each[group.rank()] for each in pieces], cut.dim)


def join_parts(parts: list[torch.Tensor], cut: TensorCut) -> torch.Tensor:
    """Put together what was cut, of several matrices in one each by itself."""
    by_rank = [part.chunk(cut.matrices, cut.dim) for part in parts]
    in_order = [piece for matrix in zip(*by_rank, strict=True) for piece in matrix]
    return torch.cat(in_order, cut.dim)
