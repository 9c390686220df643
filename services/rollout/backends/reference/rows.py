"""Which lane lies in which row of the cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from services.rollout.backends.reference.attention import DecodeBlock
from services.rollout.backends.reference.kv_cache import CacheShape, RowStore, capacity_for


class CacheRows:
    """Stores by row size. A lane is known by its packed index: by row size, then by row.

    `place`, `free` and `promote` break that order; `order` tells how to restore it.
    """

    def __init__(self, shape: CacheShape, max_length: int) -> None:
        self._shape, self._max_length = shape, max_length
        self._stores: dict[int, RowStore] = {}
        self._members: dict[int, list[int]] = {}  # capacity -> packed index of each row

    def place(self, prompt: torch.Tensor, members: Sequence[int]) -> None:
        """Rows that begin with `prompt` [layers, 2, kv_heads, length, head_dim]."""
        capacity = self._store(prompt.shape[3] + 1)
        self._stores[capacity].extend(prompt, len(members))
        self._members[capacity].extend(members)

    def free(self, gone: Collection[int]) -> None:
        """Give back the rows of some packed indices."""
        for capacity, members in self._members.items():
            kept = [row for row, member in enumerate(members) if member not in gone]
            if len(kept) < len(members):
                self._keep(capacity, kept)

    def promote(self, places: Sequence[int]) -> None:
        """Move lanes whose next token, at places[packed index], is beyond their row."""
        for capacity in sorted(self._members):
            members = self._members[capacity]
            leaving = [row for row, member in enumerate(members) if places[member] >= capacity]
            if leaving:
                larger = self._store(capacity + 1)
                self._stores[larger].adopt(self._stores[capacity], leaving)
                self._members[larger].extend(members[row] for row in leaving)
                gone = set(leaving)
                self._keep(capacity, [row for row in range(len(members)) if row not in gone])

    def order(self) -> list[int]:
        """Packed indices in the order they should have; they count as renumbered so."""
        order: list[int] = []
        for capacity in sorted(self._members):
            members = self._members[capacity]
            self._members[capacity] = list(range(len(order), len(order) + len(members)))
            order += members
        return order

    def blocks(self, places: Sequence[int], *, whole_rows: bool) -> list[DecodeBlock]:
        """Attention blocks in packed order; places[i] is where the next token of lane i goes.

        With `whole_rows` a lane attends to all of its row, masked, whatever others need.
        """
        device, blocks = self._shape.device, []
        for capacity in sorted(self._members):
            if not (members := self._members[capacity]):
                continue
            mine = places[members[0] : members[-1] + 1]
            positions = torch.tensor(mine, device=device)
            heads = torch.arange(len(mine) * self._shape.kv_heads, device=device)
            each = positions.repeat_interleave(self._shape.kv_heads)
            blocks.append(
                DecodeBlock(
                    kv=self._stores[capacity].kv,
                    slots=heads * capacity + each,
                    positions=positions,
                    length=max(mine) + 1,
                    attended=capacity if whole_rows else 0,
                    uniform=not whole_rows and min(mine) == max(mine),
                )
            )
        return blocks

    def _keep(self, capacity: int, rows: list[int]) -> None:
        members = self._members[capacity]
        self._members[capacity] = [members[row] for row in self._stores[capacity].keep(rows)]

    def _store(self, length: int) -> int:
        capacity = capacity_for(length, self._max_length)
        if capacity not in self._stores:
            self._stores[capacity] = RowStore(self._shape, capacity)
            self._members[capacity] = []
        return capacity
