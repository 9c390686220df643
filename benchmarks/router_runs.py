"""One rule on one simulated fleet: the events, and the pool that decides."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.router_fleet import RANKS, SimulatedEngine, Work
from benchmarks.router_loads import (
    PROMPT,
    SIBLINGS,
    SYSTEM_PROMPT,
    TOOL_SECONDS,
    TOOL_TOKENS,
    UNCAPPED,
    Fleet,
    Samples,
    Talks,
)
from sluice.balance.routing import EngineSpec, LeaseRequest, Pool, PoolConfig, RankReport

REPORT_SECONDS, LAG_SECONDS, NOISE = 2.0, 1.5, 0.08
TICK_SECONDS = 1.0
FOREVER = 1e9
OURS, WITH_HISTORY = "sluice", "sluice + history"
MAINSTREAM = ("random", "round_robin", "power_of_two", "min_count", "cache_aware")


class Run:
    """One rule on one fleet: the events, and the pool that decides."""

    def __init__(self, rule: str, fleet: Fleet, seed: int) -> None:
        ours = rule in (OURS, WITH_HISTORY)
        config = PoolConfig(
            policy="step_time" if ours else rule,
            late_binding=ours,
            client_ttl=FOREVER,
            engine_ttl=FOREVER,
            session_ttl=FOREVER,
            group_ttl=FOREVER,
            max_leases=1 << 40,
            max_leases_per_client=1 << 40,
            max_queued=1 << 40,
        )
        self.pool = Pool(config, np.random.default_rng(seed))
        self.engines = [
            SimulatedEngine(number, float(slow), fleet.capacity)
            for number, slow in enumerate(fleet.speeds)
        ]
        self.now = 0.0
        self.measures_speed = ours
        self._noise = np.random.default_rng(seed + 1)
        self._events: list[tuple[float, int, int, Callable[[], None] | None]] = []
        self._count = 0
        self._works: dict[int, Work] = {}  # by lease
        self._leases: dict[int, int] = {}  # by work
        self.finished: Callable[[Work], None] = lambda work: None
        self.turn_seconds: list[float] = []
        capacity = fleet.capacity if fleet.capacity < UNCAPPED else 0
        for number in range(fleet.size):
            spec = EngineSpec(name=str(number), dp_size=RANKS, max_running=capacity)
            self.pool.register(spec, -10.0)
        if ours:
            self._warm_up()

    def submit(self, works: Sequence[Work], request: LeaseRequest) -> None:
        grant = self.pool.acquire("loop", request, self.now)
        for offset, (work, target) in enumerate(zip(works, grant.targets.tolist(), strict=True)):
            work.submitted = self.now
            lease = grant.first_id + offset
            self._works[lease], self._leases[work.number] = work, lease
            if target >= 0:
                self._start(work, target)
        self._start_bound()

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, -1, then))

    def go(self) -> float:
        """Run all events; returns the time of the last sample's end."""
        last = 0.0
        while self._events:
            self.now, stamp, number, then = heapq.heappop(self._events)
            if then is not None:
                then()
                continue
            engine = self.engines[number]
            if engine.stamp != stamp:
                continue
            left = engine.advance(self.now)
            for work, _ in left:
                last = self.now
                self._end(work)
            self._schedule(engine)
        return last

    def _start(self, work: Work, target: int) -> None:
        engine = self.engines[target // RANKS]
        for left, _ in engine.advance(self.now):
            self._end(left)
        engine.add(target % RANKS, work, self.now)
        self._schedule(engine)

    def _end(self, work: Work) -> None:
        lease = np.array([self._leases.pop(work.number)])
        self.turn_seconds.append(self.now - work.submitted)
        self.pool.release("loop", lease, self.now, output_tokens=np.array([work.tokens]))
        del self._works[int(lease[0])]
        self._start_bound()
        self.finished(work)

    def _start_bound(self) -> None:
        for lease, target in self.pool.collect("loop"):
            self._start(self._works[lease], target)

    def _schedule(self, engine: SimulatedEngine) -> None:
        self._count += 1
        engine.stamp = self._count
        when = engine.next_event()
        if when < FOREVER:
            heapq.heappush(self._events, (when, self._count, engine.number, None))

    def _warm_up(self) -> None:
        """The engines have served before: speeds are known as well as noise allows."""
        for step in range(4):
            for engine in self.engines:
                self._report(engine, -8.0 + REPORT_SECONDS * step, running=1)
        self.later(TICK_SECONDS, self._tick)
        self.later(REPORT_SECONDS, self._report_all)

    def _tick(self) -> None:
        self.pool.expire(self.now)
        if self._leases:
            self.later(TICK_SECONDS, self._tick)

    def _report_all(self) -> None:
        if not self._leases:
            return
        for engine in self.engines:
            self._report(engine, self.now, running=0)
        self.later(REPORT_SECONDS * max(1, len(self.engines) // 64), self._report_all)

    def _report(self, engine: SimulatedEngine, now: float, running: int) -> None:
        ranks = [
            RankReport(running_count=max(count, running), waiting_count=engine.waiting(rank))
            for rank, count in enumerate(engine.running)
        ]
        latency = engine.step_time() * float(np.exp(NOISE * self._noise.standard_normal()))
        self.pool.report_load(
            str(engine.number), ranks, now, seconds_per_token=latency, age=LAG_SECONDS
        )


def run_samples(rule: str, fleet: Fleet, load: Samples, seed: int) -> float:
    """Makespan of groups of samples, `window` groups in flight."""
    run = Run(rule, fleet, seed)
    groups = len(load.tokens)
    missing = [SIBLINGS] * groups
    upcoming = iter(range(load.window, groups))

    def works(group: int) -> list[Work]:
        return [
            Work(group * SIBLINGS + i, PROMPT, int(tokens), group)
            for i, tokens in enumerate(load.tokens[group])
        ]

    def submit(chosen: Sequence[int]) -> None:
        expected = None
        if rule == WITH_HISTORY:
            expected = np.repeat(load.prior[list(chosen)], SIBLINGS)
        request = LeaseRequest(
            count=len(chosen) * SIBLINGS,
            groups=[(f"g{group}", SIBLINGS) for group in chosen],
            expected_tokens=expected,
            may_wait=True,
        )
        run.submit([work for group in chosen for work in works(group)], request)

    def finished(work: Work) -> None:
        group = work.number // SIBLINGS
        missing[group] -= 1
        if not missing[group] and (following := next(upcoming, None)) is not None:
            submit([following])

    run.finished = finished
    submit(range(load.window))
    end = run.go()
    assert not any(missing), "every sample ended"
    return end


def run_talks(rule: str, fleet: Fleet, load: Talks, seed: int) -> float:
    """Makespan of conversations: a turn, a tool, the next turn."""
    run = Run(rule, fleet, seed)
    done = [0] * len(load.turns)
    context = [SYSTEM_PROMPT] * len(load.turns)
    talk_of: dict[int, int] = {}

    def submit(talks: Sequence[int]) -> None:
        works = []
        for talk in talks:
            number = len(talk_of)
            talk_of[number] = talk
            works.append(Work(number, context[talk], int(load.turns[talk][done[talk]]), talk))
        request = LeaseRequest(
            count=len(talks),
            sessions=[str(talk) for talk in talks],
            prefix_tokens=np.array([context[talk] if done[talk] else 0 for talk in talks]),
            may_wait=True,
        )
        if rule == "cache_aware":  # it has no sessions, only prompts
            request = LeaseRequest(count=len(talks), groups=[(str(talk), 1) for talk in talks])
        elif rule in MAINSTREAM:
            request = LeaseRequest(count=len(talks))
        run.submit(works, request)

    def finished(work: Work) -> None:
        talk = talk_of[work.number]
        done[talk] += 1
        context[talk] += work.tokens + TOOL_TOKENS
        if done[talk] == len(load.turns[talk]):
            run.pool.end_sessions([str(talk)])
        else:
            run.later(TOOL_SECONDS, lambda: submit([talk]))

    run.finished = finished
    submit(range(len(load.turns)))
    end = run.go()
    assert all(count == len(turns) for count, turns in zip(done, load.turns, strict=True))
    return end
