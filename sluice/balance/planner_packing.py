"""Bin packing under a token cap: as few bins as the best of several first-fits, costs evened out.

A fixed number of bins is filled by spreading pieces over them, largest first, and by exchanges.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RowCosts:
    """Tokens and costs of N rows. Rows of one group in one bin share `prompt_*`.

    A row that shares nothing is a group of its own.
    """

    tokens: np.ndarray  # int64[N]
    costs: np.ndarray  # float64[N]
    groups: np.ndarray  # int64[N]
    prompt_tokens: np.ndarray  # int64[N]
    prompt_costs: np.ndarray  # float64[N]

    @property
    def own_tokens(self) -> np.ndarray:
        """What a row adds to a bin that holds its prompt."""
        return self.tokens - self.prompt_tokens


@dataclass(frozen=True)
class Pieces:
    """Rows that stay together: one row, or rows of one group that share a prompt."""

    rows: Sequence[Sequence[int]]  # of each piece
    tokens: np.ndarray  # int64[pieces]
    costs: np.ndarray  # float64[pieces]

    @classmethod
    def of(cls, table: RowCosts, rows: Sequence[Sequence[int]]) -> Pieces:
        """Add up what these rows take, siblings of one piece with one prompt."""
        if not rows:
            return cls([], np.empty(0, np.int64), np.empty(0))
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter(itertools.chain.from_iterable(rows), np.int64, int(counts.sum()))
        starts = np.cumsum(counts) - counts
        prompts, prompt_costs = table.prompt_tokens[flat], table.prompt_costs[flat]
        tokens = np.add.reduceat(table.tokens[flat] - prompts, starts) + prompts[starts]
        costs = np.add.reduceat(table.costs[flat] - prompt_costs, starts) + prompt_costs[starts]
        alone = counts == 1  # a difference and a sum would round
        costs[alone] = table.costs[flat[starts[alone]]]
        return cls(rows, tokens, costs)


@dataclass(frozen=True)
class PackedBins:
    """Pieces in bins: `bins[b]` are the pieces of bin b."""

    pieces: Pieces
    bins: Sequence[Sequence[int]]

    @property
    def bin_of(self) -> np.ndarray:
        """int64[pieces]."""
        bin_of = np.empty(len(self.pieces.rows), dtype=np.int64)
        for place, content in enumerate(self.bins):
            bin_of[content] = place
        return bin_of


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
    order_N = np.asarray(order, dtype=np.int64)
    total = int(table.tokens[order_N].sum())
    # Two bins of a first-fit together hold more than one cap.
    rooms = _Rooms(min(len(order), 2 * total // cap + 2), cap)
    bins: list[list[int]] = []
    alone: list[list[int]] = []
    homes: dict[int, list[int]] = {}
    tree, leaves = rooms.tree, rooms.leaves
    columns = (order_N, table.tokens[order_N], table.groups[order_N], table.own_tokens[order_N])
    for row, whole, group, added in zip(*(each.tolist() for each in columns), strict=True):
        if whole > cap:
            alone.append([row])
            continue
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


def pack(table: RowCosts, rows: np.ndarray, cap: int) -> PackedBins:
    """Pack siblings together, as far as they fit, the largest first. Quick, seldom the best."""
    pieces = _siblings(table, rows, cap)
    return PackedBins(pieces, _first_fit_falling(pieces.tokens.tolist(), cap))


_SPARE_BINS = 1 / 500  # of all that are needed: not worth the time that a search takes


def pack_tighter(table: RowCosts, rows: np.ndarray, cap: int, packed: PackedBins) -> PackedBins:
    """Return the packing of the fewest bins found, `packed` among others.

    The search ends where `_SPARE_BINS` or less of them could be spared.
    Never more than first-fit in the given order or by falling length, nor another one than
    `packed` without need: that repeats prompts.
    """
    bound, pieces = _bin_bound(table, rows, cap), packed.pieces
    falling = rows[np.lexsort((rows, -table.tokens[rows]))]
    methods: list[Callable[[], list[list[int]] | None]] = [
        lambda: first_fit(table, rows.tolist(), cap),
        lambda: _filled(pieces, cap, fewest),
    ]
    if len(pieces.rows) < len(rows):  # else `packed` is that already
        methods.insert(0, lambda: first_fit(table, falling.tolist(), cap))
    best, fewest = None, len(packed.bins)
    for method in methods:
        if fewest - bound <= bound * _SPARE_BINS:
            break
        bins = method()
        if bins is not None and len(bins) < fewest:
            best, fewest = bins, len(bins)
    return packed if best is None else _regroup(table, best)


def _filled(pieces: Pieces, cap: int, fewest: int) -> list[list[int]] | None:
    """Fill bins with whole pieces. None when that cannot take less than `fewest` of them."""
    if min_bin_count(pieces.tokens, cap) >= fewest:
        return None
    filled = fill_bins(pieces.tokens.tolist(), cap)
    if filled is None:
        return None
    return [[row for piece in content for row in pieces.rows[piece]] for content in filled]


def _siblings(table: RowCosts, rows: np.ndarray, cap: int) -> Pieces:
    """Groups, the largest first; one over the cap is cut."""
    groups, own = table.groups[rows], table.own_tokens
    order = np.lexsort((rows, -table.tokens[rows], groups))
    rows, groups = rows[order], groups[order]
    starts = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))[: len(rows)]
    ends = [*starts[1:].tolist(), len(rows)]
    if not len(rows):
        return Pieces.of(table, [])
    sizes = np.add.reduceat(own[rows], starts) + table.prompt_tokens[rows[starts]]
    listed, content = rows.tolist(), []
    for start, end, fits in zip(starts.tolist(), ends, (sizes <= cap).tolist(), strict=True):
        if fits or end - start == 1:
            content.append(listed[start:end])
            continue
        room = cap - int(table.prompt_tokens[listed[start]])
        parts = _first_fit_falling(own[rows[start:end]].tolist(), room)
        content += [[listed[start + index] for index in part] for part in parts]
    pieces = Pieces.of(table, content)
    firsts = np.fromiter((rows[0] for rows in content), np.int64, len(content))
    falling = np.lexsort((firsts, -pieces.tokens))
    return Pieces([content[i] for i in falling], pieces.tokens[falling], pieces.costs[falling])


def _first_fit_falling(sizes: Sequence[int], cap: int) -> list[list[int]]:
    """First-fit of sizes in falling order, bin by bin: what the first one takes, then the second.

    An item over the cap is alone.
    """
    if len(sizes) <= _FEW:
        return _first_fit_few(sizes, cap)
    left = _Remaining(sizes)
    bins: list[list[int]] = []
    smallest = sizes[-1] if len(sizes) else 0
    seed = 0
    while (seed := left.at_or_after(seed)) < len(sizes):
        content = [left.take(seed)]
        room, position = cap - sizes[seed], seed
        while room >= smallest:
            position = left.first_at_most(room, position)
            if position >= len(sizes):
                break
            content.append(left.take(position))
            room -= sizes[position]
        bins.append(content)
    return bins


_FEW = 32  # items that are placed faster one by one


def _first_fit_few(sizes: Sequence[int], cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item, size in enumerate(sizes):
        for place, room in enumerate(rooms):
            if size <= room:
                bins[place].append(item)
                rooms[place] -= size
                break
        else:
            bins.append([item])
            rooms.append(cap - size)
    return bins


def _bin_bound(table: RowCosts, rows: np.ndarray, cap: int) -> int:
    """A lower bound on the bins of any packing; where prompts are shared, one that ignores most.

    Every bin holds one prompt at least, and so many rows at most as the shortest would fit.
    """
    if not len(rows):
        return 0
    own, room = np.sort(table.own_tokens[rows]), cap - int(table.prompt_tokens[rows].min())
    most = max(1, int(np.searchsorted(np.cumsum(own), room, side="right")))
    return max(min_bin_count(own, max(1, room)), -(-len(rows) // most))


def _regroup(table: RowCosts, bins: Sequence[Sequence[int]]) -> PackedBins:
    """Make pieces of the siblings that share a bin."""
    counts = [len(content) for content in bins]
    rows = np.fromiter(itertools.chain.from_iterable(bins), np.int64, sum(counts))
    place_of = np.repeat(np.arange(len(bins)), counts)
    groups = table.groups[rows]
    order = np.lexsort((groups, place_of))
    rows, groups, place_of = rows[order], groups[order], place_of[order]
    first = np.ones(len(rows), dtype=np.bool_)
    first[1:] = (groups[1:] != groups[:-1]) | (place_of[1:] != place_of[:-1])
    starts = np.flatnonzero(first)
    listed = rows.tolist()
    content = [listed[a:b] for a, b in itertools.pairwise([*starts.tolist(), len(listed)])]
    ends = np.searchsorted(place_of[starts], np.arange(len(bins) + 1)).tolist()
    return PackedBins(Pieces.of(table, content), [range(a, b) for a, b in itertools.pairwise(ends)])


def min_bin_count(tokens: Sequence[int] | np.ndarray, cap: int) -> int:
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


def split_pieces(packed: PackedBins, table: RowCosts, count: int) -> PackedBins:
    """Halve the costliest pieces of several rows until there are `count` pieces, if rows suffice.

    A shared prompt is then encoded more than once: cheaper than a micro-batch without work.
    """
    missing = count - len(packed.pieces.rows)
    if missing <= 0:
        return packed
    content = [list(rows) for rows in packed.pieces.rows]
    bins = [list(places) for places in packed.bins]
    costs, bin_of = packed.pieces.costs.tolist(), packed.bin_of.tolist()
    heap = [(-costs[piece], piece) for piece, rows in enumerate(content) if len(rows) > 1]
    heapq.heapify(heap)
    for _ in range(missing):
        if not heap:
            break
        _, piece = heapq.heappop(heap)
        ordered = sorted(content[piece], key=lambda row: (-table.costs[row], row))
        halves = [ordered[::2], ordered[1::2]]
        bins[bin_of[piece]].append(len(content))
        bin_of.append(bin_of[piece])
        content[piece] = halves[0]
        content.append(halves[1])
        for half, place in zip(Pieces.of(table, halves).costs.tolist(), (piece, -1), strict=True):
            place %= len(content)
            if len(content[place]) > 1:
                heapq.heappush(heap, (-half, place))
    return PackedBins(Pieces.of(table, content), bins)


def spread(packed: PackedBins, count: int, cap: int) -> Arrangement:
    """Arrange the pieces of `packed` in `count` bins, the costliest bin as light as found.

    A bin stays empty only if there are fewer pieces than bins. `packed` must not have more
    than `count` bins: it is the arrangement when spreading anew does not fit.
    """
    assert len(packed.bins) <= count
    tokens, costs = packed.pieces.tokens, packed.pieces.costs
    for keys in (costs, tokens.astype(np.float64)):
        bin_of = _largest_first(keys, tokens, count, cap)
        if bin_of is not None:
            return _arrange(tokens, costs, bin_of, count, cap)
    arrangement = _arrange(tokens, costs, packed.bin_of, count, cap)
    fill_empty_bins(arrangement)
    return arrangement


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
    order = np.lexsort((np.arange(len(keys)), -keys))
    alone = tokens[order] > cap
    bin_of[order[alone]] = np.arange(np.count_nonzero(alone))
    order, empty = order[~alone], np.arange(np.count_nonzero(alone), count)
    first = order[: len(empty)]  # one each for the empty bins
    bin_of[first] = empty[: len(first)]
    rooms, loads = np.zeros(count, dtype=np.int64), np.zeros(count)
    rooms[empty] = cap
    rooms[empty[: len(first)]] -= tokens[first]
    loads[empty[: len(first)]] = keys[first]
    open_loads = np.where(rooms > 0, loads, np.inf)
    left = order[len(first) :]
    columns = (left.tolist(), tokens[left].tolist(), keys[left].tolist())
    for piece, size, key in zip(*columns, strict=True):
        target = int(open_loads.argmin())
        if rooms[target] < size:
            fitting = np.flatnonzero(rooms >= size)
            if not len(fitting):
                return None
            target = int(fitting[loads[fitting].argmin()])
        bin_of[piece] = target
        rooms[target] -= size
        loads[target] += key
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
