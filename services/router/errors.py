"""What a router refuses, by gRPC code and reason."""

from __future__ import annotations

import grpc

from sluice.balance.routing import Refusal, RefusedError
from sluice.runtime.errors import QueueFullError, ServiceError

_UNAVAILABLE = frozenset({Refusal.NO_ENGINE, Refusal.NO_ENGINE_WITH_VERSION})


class LeasesRefusedError(QueueFullError):
    """No lease was given; `reason` says why, RetryInfo when to come back."""

    def __init__(self, refused: RefusedError, pool: str) -> None:
        super().__init__(f"pool {pool}: {refused}", retry_seconds=refused.retry_seconds, pool=pool)
        self.reason = refused.reason.value
        if refused.reason in _UNAVAILABLE:
            self.code = grpc.StatusCode.UNAVAILABLE


class TooManyPoolsError(ServiceError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_POOLS"


class QueueTimeoutError(ServiceError):
    """No rank came free in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "QUEUE_TIMEOUT"


class DrainingError(ServiceError):
    """This router stops; another one, or the same one restarted, will answer."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"
