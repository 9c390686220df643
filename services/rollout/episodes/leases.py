"""Leases over (engine, dp rank): which engine samples what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from services.rollout.wire import VersionBounds
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.client import typed_errors
from sluice.router_client import Lease, LeaseClient, Wanted


@dataclass(frozen=True)
class _Kind:
    """Requests that may share a call."""

    pool: str
    bounds: VersionBounds


@dataclass
class _Batch:
    """What is asked for in one turn of the event loop."""

    groups: list[tuple[str, int]] = field(default_factory=list)
    answer: asyncio.Task[list[asyncio.Future[Lease]]] | None = None


class RouterLeases:
    """One lease client per pool; groups that start together ask in one call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._clients: dict[str, LeaseClient] = {}
        self._batches: dict[_Kind, _Batch] = {}

    async def request(
        self, group_id: str, count: int, bounds: VersionBounds, pool: str
    ) -> list[asyncio.Future[Lease]]:
        """One future per sample, done when an engine has room for it; cancelling gives it up.

        Raises RemoteError when the router refuses for good; waits while no engine will do.
        """
        kind = _Kind(pool, bounds)
        batch = self._batches.get(kind)
        if batch is None:
            batch = self._batches[kind] = _Batch()
            batch.answer = asyncio.create_task(self._ask(kind), name="request leases")
        assert batch.answer is not None
        start = sum(size for _, size in batch.groups)
        batch.groups.append((group_id, count))
        cancelled = True
        try:
            futures = await asyncio.shield(batch.answer)
            cancelled = False
        finally:
            if cancelled:
                mine = slice(start, start + count)
                batch.answer.add_done_callback(lambda done: self._give_up_batch(pool, done, mine))
        return futures[start : start + count]

    def release(
        self, pool: str, leases: Sequence[Lease], outcome: pb.Outcome, tokens: Sequence[int]
    ) -> None:
        """Give leases back, with how their requests ended; does not wait."""
        self._client(pool).release(leases, outcome, tokens)

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None:
        """Stop waiting for leases, and give back those that came and were not used."""
        bound = []
        for future in futures:
            if not future.cancel() and not future.cancelled():
                bound.append(future.result())
        self.release(pool, bound, pb.OUTCOME_ABORTED, ())

    async def close(self) -> None:
        """Give everything back."""
        for client in self._clients.values():
            await client.close()

    async def _ask(self, kind: _Kind) -> list[asyncio.Future[Lease]]:
        """Runs in the next turn of the loop, when all who start together have joined."""
        groups = self._batches.pop(kind).groups
        wanted = Wanted(
            count=sum(size for _, size in groups),
            min_version=kind.bounds.min_version,
            exact_version=kind.bounds.exact_version,
            groups=groups,
        )
        with typed_errors():
            return await self._client(kind.pool).request(wanted)

    def _give_up_batch(
        self, pool: str, done: asyncio.Task[list[asyncio.Future[Lease]]], mine: slice
    ) -> None:
        """A group was cancelled while its batch was asked for."""
        if not done.cancelled() and done.exception() is None:
            self.give_up(pool, done.result()[mine])

    def _client(self, pool: str) -> LeaseClient:
        client = self._clients.get(pool)
        if client is None:
            client = self._clients[pool] = LeaseClient(self._channel, pool=pool)
            client.start()
        return client
