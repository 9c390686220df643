"""Another router at the same address, by mistake: one of the two is refused by name.

Engines and workers tell, for they hear both take turns: a router that was started anew takes the
place of the one before, which is never heard again. The one that was started first is refused. It
leases nothing and is not ready until nobody has told of the other one for a while; both say so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable

import grpc

from services.router import metrics
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.runtime.errors import ServiceError
from sluice.runtime.waits import Waits

logger = logging.getLogger(__name__)

FORGET_SECONDS = 90.0  # after the last who told; those remember a router for 60 s


class SecondRouterError(ServiceError):
    """This router is refused: another one, started later, serves the same engines."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SECOND_ROUTER"


def identify(address: str) -> str:
    """Names this router for good: names of routers sort by their start."""
    now = time.time()
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    return f"{start}.{int(now * 1000) % 1000:03}Z {address} {socket.gethostname()}:{os.getpid()}"


class Rivals:
    """What is told of another router, until nobody has told of it for FORGET_SECONDS."""

    def __init__(self, clock: Callable[[], float], waits: Waits) -> None:
        self._clock, self._waits = clock, waits
        self.identity = ""  # once the port is open
        self._other = self._teller = ""
        self._until = 0.0
        self._listed = contextlib.ExitStack()
        self.refused = False

    def hear(self, request: pb.RegisterEngineRequest) -> None:
        """Take what an engine or a worker says. Raises SecondRouterError where this is refused."""
        if request.refused_router_id and request.kept_router_id:
            names = {request.refused_router_id, request.kept_router_id}
            if self.identity in names and len(names) == 2:
                (other,) = names - {self.identity}
                is_refused = self.identity == request.refused_router_id
                self._note(other, request.engine.engine_id, is_refused)
        self.check()

    def check(self) -> None:
        """Raises SecondRouterError while this router is refused."""
        if self.refused:
            raise SecondRouterError(self._describe(), router=self.identity, other=self._other)

    def expire(self) -> None:
        """Forget the other one once nobody tells of it any more."""
        if self._other and self._clock() >= self._until:
            logger.warning("nobody tells of router %s any more", self._other)
            self._other, self.refused = "", False
            metrics.SECOND_ROUTER.set(0)
            self._listed.close()

    def close(self) -> None:
        self._listed.close()

    def _note(self, other: str, teller: str, is_refused: bool) -> None:
        self._until = self._clock() + FORGET_SECONDS
        if (other, is_refused) == (self._other, self.refused):
            return
        self._other, self._teller, self.refused = other, teller, is_refused
        logger.error("%s", self._describe())
        metrics.SECOND_ROUTER.set(1)
        self._listed.close()
        waiting = self._waits.waiting(
            "one of two routers of the same engines to be stopped",
            on=[other],
            explain=self._describe,
        )
        self._listed.enter_context(waiting)

    def _describe(self) -> str:
        refused, kept = self.identity, self._other
        if not self.refused:
            refused, kept = kept, refused
        return (
            f"{self._teller} hears two routers in turn: [{refused}] is refused, for [{kept}] was "
            "started later; stop one of them"
        )
