"""A fleet of engines with continuous batching and data-parallel attention, as a fluid model.

The ranks of an engine step together: a step takes
    slow * (STEP_BASE + max over ranks (STEP_REQUEST * running + STEP_KV_TOKEN * tokens in cache))
and every running sample gets a token per step. Prefill of prompt tokens that are not in the
rank's cache stalls the whole engine; ranks prefill side by side. A rank runs at most `capacity`
samples, the others wait in order. Constants are assumptions; relative results are what counts.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

STEP_BASE = 0.020
STEP_REQUEST = 0.0002
STEP_KV_TOKEN = 20e-9
PREFILL_RATE = 20_000.0
RANKS = 8
_WHOLE = 1e-3  # of a step, against rounding


@dataclass(slots=True)
class Work:
    """One request: `context` prompt tokens, of which the rank that has `prefix` holds some."""

    number: int
    context: int
    tokens: int
    prefix: Hashable
    submitted: float = 0.0


class SimulatedEngine:
    """Steps counted as `steps`; a sample that joins at step v leaves at v + its tokens."""

    def __init__(self, number: int, slow: float, capacity: int) -> None:
        self.number, self.slow, self.capacity = number, slow, capacity
        self.running = [0] * RANKS
        self.stamp = 0  # of the event that is valid
        self.prefilled = self.prompted = 0
        self._tokens = [0.0] * RANKS  # in the cache, of running samples
        self._queues: list[deque[Work]] = [deque() for _ in range(RANKS)]
        self._cached: list[dict[Hashable, int]] = [{} for _ in range(RANKS)]
        self._busy = [0.0] * RANKS  # prefilling until
        self._leaving: list[tuple[float, int, int, Work]] = []
        self._steps = 0.0
        self._time = 0.0
        self._stalled = 0.0

    def add(self, rank: int, work: Work, now: float) -> None:
        """A request arrives; call `advance(now)` before."""
        if self.running[rank] < self.capacity:
            self._start(rank, work, now)
        else:
            self._queues[rank].append(work)

    def waiting(self, rank: int) -> int:
        return len(self._queues[rank])

    def step_time(self) -> float:
        """Seconds per token now."""
        return self._pace()[0]

    def next_event(self) -> float:
        """When the next sample leaves; inf when none runs."""
        if not self._leaving:
            return math.inf
        step, growth = self._pace()
        ahead = max(self._leaving[0][0] - self._steps, 0.0)
        return max(self._time, self._stalled) + step * ahead + growth * ahead * ahead / 2

    def advance(self, now: float) -> list[tuple[Work, int]]:
        """Go on to `now`; returns samples that left, with their ranks, and starts waiting ones."""
        begin = max(self._time, self._stalled)
        if now > begin and self._leaving:
            step, growth = self._pace()
            seconds = now - begin
            # Of step * done + growth * done^2 / 2 = seconds, in the form that cancels nothing.
            done = 2 * seconds / (step + math.sqrt(step * step + 2 * growth * seconds))
            self._steps += done
            for rank, count in enumerate(self.running):
                self._tokens[rank] += done * count
        self._time = now
        left = []
        while self._leaving and self._leaving[0][0] <= self._steps + _WHOLE:
            _, _, rank, work = heapq.heappop(self._leaving)
            self.running[rank] -= 1
            self._tokens[rank] -= work.context + work.tokens
            self._cached[rank][work.prefix] = work.context + work.tokens
            left.append((work, rank))
        for _, rank in left:
            while self._queues[rank] and self.running[rank] < self.capacity:
                self._start(rank, self._queues[rank].popleft(), now)
        return left

    def _start(self, rank: int, work: Work, now: float) -> None:
        cache = self._cached[rank]
        missing = max(work.context - cache.get(work.prefix, 0), 0)
        cache[work.prefix] = max(cache.get(work.prefix, 0), work.context)
        self.prompted += work.context
        self.prefilled += missing
        if missing:
            self._busy[rank] = max(self._busy[rank], now) + self.slow * missing / PREFILL_RATE
            self._stalled = max(self._stalled, self._busy[rank])
        self.running[rank] += 1
        self._tokens[rank] += work.context
        heapq.heappush(self._leaving, (self._steps + work.tokens, work.number, rank, work))

    def _pace(self) -> tuple[float, float]:
        """Seconds of a step, and by how much each step makes the next one longer."""
        worst, fullest = 0.0, 0
        for rank in range(RANKS):
            cost = STEP_REQUEST * self.running[rank] + STEP_KV_TOKEN * self._tokens[rank]
            if cost > worst:
                worst, fullest = cost, rank
        growth = self.slow * STEP_KV_TOKEN * self.running[fullest]
        return self.slow * (STEP_BASE + worst), growth
