"""The health of engines: the loads and speeds they report, and a breaker for those that fail."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from sluice.balance.routing.types import FAILURES, BreakerConfig, FloatArray, IntArray, Outcome

NO_LIMIT = 1 << 40
_SNAPSHOTS = 32
_NEAR_SECONDS = 2.0  # an older snapshot says nothing of a report
_FIRST_SECONDS = 1.0  # what the first report of a target weighs
_FILL = 0.95  # share of the KV cache that credits may plan with
UNIT = 20  # slowdown is counted in twentieths, so that searches over step times are integers
_CLAMP = (0.25, 8.0)
_LARGEST_SHARE = 0.35  # of one report, however long the one before is ago: it may be noise


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One dp rank as its engine sees it; max_tokens 0 means no KV limit is known."""

    running_count: int
    waiting_count: int = 0
    used_tokens: int = 0
    max_tokens: int = 0


class LoadReports:
    """Corrects the charges of the router by the loads that engines report; one row per target.

    A report is always older than the newest charges. It therefore never replaces them: what it
    shows beyond (or short of) the charges at the time it was taken is kept apart, smoothed, and
    added to the charges of now.
    """

    def __init__(self, smoothing_seconds: float = 10.0, snapshot_seconds: float = 0.25) -> None:
        self._smoothing = smoothing_seconds
        self._snapshot_seconds = snapshot_seconds
        self._times: list[float] = []
        self._snapshots: list[tuple[IntArray, IntArray]] = []  # charges, charges ever made
        self._external = np.zeros(0)
        self._report_time = np.zeros(0)
        self._charged_before = np.zeros(0, dtype=np.int64)
        self._any = False
        self.kv_limit = np.zeros(0, dtype=np.int64)  # requests that fit, NO_LIMIT if unknown

    def widen(self, target_count: int) -> None:
        """Make room for more targets."""
        more = target_count - len(self._external)
        none = np.zeros(more, dtype=np.int64)
        self._external = np.concatenate([self._external, np.zeros(more)])
        self._report_time = np.concatenate([self._report_time, np.full(more, -math.inf)])
        self._charged_before = np.concatenate([self._charged_before, none])
        self.kv_limit = np.concatenate([self.kv_limit, none + NO_LIMIT])

    def forget(self, first: int, stop: int, charged_ever: IntArray) -> None:
        """Drop the reports of a restarted engine's targets."""
        self._external[first:stop] = 0.0
        self._report_time[first:stop] = -math.inf
        self._charged_before[first:stop] = charged_ever[first:stop]
        self.kv_limit[first:stop] = NO_LIMIT

    @property
    def any(self) -> bool:
        """Whether loads differ from charges."""
        return self._any

    def snapshot(self, charges: IntArray, charged_ever: IntArray, now: float) -> None:
        """Remember the charges of now, at most once per snapshot interval."""
        if self._times and now - self._times[-1] < self._snapshot_seconds:
            return
        self._times.append(now)
        self._snapshots.append((charges.copy(), charged_ever.copy()))
        if len(self._times) > _SNAPSHOTS:
            del self._times[0], self._snapshots[0]

    def report(
        self,
        target: int,
        rank: RankReport,
        taken: float,
        now: float,
        current: tuple[IntArray, IntArray],
        credit: int,
    ) -> None:
        """Take a report of the state at time `taken` (<= now); older ones are ignored.

        current: the charges of now, and all charges ever made.
        Beyond twice the credit of the rank more requests say no more than that it is full, and
        would be remembered for long after they have gone, or if they never were.
        """
        if taken <= self._report_time[target]:
            return
        seen = min(rank.running_count + rank.waiting_count, 2 * credit)
        self._correct(target, seen, taken, now, current)
        self._report_time[target] = taken
        self.kv_limit[target] = _kv_limit(rank)

    def _correct(
        self, target: int, seen: int, taken: float, now: float, current: tuple[IntArray, IntArray]
    ) -> None:
        """Move the difference towards what the charges around `taken` do not explain."""
        after = bisect.bisect_right(self._times, taken)
        if not after or taken - self._times[after - 1] > _NEAR_SECONDS:
            return  # nothing is remembered of then
        charges, ever = self._snapshots[after - 1]
        later, ever_later = self._snapshots[after] if after < len(self._times) else current
        made = _count(ever_later, target) - _count(ever, target)  # before or after what ended
        low, high = max(_count(later, target) - made, 0), _count(charges, target) + made
        residual = seen - min(max(seen, low), high)
        before = self._report_time[target]
        elapsed = min(now - before, self._smoothing) if before > -math.inf else _FIRST_SECONDS
        share = -math.expm1(-max(elapsed, 0.0) / self._smoothing)
        self._external[target] += share * (residual - self._external[target])
        self._charged_before[target] = _count(ever, target)
        self._any = True

    def load(self, charges: IntArray, charged_ever: IntArray) -> IntArray:
        """int64[m]: charges corrected by reports, never below charges made since the report."""
        if not self._any:
            return charges
        young = np.minimum(charges, charged_ever - self._charged_before)
        corrected = charges + np.rint(self._external).astype(np.int64)
        return np.maximum(corrected, np.maximum(young, 0))

    def load_of(self, target: int, charge: int, charged_ever: int) -> int:
        """`load` of one target, without vectors."""
        young = min(charge, charged_ever - int(self._charged_before[target]))
        return max(charge + round(float(self._external[target])), young, 0)


def _count(column: IntArray, target: int) -> int:
    """Of a target that may be younger than the column."""
    return int(column[target]) if target < len(column) else 0


def _kv_limit(rank: RankReport) -> int:
    if rank.max_tokens <= 0:
        return NO_LIMIT
    if rank.waiting_count > 0:
        return max(rank.running_count, 1)
    if rank.running_count == 0 or rank.used_tokens <= 0:
        return NO_LIMIT
    each = rank.used_tokens / rank.running_count
    return min(max(int(rank.max_tokens * _FILL / each), 1), NO_LIMIT)


class SpeedTable:
    """Compares how fast engines are; one row per engine.

    A reported latency is divided by the step time predicted for the reported batch, so engines
    compare at equal batch; slowdown is that ratio over the median engine's. Noise is kept out
    by smoothing over `smoothing_seconds` and by `hysteresis`: a slowdown is published when it
    has moved by that factor, and within that factor of 1 it is exactly 1.
    """

    def __init__(
        self,
        step_base: float,
        step_per_request: float,
        smoothing_seconds: float = 3.0,
        hysteresis: float = 1.15,
    ) -> None:
        self._base = step_base
        self._per_request = step_per_request
        self._smoothing = smoothing_seconds
        self._hysteresis = hysteresis
        self._ratio = np.zeros(0)  # float64[engine]: smoothed log ratio, NaN unknown
        self._time = np.zeros(0)
        self.slowdown: IntArray = np.zeros(0, dtype=np.int64)  # in 1/UNIT
        self.is_even = True  # all engines are as fast as each other

    def add_engine(self) -> None:
        self._ratio = np.append(self._ratio, np.nan)
        self._time = np.append(self._time, 0.0)
        self.slowdown = np.append(self.slowdown, UNIT)
        self._compare()

    def forget(self, engine: int) -> None:
        """Take a restarted or removed engine for an average one."""
        self._ratio[engine] = np.nan
        self.slowdown[engine] = UNIT
        self._compare()

    def report(self, engine: int, latency: float, running: float, now: float) -> None:
        """Take seconds per token, seen with `running` requests on the engine's fullest rank."""
        if not (latency > 0 and math.isfinite(latency)):
            return
        value = math.log(latency / (self._base + self._per_request * running))
        if math.isnan(self._ratio[engine]):
            self._ratio[engine] = value
        else:
            share = -math.expm1(-max(now - self._time[engine], 0.0) / self._smoothing)
            share = min(share, _LARGEST_SHARE)
            self._ratio[engine] += share * (value - self._ratio[engine])
        self._time[engine] = now
        self._publish()

    def _publish(self) -> None:
        known = ~np.isnan(self._ratio)
        ratio = np.exp(self._ratio[known] - _median(self._ratio[known]))
        ratio = np.clip(ratio, *_CLAMP)
        ratio[(ratio < self._hysteresis) & (ratio > 1 / self._hysteresis)] = 1.0
        wanted = np.maximum(np.rint(ratio * UNIT).astype(np.int64), 1)
        current = self.slowdown[known]
        change = wanted / current
        moved = (change >= self._hysteresis) | (change <= 1 / self._hysteresis) | (wanted == UNIT)
        self.slowdown[known] = np.where(moved, wanted, current)
        self._compare()

    def _compare(self) -> None:
        self.is_even = bool((self.slowdown == self.slowdown[0]).all())


def _median(values: FloatArray) -> float:
    """np.median of one or more values, several times cheaper."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] + ordered[~middle]) / 2


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass
class Breaker:
    """Keeps leases off an engine that fails: its own failures open it, the caller's never."""

    config: BreakerConfig = field(default_factory=BreakerConfig)
    state: BreakerState = BreakerState.CLOSED
    opened_at: float = 0.0
    _failures: deque[float] = field(default_factory=deque)
    _successes: deque[float] = field(default_factory=deque)

    @property
    def counts_successes(self) -> bool:
        """Whether a success would change anything."""
        return self.state is BreakerState.HALF_OPEN or bool(self._failures)

    def record(self, outcome: Outcome, now: float) -> bool:
        """Count an outcome; True when the state changed."""
        before = self.state
        if before is BreakerState.OPEN:
            return False  # requests sent before it opened
        if outcome in FAILURES:
            self._fail(now)
        elif outcome is Outcome.OK or (
            outcome is Outcome.CLIENT_ERROR and before is BreakerState.HALF_OPEN
        ):
            self._succeed(now)  # an engine that refuses a request is there
        return self.state is not before

    def probe(self, now: float) -> bool:
        """Let one request through after a while in OPEN; True when the state changed."""
        if self.state is BreakerState.OPEN and now - self.opened_at >= self.config.open_seconds:
            self.state = BreakerState.HALF_OPEN
            return True
        return False

    def registered_again(self) -> None:
        """Try a restarted engine process now, not when the timer ends."""
        self._failures.clear()
        self._successes.clear()
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN

    def _fail(self, now: float) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self._open(now)
            return
        self._failures.append(now)
        self._trim(now)
        enough = len(self._failures) >= self.config.failures
        if enough and len(self._failures) >= len(self._successes):
            self._open(now)

    def _succeed(self, now: float) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED
            self._failures.clear()
            self._successes.clear()
        elif self._failures:  # successes matter only beside failures, so idle engines stay small
            self._successes.append(now)
            self._trim(now)

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        self.opened_at = now
        self._failures.clear()
        self._successes.clear()

    def _trim(self, now: float) -> None:
        for times in (self._failures, self._successes):
            while times and times[0] < now - self.config.window_seconds:
                times.popleft()
