"""Leases of the engine in this process, for a process that no episodes role links to a router."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from services.rollout.engine import Engine
from services.rollout.episodes.leases import NO_HINTS, Hints
from services.rollout.wire import VersionBounds
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.router_client import Lease

ADDRESS = "local"


class LocalLeases:
    """The engine itself queues what it has no room for; its dp ranks take turns."""

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
        """One lease per sample, at once."""
        ranks = max(1, len(self._engine.status().rank_loads))
        rank = next(self._turns) % ranks  # one for all: they share the prompt
        futures = []
        for _ in range(count):
            future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
            future.set_result(Lease(0, self._engine_id, ADDRESS, rank))
            futures.append(future)
        return futures

    def release(
        self, pool: str, leases: Sequence[Lease], outcome: router_pb.Outcome, tokens: Sequence[int]
    ) -> None:
        """Nobody counts them."""

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None:
        """Nobody counts them."""

    def end(self, pool: str, hints: Hints) -> None:
        """Nobody keeps them."""
