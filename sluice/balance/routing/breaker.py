"""Circuit breaker per engine: failures of the engine open it, failures of the caller never."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Outcome(IntEnum):
    """How the request of a lease ended, as its client saw it."""

    UNKNOWN = 0
    OK = 1
    CONNECT_ERROR = 2
    SERVER_ERROR = 3  # 5xx, INTERNAL, UNAVAILABLE, DATA_LOSS
    TIMEOUT = 4  # the failures are CONNECT_ERROR to TIMEOUT
    CLIENT_ERROR = 5  # 4xx, INVALID_ARGUMENT: says nothing about the engine
    ABORTED = 6  # by the caller


FAILURES = frozenset({Outcome.CONNECT_ERROR, Outcome.SERVER_ERROR, Outcome.TIMEOUT})


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """Opens at `failures` within `window_seconds` making up half of the outcomes there."""

    failures: int = 5
    window_seconds: float = 30.0
    open_seconds: float = 30.0  # then half-open by itself; a re-registration does it at once


@dataclass
class Breaker:
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
        """The engine process came back: try it now rather than when the timer ends."""
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
