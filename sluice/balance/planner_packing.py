"""Bin packing under a token cap: as few micro-batches as the best of several first-fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

N = TypeVar("N", int, float)


@dataclass(frozen=True, kw_only=True)
class RowCosts:
    """Tokens and costs of rows. Rows of one group in one bin share `prompt_*`.

    A row that shares nothing is a group of its own.
    """

    tokens: Sequence[int]
    costs: Sequence[float]
    groups: Sequence[int]
    prompt_tokens: Sequence[int]
    prompt_costs: Sequence[float]

    def tokens_of(self, rows: Sequence[int]) -> int:
        """Return the tokens of these rows in one bin: each group's prompt once, all responses."""
        if len(rows) == 1:
            return self.tokens[rows[0]]
        return self._add_up(rows, self.tokens, self.prompt_tokens)

    def cost_of(self, rows: Sequence[int]) -> float:
        """Return the cost of these rows in one bin."""
        if len(rows) == 1:
            return self.costs[rows[0]]
        return self._add_up(rows, self.costs, self.prompt_costs)

    def shared_tokens(self, bins: Sequence[Sequence[int]]) -> int:
        """Return the tokens of the prompts in all bins, which siblings in one bin share."""
        firsts = {(place, self.groups[row]): row for place, rows in enumerate(bins) for row in rows}
        return sum([self.prompt_tokens[row] for row in firsts.values()])

    def _add_up(self, rows: Sequence[int], whole: Sequence[N], prompt: Sequence[N]) -> N:
        firsts = {self.groups[row]: row for row in rows}.values()
        return sum([whole[row] - prompt[row] for row in rows]) + sum(
            [prompt[row] for row in firsts]
        )


@dataclass(frozen=True)
class RowCluster:
    """Rows that stay together: one row, or rows of one group that share a prompt."""

    rows: tuple[int, ...]
    tokens: int
    cost: float


class _Rooms:
    """Room left in bins numbered from 0; finds the first with enough in O(log n).

    A tournament tree (Johnson 1973): node i holds the largest room below it, and node
    `leaves + b` the room of bin b.
    """

    def __init__(self, count: int, cap: int) -> None:
        self.leaves = 1 << max(0, count - 1).bit_length()
        self.tree = [cap] * (2 * self.leaves)

    def first_with(self, need: int) -> int:
        tree, leaves = self.tree, self.leaves
        assert tree[1] >= need
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < need:
                node += 1
        return node - leaves

    def take(self, index: int, amount: int) -> None:
        tree = self.tree
        node = index + self.leaves
        tree[node] -= amount
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            largest = left if left > right else right
            if tree[node] == largest:
                return
            tree[node] = largest


def first_fit(table: RowCosts, order: Sequence[int], cap: int) -> list[list[int]]:
    """Put each row into a bin that holds its prompt, else the first with room, else a new one.

    A row over the cap gets a bin that nothing joins.
    """
    total = sum(map(table.tokens.__getitem__, order))
    # Two bins of a first-fit together hold more than one cap.
    rooms = _Rooms(min(len(order), 2 * total // cap + 2), cap)
    bins: list[list[int]] = []
    alone: list[list[int]] = []
    homes: dict[int, list[int]] = {}
    tokens, groups, prompt_tokens = table.tokens, table.groups, table.prompt_tokens
    tree, leaves = rooms.tree, rooms.leaves
    for row in order:
        whole, group = tokens[row], groups[row]
        if whole > cap:
            alone.append([row])
            continue
        added = whole - prompt_tokens[row]
        places = homes.get(group)
        if places is None:
            places = homes[group] = []
        for place in places:
            if tree[leaves + place] >= added:
                break
        else:
            place, added = rooms.first_with(whole), whole
            places.append(place)
            if place == len(bins):
                bins.append([])
        bins[place].append(row)
        rooms.take(place, added)
    return alone + bins


def pack(table: RowCosts, rows: Sequence[int], cap: int, step: int = 1) -> list[list[RowCluster]]:
    """Pack into the fewest bins found, counted in full steps of `step` bins.

    Never more steps than first-fit in the given order or by falling length. Of equal counts
    the packing that repeats the fewest prompts is taken.
    """
    falling = sorted(rows, key=lambda row: (-table.tokens[row], row))
    candidates = [first_fit(table, falling, cap), first_fit(table, rows, cap)]
    chunks, chunk_tokens = _whole_groups(table, rows, cap)
    shares = len(chunks) < len(rows)
    if shares:
        candidates.append(first_fit(table, [row for chunk in chunks for row in chunk], cap))
    fewest = 0 if shares else min_bin_count([table.tokens[row] for row in rows], cap)
    if min(map(len, candidates)) > fewest:
        filled = fill_bins(chunk_tokens, cap)
        if filled is not None:
            candidates.append([[row for chunk in bin_ for row in chunks[chunk]] for bin_ in filled])
    steps = [-(-len(bins) // step) for bins in candidates]
    equal = [bins for bins, count in zip(candidates, steps, strict=True) if count == min(steps)]
    best = min(equal, key=table.shared_tokens) if shares and len(equal) > 1 else equal[0]
    return [_pieces_of(table, content) for content in best]


def min_bin_count(tokens: Sequence[int], cap: int) -> int:
    """Returns a lower bound on the bins any packing needs: L2 of Martello and Toth (1990).

    Items over the cap count as one bin each.
    """
    sizes = np.sort(np.minimum(np.asarray(tokens, dtype=np.int64), cap))
    if not len(sizes):
        return 0
    sums = np.concatenate(([0], np.cumsum(sizes)))
    small_end = int(np.searchsorted(sizes, cap // 2, side="right"))  # sizes[:small_end] <= cap/2
    # For every threshold: items too large to meet one of it, large ones, and those between.
    thresholds = np.unique(np.concatenate(([0], sizes[:small_end])))
    small_start = np.searchsorted(sizes, thresholds, side="left")
    huge_start = np.searchsorted(sizes, cap - thresholds, side="right")
    large_count = len(sizes) - small_end
    spare = (huge_start - small_end) * cap - (sums[huge_start] - sums[small_end])
    unplaced = np.maximum(0, sums[small_end] - sums[small_start] - spare)
    return int(large_count + np.max(-(-unplaced // cap)))


def _whole_groups(
    table: RowCosts, rows: Sequence[int], cap: int
) -> tuple[list[list[int]], list[int]]:
    """Groups and their tokens, the largest first; one over the cap is cut."""
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(table.groups[row], []).append(row)
    chunks = []
    for group in members.values():
        group.sort(key=lambda row: (-table.tokens[row], row))
        chunks += [group] if table.tokens_of(group) <= cap else first_fit(table, group, cap)
    falling = sorted((-table.tokens_of(chunk), chunk[0], chunk) for chunk in chunks)
    return [chunk for _, _, chunk in falling], [-negative for negative, _, _ in falling]


def _pieces_of(table: RowCosts, content: Sequence[int]) -> list[RowCluster]:
    members: dict[int, list[int]] = {}
    for row in content:
        members.setdefault(table.groups[row], []).append(row)
    return [
        RowCluster(tuple(rows), table.tokens_of(rows), table.cost_of(rows))
        for rows in members.values()
    ]


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
