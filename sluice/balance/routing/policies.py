"""The rules that pick targets. `step_time` is the default; the others are for comparison.

step_time     predicted step time after placing, then least load, then random
min_count     least load over the joint table of (engine, rank), then random
power_of_two  two engines at random, the less loaded one, its ranks in turn (Mitzenmacher, 2001)
round_robin   engines in turn, and each engine's ranks in turn
random        an engine at random, its ranks in turn
cache_aware   the engine that last had this prompt unless loads are out of balance, its ranks in
              turn (the default rule of sglang-router 0.3.2, with a prompt key for its prefix tree)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sluice.balance.routing.waterfill import Fleet, deal, pick_step_time, place_level

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlaceHints:
    """What a rule may use besides the fleet.

    affinity: one key per lease (a prompt's, a group's or a session's), for cache_aware.
    avoid: int64[m], siblings per target; ties go where they are fewest.
    """

    affinity: Sequence[str] | None = None
    avoid: IntArray | None = None


NO_HINTS = PlaceHints()


class RoutingPolicy(Protocol):
    def place(
        self, fleet: Fleet, count: int, rng: np.random.Generator, hints: PlaceHints = NO_HINTS
    ) -> IntArray:
        """Targets for up to `count` leases, int64[<= count]; fewer only when no slot is left."""
        ...


@dataclass
class StepTime:
    """`base`: cost of an empty engine step, in units of one more request in it."""

    base: int = 100

    def place(
        self, fleet: Fleet, count: int, rng: np.random.Generator, hints: PlaceHints = NO_HINTS
    ) -> IntArray:
        return pick_step_time(fleet, self.base, count, rng, hints.avoid)


@dataclass
class MinCount:
    def place(
        self, fleet: Fleet, count: int, rng: np.random.Generator, hints: PlaceHints = NO_HINTS
    ) -> IntArray:
        return deal(place_level(fleet, count, rng, hints.avoid), fleet, rng)


class _ByEngine:
    """Picks engines one by one; the ranks of an engine take turns, as inside SGLang."""

    def __init__(self) -> None:
        self._turn: dict[int, int] = {}

    def place(
        self, fleet: Fleet, count: int, rng: np.random.Generator, hints: PlaceHints = NO_HINTS
    ) -> IntArray:
        load = fleet.load.copy()
        room = np.add.reduceat(np.maximum(fleet.limit - fleet.load, 0), fleet.starts)
        targets: list[int] = []
        for index in range(min(count, int(room.sum()))):
            key = hints.affinity[index] if hints.affinity else ""
            engine = self._engine(fleet, load, np.flatnonzero(room > 0), rng, key)
            target = self._rank(fleet, load, engine)
            load[target] += 1
            room[engine] -= 1
            targets.append(target)
        return np.asarray(targets, dtype=np.int64)

    def _rank(self, fleet: Fleet, load: IntArray, engine: int) -> int:
        start = int(fleet.starts[engine])
        later = engine + 1 < len(fleet.starts)
        stop = int(fleet.starts[engine + 1]) if later else len(fleet.load)
        turn = self._turn.get(engine, 0)
        for step in range(stop - start):
            target = start + (turn + step) % (stop - start)
            if load[target] < fleet.limit[target]:
                self._turn[engine] = turn + step + 1
                return target
        raise AssertionError("an engine with room has a rank with room")

    def _engine(
        self, fleet: Fleet, load: IntArray, open_: IntArray, rng: np.random.Generator, key: str
    ) -> int:
        raise NotImplementedError


class Random(_ByEngine):
    def _engine(
        self, fleet: Fleet, load: IntArray, open_: IntArray, rng: np.random.Generator, key: str
    ) -> int:
        return int(open_[rng.integers(len(open_))])


class RoundRobin(_ByEngine):
    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def _engine(
        self, fleet: Fleet, load: IntArray, open_: IntArray, rng: np.random.Generator, key: str
    ) -> int:
        engine = int(open_[np.searchsorted(open_, self._next) % len(open_)])
        self._next = engine + 1
        return engine


class PowerOfTwo(_ByEngine):
    def _engine(
        self, fleet: Fleet, load: IntArray, open_: IntArray, rng: np.random.Generator, key: str
    ) -> int:
        first, second = open_[rng.integers(len(open_), size=2)]
        loads = _engine_loads(fleet, load)
        return int(first if loads[first] <= loads[second] else second)


class CacheAware(_ByEngine):
    """Out of balance: max - min > absolute and max > relative * min, over engine loads."""

    def __init__(self, absolute: int = 64, relative: float = 1.5, capacity: int = 65536) -> None:
        super().__init__()
        self._absolute = absolute
        self._relative = relative
        self._capacity = capacity
        self._last: OrderedDict[str, int] = OrderedDict()

    def _engine(
        self, fleet: Fleet, load: IntArray, open_: IntArray, rng: np.random.Generator, key: str
    ) -> int:
        loads = _engine_loads(fleet, load)[open_]
        low, high = int(loads.min()), int(loads.max())
        unbalanced = high - low > self._absolute and high > self._relative * low
        known = self._last.get(key) if key else None
        if known is None or unbalanced or known not in open_:
            least = open_[loads == low]
            known = int(least[rng.integers(len(least))])
        if key:
            self._last[key] = known
            self._last.move_to_end(key)
            if len(self._last) > self._capacity:
                self._last.popitem(last=False)
        return known


def _engine_loads(fleet: Fleet, load: IntArray) -> IntArray:
    return np.add.reduceat(load, fleet.starts)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "step_time": StepTime,
    "min_count": MinCount,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "random": Random,
    "cache_aware": CacheAware,
}


def create_policy(name: str, base: int = 100) -> RoutingPolicy:
    """The rule `name`, a key of POLICIES; `base` as in StepTime. Raises KeyError."""
    return StepTime(base) if name == "step_time" else POLICIES[name]()
