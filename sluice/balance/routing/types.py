"""What goes into a pool and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.config import Config

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Policy = Literal["step_time", "min_count", "power_of_two", "round_robin", "random", "cache_aware"]

NO_VERSION = -1
HEARTBEATS_PER_TTL = 3  # of a client


class BreakerConfig(Config):
    """Says when an engine that fails gets no more leases."""

    failures: int = Field(5, ge=1, description="Within the window, and half of its outcomes.")
    window_seconds: float = Field(30.0, gt=0)
    open_seconds: float = Field(
        30.0,
        gt=0,
        description="Until a trial lease; an engine that registers anew gets it at once.",
    )


class PoolConfig(Config):
    """Says how leases of a pool are given and kept."""

    policy: Policy = "step_time"
    late_binding: bool = Field(True, description="Leases beyond the credits wait in the router.")
    credit_factor: float = Field(
        1.0, gt=0, le=1000, description="Credit of a rank, in its max_running."
    )
    step_base: float = Field(
        0.020, gt=0, le=60, description="Seconds of an engine step with no request."
    )
    step_per_request: float = Field(
        0.0002, ge=1e-6, description="Seconds one more request on the fullest rank adds."
    )
    prefill_rate: float = Field(20_000.0, gt=0, description="Prompt tokens per second of a rank.")
    break_margin: float = Field(
        4.0, ge=0, description="A session moves when that gains this many times its prefill."
    )
    client_ttl: float = Field(60.0, gt=0, description="Seconds a silent client keeps its leases.")
    engine_ttl: float = Field(15.0, gt=0, description="Seconds until a silent engine is lost.")
    session_ttl: float = Field(1800.0, gt=0, description="Seconds a session idles.")
    group_ttl: float = Field(600.0, gt=0, description="Seconds a group without leases is known.")
    max_leases: int = Field(1_000_000, ge=1)
    max_leases_per_client: int = Field(200_000, ge=1)
    max_queued: int = Field(200_000, ge=0)
    breaker: BreakerConfig = BreakerConfig()


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Describes one engine replica as it registers.

    instance: changes when the process does; what the earlier one ran is lost.
    max_running: requests one dp rank runs at a time, 0 for no limit.
    version: of the serving weights, NO_VERSION without any.
    """

    name: str
    address: str = ""
    instance: str = ""
    dp_size: int = 1
    max_running: int = 0
    version: int = 0
    digest: str = ""


class EngineState(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"
    BROKEN = "broken"  # its breaker is open
    LOST = "lost"  # no heartbeat


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """Shows an engine and its ranks; `first_target` is the row of rank 0, the others follow."""

    spec: EngineSpec
    state: EngineState
    first_target: int
    lease_counts: tuple[int, ...]
    slowdown: float
    last_seen: float


class Needs(NamedTuple):
    """Bounds the weight versions of a lease: at least `minimum`, and `exact` if not None."""

    minimum: int = 0
    exact: int | None = None


ANY_VERSION = Needs()


@dataclass(kw_only=True, slots=True)  # not frozen, which makes each at three times the cost
class LeaseRequest:
    """Asks for `count` leases.

    groups: (group id, how many) for consecutive leases; empty, or the numbers sum to count.
    expected_tokens: float64[count] of output, NaN unknown.
    sessions: one key per lease, "" for none; prefix_tokens int64[count]: what a session's
    next turn finds in the cache of its rank.
    may_wait: leases beyond the credits are queued instead of refused.
    excluded: names of engines to keep off while another one has a free slot.
    """

    count: int
    groups: Sequence[tuple[str, int]] = ()
    expected_tokens: FloatArray | None = None
    sessions: Sequence[str] = ()
    prefix_tokens: IntArray | None = None
    needs: Needs = ANY_VERSION
    may_wait: bool = False
    excluded: frozenset[str] = frozenset()


class Grant(NamedTuple):
    """Grants leases first_id, first_id + 1, ...; targets int64[count], QUEUED where one waits.

    session_count: how many went where their session was before; queued_count: how many wait.
    """

    first_id: int
    targets: IntArray
    session_count: int = 0
    queued_count: int = 0


@dataclass(frozen=True, kw_only=True)
class LeaseClaims:
    """Lists what a client says it holds: int64[n] each; ranks[i] is -1 for a queued lease.

    engines[i] indexes `names`.
    """

    ids: IntArray
    names: Sequence[str] = ()
    engines: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ranks: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """adopted: taken over from an earlier router; unknown: int64[n], ids not charged here;
    dropped: leases granted here that the client does not hold; awaited: engines of unknown ones
    that have not registered; held_before: whether a router granted one of those adopted."""

    adopted_count: int
    unknown: IntArray
    dropped_count: int
    awaited: frozenset[str] = frozenset()
    held_before: bool = False


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


class Refusal(StrEnum):
    """Why leases were refused; each is a reason a caller can act on."""

    NO_ENGINE = "NO_ENGINE"
    NO_ENGINE_WITH_VERSION = "NO_ENGINE_WITH_VERSION"
    NO_CREDIT = "NO_CREDIT"
    SETTLING = "SETTLING"  # engines wait for the clients of an earlier router
    RENEW_FIRST = "RENEW_FIRST"  # the client knew another router, and may hold leases of it
    TOO_MANY_LEASES = "TOO_MANY_LEASES"
    TOO_MANY_LEASES_OF_CLIENT = "TOO_MANY_LEASES_OF_CLIENT"
    QUEUE_FULL = "QUEUE_FULL"


class LeaseRefusedError(Exception):
    """Refuses leases; nothing was charged. Worth another try after `retry_seconds`."""

    def __init__(self, reason: Refusal, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_seconds = retry_seconds


def all_true(mask: BoolArray) -> bool:
    """`mask.all()`, at half its cost for the few values that most calls bring."""
    return int(np.count_nonzero(mask)) == len(mask)


def any_true(mask: BoolArray) -> bool:
    """`mask.any()`, at half its cost."""
    return int(np.count_nonzero(mask)) > 0


def full_of(value: int, count: int) -> IntArray:
    """`np.full`, at half its cost."""
    array = np.empty(count, dtype=np.int64)
    array.fill(value)
    return array
