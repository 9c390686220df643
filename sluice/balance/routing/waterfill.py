"""Places a whole batch of leases on the joint table of targets in a few vector operations.

A *slot* (target, level) means "the target's load becomes `level`". The slots of one target are
taken in order of level, and both placements below rank slots by a key that never falls with the
level, so taking the n smallest keys equals n greedy picks, each charged before the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_LEVELS = 1 << 32  # above every load
_NEVER = np.iinfo(np.int64).max
_CANDIDATES = 4  # looked at per lease drawn


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a placement sees: one row per target (engine, dp rank), one per engine.

    load int64[m]: leases charged, plus what engines report beyond them.
    limit int64[m]: highest load a target may reach; limit <= load offers no slot.
    engine_of int64[m]: engine row of a target; an engine's targets are contiguous.
    starts int64[e]: first target row of every engine, ascending, starts[0] == 0.
    slowdown int64[e]: relative step time in integer units, the same unit for every engine.
    """

    load: IntArray
    limit: IntArray
    engine_of: IntArray
    starts: IntArray
    slowdown: IntArray
    room: IntArray  # int64[m]: free slots
    free_count: int  # their sum
    is_even: bool  # every engine is as fast as the others

    @classmethod
    def create(
        cls,
        load: IntArray,
        limit: IntArray,
        engine_of: IntArray,
        starts: IntArray,
        slowdown: IntArray,
    ) -> Fleet:
        room = np.maximum(limit - load, 0)
        is_even = bool((slowdown == slowdown[0]).all()) if len(slowdown) else True
        free = int(room.sum())
        return cls(load, limit, engine_of, starts, slowdown, room, free, is_even)


def place_level(
    fleet: Fleet,
    count: int,
    rng: np.random.Generator,
    avoid: IntArray | None = None,
) -> IntArray:
    """Take the `count` lowest levels; int64[m] of leases added per target, fewer if full.

    On the last level targets are drawn at random, those with the smallest `avoid` first.
    """
    return _lowest(fleet, fleet.load, fleet.room, count, _Draw(fleet, rng, avoid))


def _lowest(fleet: Fleet, load: IntArray, room: IntArray, count: int, draw: _Draw) -> IntArray:
    """`place_level` for targets with this load and `room` more slots each."""
    if int(room.sum()) <= count:
        return room
    if count <= 0:
        return np.zeros_like(load)
    targets = np.flatnonzero(room)
    open_load = load[targets]
    low = int(open_load.min())  # no slot at or below this level
    # Uncapped, the mean level after placing cannot be short of slots; capped, it may be.
    high = max(-((-count - int(open_load.sum())) // len(targets)), low + 1)
    while int(_added(load, room, high).sum()) < count:
        low, high = high, high + 2 * (high - low)
    while high - low > 1:
        middle = (low + high) // 2
        if int(_added(load, room, middle).sum()) < count:
            low = middle
        else:
            high = middle
    added = _added(load, room, low)
    missing = count - int(added.sum())
    ties = np.flatnonzero((load + added == high - 1) & (added < room))
    added[draw(ties, missing)] += 1
    return added


def place_step_time(
    fleet: Fleet,
    base: int,
    count: int,
    rng: np.random.Generator,
    avoid: IntArray | None = None,
) -> IntArray:
    """Take the slots of least predicted step time; int64[m] of leases added per target.

    Step time of an engine after placing: slowdown * (base + its largest rank load), `base`
    being the cost of an empty step in units of one more running request: ranks of an engine
    step together. Equal step times go to the least load, equal loads to a random target.
    """
    if fleet.free_count <= count:
        return fleet.room
    if count <= 0:
        return np.zeros_like(fleet.load)
    search = _StepTimes(fleet, base)
    low, high = search.bracket(count)  # slots(low) < count <= slots(high)
    while high - low > 1:
        middle = (low + high) // 2
        if int(search.slots(middle).sum()) < count:
            low = middle
        else:
            high = middle
    below = search.slots(low)
    tied = search.slots(high) - below
    missing = count - int(below.sum())
    return below + _lowest(fleet, fleet.load + below, tied, missing, _Draw(fleet, rng, avoid))


def pick_step_time(
    fleet: Fleet,
    base: int,
    count: int,
    rng: np.random.Generator,
    avoid: IntArray | None = None,
) -> IntArray:
    """The slots of `place_step_time` as targets in the order of `deal`, int64[<= count]."""
    if 0 < count < fleet.free_count:
        ties = _cheapest(fleet, base)
        if len(ties) >= count:  # one key holds them all: no search
            return _Draw(fleet, rng, avoid)(ties, count)
    return deal(place_step_time(fleet, base, count, rng, avoid), fleet, rng)


def _cheapest(fleet: Fleet, base: int) -> IntArray:
    """Targets whose next slot has the least step time and, of those, the least load."""
    largest = np.maximum.reduceat(fleet.load, fleet.starts)
    level = fleet.load + 1
    step = np.maximum(largest[fleet.engine_of], level)
    if not fleet.is_even:
        step = (step + base) * fleet.slowdown[fleet.engine_of]
    key = step * _LEVELS + level
    key[fleet.room == 0] = _NEVER
    return np.flatnonzero(key == key.min())


class _StepTimes:
    """How many slots of each target have a step time of at most a bound."""

    def __init__(self, fleet: Fleet, base: int) -> None:
        # Equal speeds reduce to 1, so the search below runs over levels, a handful of them.
        self._slowdown = fleet.slowdown // int(np.gcd.reduce(fleet.slowdown))
        self._base = base
        self._fleet = fleet
        self._room = fleet.room
        self._largest = np.maximum.reduceat(fleet.load, fleet.starts)

    def slots(self, bound: int) -> IntArray:
        """int64[m]: slots with step time <= bound, per target."""
        level = bound // self._slowdown - self._base
        # Filling up a rank below its engine's largest costs what that largest costs already.
        level = np.where(level >= self._largest, level, -1)
        return _added(self._fleet.load, self._room, level[self._fleet.engine_of])

    def bracket(self, count: int) -> tuple[int, int]:
        """A pair low < high with fewer than `count` slots within low, at least that in high."""
        has_room = np.logical_or.reduceat(self._room > 0, self._fleet.starts)
        lowest = np.minimum.reduceat(
            np.where(self._room > 0, self._fleet.load + 1, np.iinfo(np.int64).max // 2),
            self._fleet.starts,
        )
        first = np.maximum(self._largest, lowest)[has_room]
        low = int((self._slowdown[has_room] * (self._base + first)).min()) - 1
        step = int(self._slowdown.min())
        while int(self.slots(low + step).sum()) < count:
            low, step = low + step, step * 2
        return low, low + step


def _added(load: IntArray, room: IntArray, level: IntArray | int) -> IntArray:
    """Leases that raise each target to `level`, within its room."""
    added = level - load
    np.maximum(added, 0, out=added)
    return np.minimum(added, room, out=added)


class _Draw:
    """Draws among equal targets: fewest siblings first, then spread over engines, at random."""

    def __init__(self, fleet: Fleet, rng: np.random.Generator, avoid: IntArray | None) -> None:
        self._fleet, self._rng, self._avoid = fleet, rng, avoid

    def __call__(self, ties: IntArray, count: int) -> IntArray:
        """`count` of `ties`, in the order in which they are best dealt out."""
        key = self._rng.random(len(ties))
        if self._avoid is not None:
            key += self._avoid[ties]
        if count == 1:
            return ties[[int(key.argmin())]]
        some = _CANDIDATES * count
        if some < len(ties):  # enough to find an engine for each
            chosen = key.argpartition(some)[:some]
            ties, key = ties[chosen], key[chosen]
        return ties[_spread(self._fleet.engine_of[ties], np.floor(key), key)[:count]]


def deal(added: IntArray, fleet: Fleet, rng: np.random.Generator) -> IntArray:
    """int64[sum(added)]: the targets, lowest level first; in a level engines take turns.

    Neighbours in this order are on different targets, and on different engines wherever a level
    holds several: dealing it out to the samples of a group in turn spreads the group.
    """
    targets = np.repeat(np.arange(len(added)), added)
    if len(targets) <= 1:
        return targets
    ends = np.cumsum(added)
    within = np.arange(len(targets)) - np.repeat(ends - added, added)
    level = fleet.load[targets] + within
    return targets[_spread(fleet.engine_of[targets], level, rng.random(len(targets)))]


def _spread(engine: IntArray, first: NDArray[Any], noise: NDArray[np.float64]) -> IntArray:
    """Order by `first`, and where that is equal by turns over engines, otherwise by `noise`."""
    engines = int(engine.max()) + 1
    kind = first * engines + engine
    order = np.argsort(kind + (noise - np.floor(noise)), kind="stable")
    ordered = kind[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    turn = np.empty(len(order), dtype=np.int64)
    turn[order] = np.arange(len(order)) - np.repeat(begins, np.diff(np.r_[begins, len(order)]))
    return np.argsort(first * (int(turn.max()) + 1) + turn + (noise - np.floor(noise)))
