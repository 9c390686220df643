"""The episode workers that the router knows, and Rollout calls that outlive one of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TypeVar

import grpc

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import ClientCache, RemoteError, RolloutClient, RouterClient
from sluice.loop import trace
from sluice.loop.recovery import Patience
from sluice.runtime.security import SecurityConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WORKER_GONE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # of one call; the same request goes on where it was
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # too busy
}


class WorkerLostError(Exception):
    """An episode worker went away, or was too busy, in the middle of a Rollout.

    `retry_seconds`: when to ask again, 0 where nobody says.
    """

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


@contextlib.contextmanager
def _lost(client: RolloutClient) -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        if error.code not in _WORKER_GONE:
            raise
        message = f"episode worker {client.address}: {error}"
        raise WorkerLostError(message, error.retry_seconds) from error


class NoWorkerError(Exception):
    """The router knows no episode worker."""


class EpisodeWorkers:
    """Chooses a worker for every Rollout call, in turn."""

    def __init__(self, router: RouterClient, security: SecurityConfig, wait_seconds: float) -> None:
        self._router, self._wait_seconds = router, wait_seconds
        self._clients = ClientCache(RolloutClient, security)
        self._asked: dict[str, RolloutClient] = {}  # by the request_id of a call under way
        self._worker_count = 1
        self._turn = 0
        self._cause = "no answer"  # why there is no worker, while there is none

    async def close(self) -> None:
        await self._clients.close()

    def split(self, groups: Sequence[T]) -> list[Sequence[T]]:
        """One share a worker, as even as can be; no empty ones."""
        shares = [groups[i :: self._worker_count] for i in range(self._worker_count)]
        return [share for share in shares if share]

    async def refresh(self) -> list[str]:
        """Addresses of the workers; waits for the first one. Raises NoWorkerError."""
        patience = Patience("an episode worker")
        try:
            async with asyncio.timeout(self._wait_seconds):
                while not (addresses := await self._addresses()):
                    patience.waited(self._cause)
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise NoWorkerError(
                f"no episode worker in {self._wait_seconds:g} s: {self._cause}"
            ) from None
        self._worker_count = len(addresses)
        return addresses

    async def _addresses(self) -> list[str]:
        try:
            workers = await self._router.list_engines(router_pb.ROLE_EPISODES)
        except RemoteError as error:
            if error.code not in _WORKER_GONE:
                raise
            self._cause = f"router {self._router.address}: {error}"
            return []  # it restarts
        self._cause = f"router {self._router.address} knows none"
        return [w.address for w in workers if w.state == router_pb.ENGINE_STATE_ACTIVE]

    async def rollout(self, request: pb.RolloutRequest) -> AsyncIterator[pb.RolloutResponse]:
        """The stream of one call. Raises WorkerLostError when a repeat elsewhere may help."""
        client = await self._next()
        self._asked[request.request_id] = client
        try:
            with _lost(client):
                async for response in client.rollout(request):
                    if response.HasField("finished"):
                        trace.add_group(response.finished)
                    yield response
        finally:
            if self._asked.get(request.request_id) is client:
                del self._asked[request.request_id]

    async def evaluate(self, request: pb.EvaluateRequest) -> AsyncIterator[pb.EvaluateResponse]:
        """As `rollout`."""
        client = await self._next()
        with _lost(client):
            async for response in client.evaluate(request):
                yield response

    async def cancel(self, request_id: str, group_ids: Sequence[str]) -> None:
        """End groups of a call of `rollout` that is under way; without it there are none.

        Raises WorkerLostError; what runs there then is not waited for.
        """
        client = self._asked.get(request_id)
        if client is None:
            return
        try:
            with _lost(client):
                await client.cancel(request_id, group_ids)
        except RemoteError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:  # it settled meanwhile
                raise

    async def _next(self) -> RolloutClient:
        addresses = await self.refresh()
        self._turn += 1
        return self._clients[addresses[self._turn % len(addresses)]]
