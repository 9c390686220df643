"""Spreads pieces over a fixed number of bins under a cap, and evens out costs by exchange."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sluice.balance.planner_packing import RowCluster, RowCosts

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
