"""Which target each lease of a request gets: its session's, or the policy's choice.

`step_time` is the default policy; the others are for comparison.

step_time     predicted step time after placing, then least load, then random
min_count     least load over the joint table of (engine, rank), then random
power_of_two  two engines at random, the less loaded one, its ranks in turn (Mitzenmacher, 2001)
round_robin   engines in turn, and each engine's ranks in turn
random        an engine at random, its ranks in turn
cache_aware   the engine that last had this prompt unless loads are out of balance, its ranks in
              turn (the default rule of sglang-router 0.3.2, with a prompt key for its prefix tree)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sluice.balance.routing.groups import NO_GROUP, NO_SESSION, UNPLACED
from sluice.balance.routing.health import UNIT
from sluice.balance.routing.leases import QUEUED
from sluice.balance.routing.tables import Tables
from sluice.balance.routing.types import FloatArray, IntArray, LeaseRequest, full_of
from sluice.balance.routing.waterfill import Fleet, deal, pick_one, pick_step_time, place_level

_MOST_BASE = 1 << 20  # keys of the search have 63 bits; so many requests outweigh all others
_TURN_TOKENS = 256.0  # of a session's turn, when nothing is known


@dataclass(frozen=True)
class SessionTargets:
    """targets int64[n]: of leases whose session stays, QUEUED for the others; sessions
    int64[n]: session slots, or NO_SESSION; fresh: leases of each session that needs a target."""

    targets: IntArray
    sessions: IntArray
    fresh: dict[int, list[int]]


class TargetSelector:
    """Chooses targets; charges nothing."""

    def __init__(self, tables: Tables, rng: np.random.Generator) -> None:
        config = self._config = tables.config
        self._targets = tables.targets
        self._sessions = tables.sessions
        self._groups = tables.groups
        self._leases = tables.leases
        self._rng = rng
        base = round(config.step_base / config.step_per_request)
        self._base = min(max(base, 1), _MOST_BASE)
        self._policy = create_policy(config.policy, self._base)
        self.goes_by_key = config.policy == "cache_aware"

    def spread(
        self, fleet: Fleet, groups: IntArray, expected: FloatArray | None, keys: list[str] | None
    ) -> IntArray:
        """Choose targets for len(groups) leases, int64[n], QUEUED beyond the free slots.

        Leases are served probes first, then by expected tokens, longest first; so those that
        wait are the short ones, and the long ones get the emptiest ranks.
        """
        count = len(groups)
        # Where all slots are taken there is no choice, and siblings need not be looked for.
        avoid = self._siblings(groups) if count < fleet.free_count else None
        hints = PlaceHints(affinity=keys, avoid=avoid)
        targets = self._policy.place(fleet, count, self._rng, hints)
        if len(targets) == count and (count == 1 or expected is None or np.isnan(expected).all()):
            return targets
        if expected is None:
            expected = np.full(count, np.nan)
        placed = np.full(count, QUEUED, dtype=np.int64)
        order = self._order(groups, expected) if not keys else np.arange(count)
        placed[order[: len(targets)]] = targets
        return placed

    def pick(self, fleet: Fleet, group: int) -> int:
        """`spread` of one lease, for which there is a free slot; the group may be NO_GROUP."""
        if group != NO_GROUP and self._groups.live[group] and fleet.free_count > 1:
            hints = PlaceHints(avoid=self._siblings(np.array([group])))
            return int(self._policy.place(fleet, 1, self._rng, hints)[0])
        return self._policy.pick(fleet, self._rng)

    def open_sessions(self, fleet: Fleet, slots: list[int]) -> IntArray:
        """Place new sessions on the ranks with the fewest; their targets, int64[<= len(slots)]."""
        # A session between turns loads nothing now but will: it counts like a lease.
        load = np.maximum(self._sessions.active, fleet.load)
        by_session = Fleet.create(
            load, load + fleet.room, fleet.engine_of, fleet.starts, fleet.slowdown
        )
        targets = self._policy.place(by_session, len(slots), self._rng)
        for slot, target in zip(slots, targets.tolist(), strict=False):
            self._sessions.place(slot, target)
        return targets

    def sticky(
        self, request: LeaseRequest, expected: FloatArray | None, now: float
    ) -> SessionTargets:
        """Look up (or open) the sessions of a request; those that must move are taken off."""
        targets = full_of(QUEUED, request.count)
        slots = full_of(NO_SESSION, request.count)
        fresh: dict[int, list[int]] = {}
        if not request.sessions:
            return SessionTargets(targets, slots, fresh)
        fleet = self._targets.fleet(request.needs, unlimited=True)
        for index, key in enumerate(request.sessions):
            if not key:
                continue
            slot = self._sessions.open(key, now)
            slots[index] = slot
            prefix = 0 if request.prefix_tokens is None else int(request.prefix_tokens[index])
            length = math.nan if expected is None else float(expected[index])
            if self._keeps(slot, fleet, request, length, prefix):
                targets[index] = self._sessions.target(slot)
            else:
                self._sessions.place(slot, UNPLACED)
                fresh.setdefault(slot, []).append(index)
        return SessionTargets(targets, slots, fresh)

    def affinity(self, request: LeaseRequest, chosen: IntArray | slice) -> list[str] | None:
        """A key per chosen lease, where the policy goes by one: its session's or group's."""
        if not self.goes_by_key:
            return None
        keys = list(request.sessions) or [""] * request.count
        start = 0
        for key, size in request.groups:
            keys[start : start + size] = [own or key for own in keys[start : start + size]]
            start += size
        return np.array(keys, dtype=object)[chosen].tolist()

    def _keeps(
        self, slot: int, fleet: Fleet, request: LeaseRequest, expected: float, prefix: int
    ) -> bool:
        """Whether a session's next turn stays on its target.

        It leaves a target that may not serve it, and one whose predicted slow-down over this
        turn exceeds `break_margin` times what filling `prefix` tokens again costs elsewhere.
        """
        target = self._sessions.target(slot)
        if target == UNPLACED or not self._targets.able(request.needs)[fleet.engine_of[target]]:
            return False
        engine = self._targets.engine_at(target)
        if engine is not None and engine.spec.name in request.excluded:
            return False
        if not fleet.room[target]:  # closed but for a trial
            return False
        if prefix <= 0:
            return True
        tokens = expected if expected == expected else self._groups.mean_tokens or _TURN_TOKENS
        per_token = self._step_times(fleet)
        gain = float(per_token[target] - per_token.min()) * tokens
        return gain <= self._config.break_margin * prefix / self._config.prefill_rate

    def _step_times(self, fleet: Fleet) -> FloatArray:
        """float64[m]: seconds per token on each target with one more lease, inf where closed."""
        largest = np.maximum.reduceat(fleet.load, fleet.starts)[fleet.engine_of]
        step = self._base + np.maximum(largest, fleet.load + 1)
        seconds = step * (fleet.slowdown / UNIT)[fleet.engine_of] * self._config.step_per_request
        return np.where(fleet.limit > 0, seconds, np.inf)

    def _siblings(self, groups: IntArray) -> IntArray | None:
        """int64[m]: live siblings per target, for a request of one group known before."""
        first = int(groups[0]) if len(groups) else NO_GROUP
        if first == NO_GROUP or int(groups[-1]) != first or not self._groups.live[first]:
            return None
        targets = self._leases.targets_of_group(first)
        return np.bincount(targets, minlength=len(self._targets)) if len(targets) else None

    def _order(self, groups: IntArray, expected: FloatArray) -> IntArray:
        """Indices of leases, the most urgent first; ties in the order they came."""
        has_length = ~np.isnan(expected)
        grouped = groups != NO_GROUP
        probe = np.zeros(len(groups), dtype=bool)
        probe[np.unique(groups, return_index=True)[1]] = True
        probe &= grouped & ~has_length
        probe[probe] = np.isnan(self._groups.started[groups[probe]])
        length = np.where(has_length, expected, self._groups.mean_tokens)
        return np.lexsort((-length, ~probe))

    def expected(self, request: LeaseRequest, groups: IntArray, all_new: bool) -> FloatArray | None:
        """float64[count]: expected tokens of each lease, NaN unknown; None: nothing is known."""
        given = request.expected_tokens
        if given is None:
            if all_new:
                return None
            given = np.full(request.count, np.nan)
        grouped = groups >= 0
        if not grouped.any() or not self._groups.knows_any(groups[grouped]):
            return given
        of_group = self._groups.expected(np.where(grouped, groups, 0))
        return np.where(grouped & ~np.isnan(of_group), of_group, given)


@dataclass(frozen=True, slots=True)
class PlaceHints:
    """Tells a policy more than the fleet does.

    affinity: one key per lease (a prompt's, a group's or a session's), for cache_aware.
    avoid: int64[m], siblings per target; ties go where they are fewest.
    """

    affinity: Sequence[str] | None = None
    avoid: IntArray | None = None


NO_HINTS = PlaceHints()


class RoutingPolicy(ABC):
    @abstractmethod
    def place(
        self, fleet: Fleet, count: int, rng: np.random.Generator, hints: PlaceHints = NO_HINTS
    ) -> IntArray:
        """Targets for up to `count` leases, int64[<= count]; fewer only when no slot is left."""

    def pick(self, fleet: Fleet, rng: np.random.Generator) -> int:
        """The target for one lease, of which nothing is known, where there is a free slot."""
        return int(self.place(fleet, 1, rng)[0])


@dataclass
class StepTime(RoutingPolicy):
    """Takes the least predicted step time; an empty step costs as much as `base` requests add."""

    base: int = 100

    def place(
        self, fleet: Fleet, count: int, rng: np.random.Generator, hints: PlaceHints = NO_HINTS
    ) -> IntArray:
        return pick_step_time(fleet, self.base, count, rng, hints.avoid)

    def pick(self, fleet: Fleet, rng: np.random.Generator) -> int:
        return pick_one(fleet, self.base, rng)


@dataclass
class MinCount(RoutingPolicy):
    def place(
        self, fleet: Fleet, count: int, rng: np.random.Generator, hints: PlaceHints = NO_HINTS
    ) -> IntArray:
        return deal(place_level(fleet, count, rng, hints.avoid), fleet, rng)


class _ByEngine(RoutingPolicy):
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
    """Goes by key unless engine loads have max - min > absolute and max > relative * min."""

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
        engine = self._last.get(key) if key else None
        if engine is None or unbalanced or engine not in open_:
            least = open_[loads == low]
            engine = int(least[rng.integers(len(least))])
        if key:
            self._last[key] = engine
            self._last.move_to_end(key)
            if len(self._last) > self._capacity:
                self._last.popitem(last=False)
        return engine


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
    """Makes the policy `name`, a key of POLICIES; `base` as in StepTime. Raises KeyError."""
    return StepTime(base) if name == "step_time" else POLICIES[name]()
