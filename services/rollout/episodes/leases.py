"""Says which engine and dp rank samples what: the router, or the one engine of this process."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import grpc

from services.rollout.engine.interface import Engine
from services.rollout.engine.wire import VersionBounds
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.router_client import Lease, LeaseClient, LeaseDemand

LOCAL_ADDRESS = "local"  # of the engine in this process, where it serves no other


@dataclass(frozen=True)
class Hints:
    """Tells the router of samples that it is asked to place.

    sessions: of the conversation that each belongs to, or none: its turns go to the same dp rank,
    which has `cached_tokens` of the prompt in its cache. expected_tokens: sampled ones of each,
    0 where nothing is known.
    """

    sessions: tuple[str, ...] = ()
    cached_tokens: int = 0
    expected_tokens: float = 0.0

    @classmethod
    def of_conversations(cls, count: int) -> Self:
        """Returns hints of new conversations, for their first turn."""
        prefix = uuid.uuid4()
        return cls(tuple(f"{prefix}/{index}" for index in range(count)))

    def of(self, indices: Sequence[int]) -> Hints:
        """Returns the hints of some of the samples."""
        if not self.sessions:
            return self
        return replace(self, sessions=tuple(self.sessions[index] for index in indices))

    def with_cache(self, tokens: int) -> Hints:
        """Returns hints for a later turn."""
        return replace(self, cached_tokens=tokens) if self.sessions else self


NO_HINTS = Hints()


@dataclass
class _LeaseBatch:
    """Gathers the leases that are asked for in one turn of the event loop."""

    groups: list[tuple[str, int]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)  # of each sample, "" for none
    cached_tokens: list[int] = field(default_factory=list)
    expected_tokens: list[float] = field(default_factory=list)
    answer: asyncio.Task[list[asyncio.Future[Lease]]] | None = None


class LeaseSource(Protocol):
    """Says which engine samples what."""

    async def request(
        self,
        group_id: str,
        count: int,
        bounds: VersionBounds,
        pool: str,
        hints: Hints = NO_HINTS,
    ) -> list[asyncio.Future[Lease]]: ...

    def release(
        self, pool: str, leases: Sequence[Lease], outcome: pb.Outcome, tokens: Sequence[int]
    ) -> None: ...

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None: ...

    def end(self, pool: str, hints: Hints) -> None: ...


class RouterLeases:
    """Asks the router, with one lease client per pool; groups that start together share a call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._clients: dict[str, LeaseClient] = {}
        self._batches: dict[tuple[str, VersionBounds], _LeaseBatch] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def request(
        self,
        group_id: str,
        count: int,
        bounds: VersionBounds,
        pool: str,
        hints: Hints = NO_HINTS,
    ) -> list[asyncio.Future[Lease]]:
        """Returns one future per sample, done when an engine has room; cancelling gives it up.

        Raises RemoteError when the router refuses for good; waits while no engine will do.
        """
        kind = pool, bounds
        batch = self._batches.get(kind)
        if batch is None:
            batch = self._batches[kind] = _LeaseBatch()
            batch.answer = asyncio.create_task(self._ask(pool, bounds), name="request leases")
        assert batch.answer is not None
        start = sum(size for _, size in batch.groups)
        batch.groups.append((group_id, count))
        batch.sessions += hints.sessions or [""] * count
        batch.cached_tokens += [hints.cached_tokens] * count
        batch.expected_tokens += [hints.expected_tokens] * count
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
        """Stop waiting for leases, and give back those that came.

        Those given back before are ignored.
        """
        bound = []
        for future in futures:
            if not future.cancel() and not future.cancelled():
                bound.append(future.result())
        self.release(pool, bound, pb.OUTCOME_ABORTED, ())

    def end(self, pool: str, hints: Hints) -> None:
        """Say that no further turn comes, so that no rank is kept for one; does not wait."""
        if hints.sessions:
            ended = self._client(pool).end_sessions(hints.sessions)
            task = asyncio.create_task(ended, name="end sessions")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Give everything back."""
        await asyncio.gather(*self._ending)
        for client in self._clients.values():
            await client.close()

    async def _ask(self, pool: str, bounds: VersionBounds) -> list[asyncio.Future[Lease]]:
        """Runs in the next turn of the loop, when all who start together have joined."""
        batch = self._batches.pop((pool, bounds))
        has_sessions = any(batch.sessions)
        wanted = LeaseDemand(
            count=sum(size for _, size in batch.groups),
            min_version=bounds.min_version,
            exact_version=bounds.exact_version,
            groups=batch.groups,
            sessions=batch.sessions if has_sessions else (),
            cached_tokens=batch.cached_tokens if has_sessions else (),
            expected_tokens=batch.expected_tokens if any(batch.expected_tokens) else (),
        )
        return await self._client(pool).request(wanted)

    def _give_up_batch(
        self, pool: str, done: asyncio.Task[list[asyncio.Future[Lease]]], mine: slice
    ) -> None:
        """Gives up the leases of a group that was cancelled while its batch was asked for."""
        if not done.cancelled() and done.exception() is None:
            self.give_up(pool, done.result()[mine])

    def _client(self, pool: str) -> LeaseClient:
        client = self._clients.get(pool)
        if client is None:
            client = self._clients[pool] = LeaseClient(self._channel, pool=pool)
            client.start()
        return client


class LocalLeases:
    """Leases one engine without limit: it queues what it has no room for.

    Its dp ranks take turns.
    """

    def __init__(self, engine: Engine, engine_id: str) -> None:
        self._engine, self._engine_id = engine, engine_id
        self._turns = itertools.count()

    async def request(
        self,
        group_id: str,
        count: int,
        bounds: VersionBounds,
        pool: str,
        hints: Hints = NO_HINTS,
    ) -> list[asyncio.Future[Lease]]:
        """Returns one lease per sample, at once."""
        ranks = max(1, len(self._engine.status().rank_loads))
        rank = next(self._turns) % ranks  # one for all: they share the prompt
        futures = []
        for _ in range(count):
            future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
            future.set_result(Lease(0, self._engine_id, LOCAL_ADDRESS, rank))
            futures.append(future)
        return futures

    def release(
        self, pool: str, leases: Sequence[Lease], outcome: pb.Outcome, tokens: Sequence[int]
    ) -> None:
        """Does nothing: nobody counts them."""

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None:
        """Does nothing: nobody counts them."""

    def end(self, pool: str, hints: Hints) -> None:
        """Does nothing: no rank is kept."""
