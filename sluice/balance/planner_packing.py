"""Bin packing under a token cap: as few bins as the best of several first-fits, costs evened out.

A fixed number of bins is filled by spreading pieces over them, largest first, and by exchanges.
"""

from __future__ import annotations

import heapq
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


# Sides of an exchange that are looked at, and how even is even enough.
_NEIGHBOURS = 4


_LIGHT_CANDIDATES = 4


_TOLERANCE = 2e-4


@dataclass
class Arrangement:
    """Pieces in bins. `rooms[b]`, `loads[b]` and `sizes[b]` follow from `bin_of[p]`."""

    tokens: np.ndarray  # int64[pieces]
    costs: np.ndarray  # float64[pieces]
    bin_of: np.ndarray  # int64[pieces]
    rooms: np.ndarray  # int64[bins]; never below zero
    loads: np.ndarray  # float64[bins]
    sizes: np.ndarray  # int64[bins]

    def move(self, piece: int, target: int) -> None:
        source = self.bin_of[piece]
        for index, sign in ((source, -1), (target, 1)):
            self.loads[index] += sign * self.costs[piece]
            self.rooms[index] -= sign * self.tokens[piece]
            self.sizes[index] += sign
        self.bin_of[piece] = target


def split_pieces(
    packed: Sequence[Sequence[RowCluster]], table: RowCosts, count: int
) -> list[list[RowCluster]]:
    """Halve the costliest pieces of several rows until there are `count` pieces, if rows suffice.

    A shared prompt is then encoded more than once: cheaper than a micro-batch without work.
    """
    content = [list(pieces) for pieces in packed]
    missing = count - sum(len(pieces) for pieces in content)
    heap = [
        (-piece.cost, place, piece.rows)
        for place, pieces in enumerate(content)
        for piece in pieces
        if len(piece.rows) > 1
    ]
    heapq.heapify(heap)
    for _ in range(missing):
        if not heap:
            break
        _, place, rows = heapq.heappop(heap)
        content[place] = [piece for piece in content[place] if piece.rows != rows]
        ordered = sorted(rows, key=lambda row: (-table.costs[row], row))
        for half in (ordered[::2], ordered[1::2]):
            piece = RowCluster(tuple(half), table.tokens_of(half), table.cost_of(half))
            content[place].append(piece)
            if len(half) > 1:
                heapq.heappush(heap, (-piece.cost, place, piece.rows))
    return content


def spread(packed: Sequence[Sequence[RowCluster]], count: int, cap: int) -> Arrangement:
    """Arrange the pieces of `packed` in `count` bins, the costliest bin as light as found.

    A bin stays empty only if there are fewer pieces than bins. `packed` must not have more
    than `count` bins: it is the arrangement when spreading anew does not fit.
    """
    assert len(packed) <= count
    pieces = [piece for content in packed for piece in content]
    tokens = np.array([piece.tokens for piece in pieces], dtype=np.int64)
    costs = np.array([piece.cost for piece in pieces], dtype=np.float64)
    as_packed = np.repeat(np.arange(len(packed)), [len(content) for content in packed])
    choices = [
        _arrange(tokens, costs, bin_of, count, cap)
        for bin_of in (
            _largest_first(costs, tokens, count, cap),
            _largest_first(tokens.astype(np.float64), tokens, count, cap),
        )
        if bin_of is not None
    ]
    if not choices:
        choices = [_arrange(tokens, costs, as_packed, count, cap)]
        fill_empty_bins(choices[0])
    return min(choices, key=lambda choice: float(choice.loads.max(initial=0.0)))


def fill_empty_bins(arrangement: Arrangement) -> None:
    """Move half of the heaviest bin of several pieces into each empty bin."""
    for empty in np.flatnonzero(arrangement.sizes == 0).tolist():
        donors = np.flatnonzero(arrangement.sizes > 1)
        if not len(donors):
            return
        donor = int(donors[arrangement.loads[donors].argmax()])
        content = np.flatnonzero(arrangement.bin_of == donor)
        for piece in content[np.argsort(-arrangement.costs[content], kind="stable")][1:].tolist():
            if arrangement.loads[empty] + arrangement.costs[piece] <= arrangement.loads[donor]:
                arrangement.move(piece, empty)


def even_out(arrangement: Arrangement, container_of: np.ndarray, rounds: int) -> None:
    """Exchange pieces between containers of bins until their loads are even.

    `container_of[b]` is the container of bin b, -1 to leave a bin alone. Each of at most
    `rounds` exchanges lowers the load of the heaviest container and keeps the caps.
    """
    used = container_of >= 0
    count = int(container_of.max(initial=-1)) + 1
    if count < 2:
        return
    loads = np.bincount(container_of[used], weights=arrangement.loads[used], minlength=count)
    mean = float(loads.mean())
    for _ in range(rounds):
        heavy = int(loads.argmax())
        for light in np.argsort(loads, kind="stable")[:_LIGHT_CANDIDATES].tolist():
            gap = float(loads[heavy] - loads[light])
            if gap <= _TOLERANCE * mean:
                return
            moved = _exchange(arrangement, container_of, heavy, light, gap)
            if moved > 0:
                loads[heavy] -= moved
                loads[light] += moved
                break
        else:
            return


def _largest_first(keys: np.ndarray, tokens: np.ndarray, count: int, cap: int) -> np.ndarray | None:
    """Give each piece, largest key first, to the bin of the least key that has room.

    Longest processing time first (Graham 1969) under a cap; None when a piece finds no room.
    """
    bin_of = np.empty(len(keys), dtype=np.int64)
    loads = np.zeros(count)
    rooms = np.full(count, cap, dtype=np.int64)
    alone = np.flatnonzero(tokens > cap)
    bin_of[alone] = np.arange(len(alone))
    rooms[: len(alone)] = 0
    loads[: len(alone)] = keys[alone]
    open_loads = loads.copy()
    for piece in np.lexsort((np.arange(len(keys)), -keys)).tolist():
        size = int(tokens[piece])
        if size > cap:
            continue
        target = int(open_loads.argmin())
        if rooms[target] < size:
            fitting = np.flatnonzero(rooms >= size)
            if not len(fitting):
                return None
            target = int(fitting[loads[fitting].argmin()])
        bin_of[piece] = target
        rooms[target] -= size
        loads[target] += keys[piece]
        open_loads[target] = loads[target] if rooms[target] else np.inf
    return bin_of


def _arrange(
    tokens: np.ndarray, costs: np.ndarray, bin_of: np.ndarray, count: int, cap: int
) -> Arrangement:
    used = np.bincount(bin_of, weights=tokens, minlength=count).astype(np.int64)
    return Arrangement(
        tokens=tokens,
        costs=costs,
        bin_of=bin_of,
        rooms=np.maximum(cap - used, 0),  # a piece over the cap leaves no room
        loads=np.bincount(bin_of, weights=costs, minlength=count),
        sizes=np.bincount(bin_of, minlength=count),
    )


def _exchange(
    arrangement: Arrangement, container_of: np.ndarray, heavy: int, light: int, gap: float
) -> float:
    """Do the move or swap that best halves `gap`; returns the cost moved, 0.0 if none helps."""
    container = container_of[arrangement.bin_of]
    ours, theirs = np.flatnonzero(container == heavy), np.flatnonzero(container == light)
    best_move = _best_move(arrangement, ours, np.flatnonzero(container_of == light), gap)
    best_swap = _best_swap(arrangement, ours, theirs, gap)
    if best_move is None and best_swap is None:
        return 0.0
    if best_swap is None or (best_move is not None and best_move[0] <= best_swap[0]):
        assert best_move is not None
        _, piece, target = best_move
        arrangement.move(piece, target)
        return float(arrangement.costs[piece])
    _, piece, other = best_swap
    source, target = int(arrangement.bin_of[piece]), int(arrangement.bin_of[other])
    arrangement.move(piece, target)
    arrangement.move(other, source)
    return float(arrangement.costs[piece] - arrangement.costs[other])


def _best_move(
    arrangement: Arrangement, ours: np.ndarray, bins: np.ndarray, gap: float
) -> tuple[float, int, int] | None:
    """(distance from half the gap, piece, bin) of the best move into the roomiest bin."""
    target = int(bins[arrangement.rooms[bins].argmax()])
    costs = arrangement.costs[ours]
    allowed = (
        (costs > 0)
        & (costs < gap)
        & (arrangement.tokens[ours] <= arrangement.rooms[target])
        & (arrangement.sizes[arrangement.bin_of[ours]] > 1)  # never make a dummy
    )
    if not allowed.any():
        return None
    distance = np.where(allowed, np.abs(costs - gap / 2), np.inf)
    best = int(distance.argmin())
    return float(distance[best]), int(ours[best]), target


def _best_swap(
    arrangement: Arrangement, ours: np.ndarray, theirs: np.ndarray, gap: float
) -> tuple[float, int, int] | None:
    """(distance from half the gap, our piece, their piece) of the best swap."""
    if not len(theirs) or not len(ours):
        return None
    theirs = theirs[np.argsort(arrangement.costs[theirs], kind="stable")]
    costs = arrangement.costs[theirs]
    nearest = np.searchsorted(costs, arrangement.costs[ours] - gap / 2)
    offsets = np.arange(_NEIGHBOURS) - _NEIGHBOURS // 2
    positions = np.clip(nearest[:, None] + offsets, 0, len(theirs) - 1)
    others = theirs[positions]
    difference = arrangement.costs[ours][:, None] - costs[positions]
    growth = arrangement.tokens[ours][:, None] - arrangement.tokens[others]
    allowed = (
        (difference > 0)
        & (difference < gap)
        & (growth <= arrangement.rooms[arrangement.bin_of[others]])
        & (-growth <= arrangement.rooms[arrangement.bin_of[ours]][:, None])
    )
    if not allowed.any():
        return None
    distance = np.where(allowed, np.abs(difference - gap / 2), np.inf)
    row, column = np.unravel_index(int(distance.argmin()), distance.shape)
    return float(distance[row, column]), int(ours[row]), int(others[row, column])
