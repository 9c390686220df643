"""Bin packing by filling one bin after the other as full as the remaining items allow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Bits shifted before giving up: some hundredths of a second.
_WORK_ALLOWED = 1_000_000_000


class _Remaining:
    """Items in falling order of size, of which any can be taken out."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
        self._negative = [-sizes[item] for item in self.order]
        self._next = list(range(len(sizes) + 1))  # the first one left at or after a position

    def first_at_most(self, size: int, start: int) -> int:
        """Position of the largest item left, at or after `start`, of at most `size`."""
        return self.at_or_after(bisect_left(self._negative, -size, start))

    def at_or_after(self, position: int) -> int:
        """The first position left at or after this one; the number of items when none is."""
        root = position
        while self._next[root] != root:
            root = self._next[root]
        while self._next[position] != root:  # path compression
            self._next[position], position = root, self._next[position]
        return root

    def take(self, position: int) -> int:
        self._next[position] = position + 1
        return self.order[position]


def fill_bins(sizes: Sequence[int], cap: int) -> list[list[int]] | None:
    """Pack items into bins: the largest left, then what fills its bin best up to `cap`.

    The minimum bin slack heuristic of Gupta and Ho (1999) as modified by Fleszar and Hindi
    (2002), with subset sums as bits of an integer. Where several fillings are as full, the
    one of the largest items is taken. An item over the cap is alone. None when it would
    take too long.
    """
    left = _Remaining(sizes)
    bins: list[list[int]] = []
    work = 0
    while (seed := left.at_or_after(0)) < len(sizes):
        first = left.take(seed)
        room = max(0, cap - sizes[first])
        chosen, looked_at = _fullest_subset(left, sizes, room)
        bins.append([first, *(left.take(position) for position in chosen)])
        work += looked_at * room
        if work > _WORK_ALLOWED:
            return None
    return bins


def _fullest_subset(left: _Remaining, sizes: Sequence[int], room: int) -> tuple[list[int], int]:
    """Positions of items whose sum is the largest up to `room`, and how many were looked at.

    Bit s of `sums` is set when items looked at so far can add up to s.
    """
    sums, full, mask = 1, 1 << room, (2 << room) - 1
    steps: list[tuple[int, int]] = []  # (position, sums before it)
    position = left.first_at_most(room, 0)
    while position < len(sizes) and not sums & full:
        steps.append((position, sums))
        sums |= (sums << sizes[left.order[position]]) & mask
        position = left.at_or_after(position + 1)
    target = sums.bit_length() - 1
    chosen: list[int] = []
    for position, before in reversed(steps):
        if not before >> target & 1:
            chosen.append(position)
            target -= sizes[left.order[position]]
    return chosen, len(steps)
