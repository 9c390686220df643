"""The way to the router: whether it can be reached, and how long to wait before the next try."""

from __future__ import annotations

import asyncio
import logging
import random
import time

import grpc
from grpc_status import rpc_status

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.runtime.remote import error_from_status

logger = logging.getLogger(__name__)

DOWN_SECONDS = 1.0  # leases picked locally before the router is tried again
RETRY_SECONDS = 0.5
_SCATTER = 0.25  # share of a pause; those refused together do not come back together
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # a router that stops ends its calls so
)


class RouterLink:
    """Tells a router that refuses, and says when to return, from one that is gone."""

    def __init__(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        self.stub = pb_grpc.RouterServiceStub(channel)
        self._rng = rng
        self._down_until = 0.0
        self._pause = 0.0  # what the last refusal asked for

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self._down_until

    def answered(self) -> None:
        """Note that the router is there."""
        self._down_until = 0.0

    async def rest(self) -> None:
        """Between two streams of engines."""
        await asyncio.sleep(DOWN_SECONDS)

    async def pause(self) -> None:
        """Until a call that failed is worth another try."""
        seconds = max(self._pause, RETRY_SECONDS)
        await asyncio.sleep(seconds * self._rng.uniform(1.0, 1.0 + _SCATTER))

    async def acquire(
        self, request: pb.AcquireLeasesRequest, seconds: float
    ) -> pb.AcquireLeasesResponse | None:
        """The answer; None when the same call may succeed later. Raises AioRpcError."""
        try:
            answer: pb.AcquireLeasesResponse
            answer = await self.stub.AcquireLeases(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if not self._is_passing(error):
                raise
            return None
        self.answered()
        return answer

    def _is_passing(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether trying again helps; notes a router that cannot be reached."""
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        self._pause = error_from_status(status).retry_seconds if status is not None else 0.0
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return status is not None
        if error.code() not in _PASSING:
            return False
        if status is None:
            if not self.is_down:
                logger.warning("router: %s; picking engines locally", error.details())
            self._down_until = time.monotonic() + DOWN_SECONDS
        return True
