"""Trying again: how long to pause after a failure, until when, and after which failures."""

from __future__ import annotations

import random
from dataclasses import dataclass

import grpc

from sluice.runtime.errors import RemoteError

# Codes of a server that is down, starting, stopping or too slow: the same call may succeed later.
PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,  # a server that stops ends its calls so
    }
)


def is_passing(error: RemoteError | grpc.aio.AioRpcError) -> bool:
    """Whether the same call may succeed later, for all its code says."""
    code = error.code if isinstance(error, RemoteError) else error.code()
    return code in PASSING


@dataclass(frozen=True)
class Backoff:
    """Pauses that double with each failure in a row: from `first` to `longest` seconds.

    scatter: share by which a pause may be longer, drawn at random, so that callers which failed
    together do not come back together.
    """

    first: float
    longest: float
    scatter: float = 0.0

    def seconds(self, failures: int, rng: random.Random | None = None) -> float:
        """The pause after `failures` in a row, at least one."""
        doublings = min(max(failures, 1) - 1, 60)
        pause = min(self.longest, self.first * 2.0**doublings)
        if not self.scatter:
            return pause
        return pause * (1.0 + (rng or random).uniform(0.0, self.scatter))
