"""The likeliest tokens of rows of logits, also where each rank has a part of the vocabulary.

Which they are is settled for any logits: the largest, and of equal ones those of the lowest ids;
how the rows or the vocabulary are cut does not matter.
"""

from __future__ import annotations

import torch

from sluice.algo.collectives import Collectives

NO_TOKEN = 1 << 40  # an id behind all others: a part of the vocabulary may have too few


def find_likeliest(logits_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `count` largest logits of each row, falling, and their columns, int64[R, K].

    Of equals the lower column comes first. Where there are too few columns -inf follows, of
    NO_TOKEN. A NaN counts as the largest.
    """
    columns = logits_RV.shape[1]
    found = min(count, columns)
    values_RK, ids_RK = logits_RV.topk(min(found + 1, columns), dim=1)
    if found and found < columns:
        (tied_N,) = torch.nonzero(values_RK[:, found - 1] == values_RK[:, found], as_tuple=True)
        least_N1 = values_RK[tied_N, found - 1][:, None]
        values_RK, ids_RK = values_RK[:, :found], ids_RK[:, :found].clone()
        if len(tied_N):  # which of the equals `topk` took is anybody's guess
            ids_RK[tied_N] = _lowest(logits_RV[tied_N], least_N1, found)
    values_RK, ids_RK = _in_order(logits_RV.gather(1, ids_RK), ids_RK)
    missing = (0, count - found)
    pad = torch.nn.functional.pad
    return pad(values_RK, missing, value=-torch.inf), pad(ids_RK, missing, value=NO_TOKEN)


def merge_likeliest(
    values_TK: torch.Tensor, ids_TK: torch.Tensor, ranks: Collectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `find_likeliest` has of all columns, from what it has of each rank's.

    Ids are those of the whole vocabulary. Every rank has the same rows.
    """
    rows, count = values_TK.shape

    def gather(local_TK: torch.Tensor) -> torch.Tensor:
        whole = ranks.all_gather(local_TK).view(ranks.size, rows, count)
        return whole.transpose(0, 1).reshape(rows, ranks.size * count)

    values, ids = _in_order(gather(values_TK), gather(ids_TK))
    return values[:, :count].contiguous(), ids[:, :count].contiguous()


def _lowest(logits_NV: torch.Tensor, least_N1: torch.Tensor, count: int) -> torch.Tensor:
    """The columns above `least` (the `count`-th largest), and the lowest of those that equal it."""
    above = ~(logits_NV <= least_N1)  # a NaN is
    equal = logits_NV == least_N1
    room_N1 = count - above.sum(1, keepdim=True)
    taken = above | (equal & (equal.cumsum(1) <= room_N1))
    return taken.nonzero()[:, 1].view(len(logits_NV), count)


def _in_order(values_RK: torch.Tensor, ids_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By falling value, then by rising id."""
    ids_RK, order = ids_RK.sort(dim=1)
    values_RK, by_value = values_RK.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values_RK, ids_RK.gather(1, by_value)
