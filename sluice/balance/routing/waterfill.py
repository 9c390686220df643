"""Places a whole batch of leases on the joint table of targets in a few vector operations.

A *slot* (target, level) means "the target's load becomes `level`". The slots of one target are
taken in order of level, and both placements below rank slots by a key that never falls with the
level, so taking the n smallest keys equals n greedy picks, each charged before the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sluice.balance.routing.types import IntArray

_LEVELS = 1 << 32  # above every load
_NEVER = np.iinfo(np.int64).max
_FEW = 16
_CANDIDATES = 4  # looked at per lease drawn, to find an engine for each


@dataclass(slots=True)
class Fleet:
    """Shows a placement one row per target (engine, dp rank), and one per engine.

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
    ties: Ties | None = None  # of the last pick of one
    numbers: tuple[memoryview, ...] = ()  # load, limit and room, to be read one by one

    @classmethod
    def create(
        cls,
        load: IntArray,
        limit: IntArray,
        engine_of: IntArray,
        starts: IntArray,
        slowdown: IntArray,
        is_even: bool | None = None,
    ) -> Fleet:
        """Counts the free slots; `is_even` where the caller knows it."""
        room = limit - load
        np.maximum(room, 0, out=room)
        if is_even is None:
            is_even = not len(slowdown) or bool((slowdown == slowdown[0]).all())
        free = int(np.add.reduce(room))
        fleet = cls(load, limit, engine_of, starts, slowdown, room, free, is_even)
        fleet.numbers = load.data, limit.data, room.data
        return fleet

    def recount(self, target: int, change: int) -> None:
        """Bring its free slots in line with the load and the limit of a target.

        change: of its leases; what has come free may be the cheapest slot.
        """
        loads, limits, rooms = self.numbers
        load = loads[target]
        room = limits[target] - load
        if room < 0:
            room = 0
        self.free_count += room - rooms[target]
        rooms[target] = room
        if self.ties is None:
            return
        if change < 0:
            self.ties.came_free(target)
        elif load > self.ties.level:  # all ranks of its engine cost more than they did
            self.ties = None


class Ties:
    """The cheapest slots of a fleet, from pick to pick: looked for anew once all are taken.

    A charge up to `level` makes no other slot dearer, so what it took is found when it is drawn;
    beyond it, these are void. What a release makes cheaper is looked for among the ranks of its
    engine alone.
    """

    def __init__(self, fleet: Fleet, base: int) -> None:
        self.base = base
        # One number of a memoryview costs a third of one of an array.
        self._load, _, self._room = fleet.numbers
        self._engine_of, self._starts = fleet.engine_of.data, fleet.starts.data
        self._slowdown = fleet.slowdown.data
        self._targets: list[int] = _cheapest(fleet, base).tolist()
        self._listed = set(self._targets)
        first = self._targets[0]
        engine = self._engine_of[first]
        largest = max(self._load[self._ranks(engine)].tolist())
        self.level = self._load[first] + 1  # of a target that takes its slot
        self._cost = self._slowdown[engine] * (base + max(largest, self.level))

    def draw(self, rng: np.random.Generator) -> int | None:
        """One of them at random; None where none is left."""
        targets, before = self._targets, self.level - 1
        while targets:
            index = int(rng.random() * len(targets))
            target = targets[index]
            if self._load[target] == before and self._room[target]:
                return target
            targets[index] = targets[-1]
            targets.pop()
            self._listed.remove(target)
        return None

    def came_free(self, target: int) -> None:
        """Take in what is among the cheapest now, as the engine of a target has fewer leases."""
        if self._load[target] + 1 == self.level and target in self._listed:
            return  # one lease more on it makes no rank beside it dearer
        engine = self._engine_of[target]
        where = self._ranks(engine)
        loads, rooms = self._load[where].tolist(), self._room[where].tolist()
        open_ = [load for load, room in zip(loads, rooms, strict=True) if room]
        if not open_:
            return
        level = min(open_) + 1
        cost = self._slowdown[engine] * (self.base + max(level, *loads))
        if (cost, level) > (self._cost, self.level):
            return
        if (cost, level) < (self._cost, self.level):
            self._cost, self.level = cost, level
            self._targets, self._listed = [], set()
        for rank, load in enumerate(loads, where.start):
            if load + 1 == level and rank not in self._listed:
                self._targets.append(rank)
                self._listed.add(rank)

    def _ranks(self, engine: int) -> slice:
        starts, after = self._starts, engine + 1
        return slice(starts[engine], starts[after] if after < len(starts) else len(self._load))


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
    added[draw.any_of(ties, missing)] += 1
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
    """Return the slots of `place_step_time` as targets in the order of `deal`, int64[<= count]."""
    if count == 1 and avoid is None and fleet.free_count:
        return np.array([pick_one(fleet, base, rng)])
    if 0 < count < fleet.free_count:
        ties = _cheapest(fleet, base)
        if len(ties) >= count:  # one key holds them all: no search
            return _Draw(fleet, rng, avoid)(ties, count)
    return deal(place_step_time(fleet, base, count, rng, avoid), fleet, rng)


def pick_one(fleet: Fleet, base: int, rng: np.random.Generator) -> int:
    """`pick_step_time` of one lease, from a fleet that has free slots."""
    ties = fleet.ties
    if ties is not None and ties.base == base:
        target = ties.draw(rng)
        if target is not None:
            return target
    fleet.ties = Ties(fleet, base)
    target = fleet.ties.draw(rng)
    assert target is not None, "the fleet has free slots"
    return target


def _cheapest(fleet: Fleet, base: int) -> IntArray:
    """Targets whose next slot has the least step time and, of those, the least load."""
    level = fleet.load + 1
    key = np.maximum.reduceat(fleet.load, fleet.starts)[fleet.engine_of]
    np.maximum(key, level, out=key)
    if not fleet.is_even:
        key += base
        key *= fleet.slowdown[fleet.engine_of]
    key *= _LEVELS
    key += level
    if not np.minimum.reduce(fleet.room):
        key[fleet.room == 0] = _NEVER
    return (key == np.minimum.reduce(key)).nonzero()[0]


class _StepTimes:
    """Counts the slots of each target that have a step time of at most a bound."""

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
        """`count` of `ties` (ascending), in the order in which they are best dealt out."""
        key = self._rng.random(len(ties))
        if self._avoid is not None:
            key += self._avoid[ties]
        if count == 1:
            return ties[[int(key.argmin())]]
        if self._avoid is not None:
            return ties[key.argsort()[:count]]
        some = (_CANDIDATES if count <= _FEW else 2) * count
        if some < len(ties):
            ties = ties[key.argpartition(some)[:some]]
        if count <= _FEW:
            return self._first_of_engines(ties, count)
        ties.sort()
        return _by_turns(self._fleet, ties, self._rng)[:count]

    def any_of(self, ties: IntArray, count: int) -> IntArray:
        """`count` of `ties`, in no order."""
        if count >= len(ties):
            return ties
        key = self._rng.random(len(ties))
        if self._avoid is not None:
            key += self._avoid[ties]
        return ties[key.argpartition(count)[:count]]

    def _first_of_engines(self, ties: IntArray, count: int) -> IntArray:
        """The first of each engine, then the others; for a handful cheaper than sorting."""
        seen: set[int] = set()
        chosen, others = [], []
        engines = self._fleet.engine_of[ties].tolist()
        for target, engine in zip(ties.tolist(), engines, strict=True):
            if engine in seen:
                others.append(target)
                continue
            seen.add(engine)
            chosen.append(target)
            if len(chosen) == count:
                break
        return np.array((chosen + others)[:count])


def deal(added: IntArray, fleet: Fleet, rng: np.random.Generator) -> IntArray:
    """Order the targets, lowest level first; in a level engines take turns. int64[sum(added)].

    Neighbours in this order are on different targets, and on different engines wherever a level
    holds several: dealing it out to the samples of a group in turn spreads the group.
    """
    chosen = _by_turns(fleet, np.flatnonzero(added), rng)
    if len(chosen) <= 1:
        return np.repeat(chosen, added[chosen])
    times, load = added[chosen], fleet.load[chosen]
    place = np.repeat(np.arange(len(chosen)), times)
    within = np.arange(len(place)) - np.repeat(np.cumsum(times) - times, times)
    return chosen[place[((load[place] + within) * len(chosen) + place).argsort()]]


def _by_turns(fleet: Fleet, targets: IntArray, rng: np.random.Generator) -> IntArray:
    """`targets` (ascending) at random, but so that engines take turns."""
    if len(targets) <= 1:
        return targets
    engine = fleet.engine_of[targets]
    shuffled = (engine + rng.random(len(targets))).argsort()  # within each engine
    begins = np.flatnonzero(engine[1:] != engine[:-1]) + 1
    first = np.zeros(len(targets), dtype=np.int64)
    first[begins] = begins
    turn = np.arange(len(targets)) - np.maximum.accumulate(first)
    return targets[shuffled[(turn + rng.random(len(targets))).argsort()]]
