"""Key and value storage of running samples, in rows of a few sizes.

A running sample owns one row of the smallest size that holds it and moves to the next size
when it outgrows it. Rows in use are kept dense, so that attention reads a slice without a
gather and pays for at most twice the sample's own length, whatever its neighbours' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SMALLEST = 16


@dataclass(frozen=True)
class CacheShape:
    """What one token's keys and values look like."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def allocate(self, rows: int, capacity: int) -> torch.Tensor:
        """Zeros[layers, 2 (key, value), rows, kv_heads, capacity, head_dim].

        Zeroed since unwritten entries are read under a mask, where NaN would survive.
        """
        size = (self.layers, 2, rows, self.kv_heads, capacity, self.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)


def capacity_for(length: int, limit: int) -> int:
    """Smallest row size for `length` tokens: powers of two, the last one cut to `limit`."""
    capacity = SMALLEST
    while capacity < length:
        capacity *= 2
    return max(length, min(capacity, limit))


class RowStore:
    """Rows of one capacity; rows 0..count-1 are in use."""

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._shape = shape
        self.kv = shape.allocate(0, capacity)

    def extend(self, prompt: torch.Tensor, copies: int) -> None:
        """Append `copies` rows that start with `prompt` [layers, 2, kv_heads, length, head_dim]."""
        first, last = self.count, self.count + copies
        self._reserve(last)
        self.kv[:, :, first:last, :, : prompt.shape[3]] = prompt.unsqueeze(2)
        self.count = last

    def adopt(self, source: RowStore, rows: Sequence[int]) -> None:
        """Append copies of `rows` of a smaller store."""
        first, last = self.count, self.count + len(rows)
        self._reserve(last)
        index = torch.tensor(rows, device=self.kv.device)
        self.kv[:, :, first:last, :, : source.capacity] = source.kv.index_select(2, index)
        self.count = last

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Free all rows but `rows` (ascending); returns the kept ones in their new order.

        Entry i of the result is the old row that now is row i. Only rows beyond the new count
        move, into the holes below it.
        """
        count = len(rows)
        stay = [row for row in rows if row < count]
        movers = list(rows[len(stay) :])
        order = list(range(count))
        if movers:
            taken = set(stay)
            holes = [row for row in range(count) if row not in taken]
            for hole, mover in zip(holes, movers, strict=True):
                order[hole] = mover
            device = self.kv.device
            source = self.kv.index_select(2, torch.tensor(movers, device=device))
            self.kv.index_copy_(2, torch.tensor(holes, device=device), source)
        self.count = count
        return order

    def _reserve(self, rows: int) -> None:
        if rows <= self.kv.shape[2]:
            return
        grown = self._shape.allocate(max(rows, 2 * self.kv.shape[2]), self.capacity)
        grown[:, :, : self.count] = self.kv[:, :, : self.count]
        self.kv = grown
