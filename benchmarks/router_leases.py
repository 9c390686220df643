"""What one lease costs: alone, among many callers of a client, and behind a long queue."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import numpy as np

from benchmarks.router_processes import LeaseRouter, Measured
from sluice.balance.routing import QUEUED, EngineSpec, LeaseRequest, Outcome, Pool, PoolConfig
from sluice.router_client import LeaseClient, LeaseDemand
from sluice.runtime.channel import create_channel

WARM = 300
WAITING = 100_000
SIBLINGS = 8
ENGINES, RANKS, RUNNING = 32, 8, 64
FOREVER = 1e9


async def cpu_per_lease(router: LeaseRouter, callers: int, leases: int) -> float:
    """CPU us of router and client together for a lease asked for, and given back with its tokens.

    Every caller asks for one at a time, all of them of one client.
    """
    here = Measured.this()
    async with create_channel(router.address) as channel, LeaseClient(channel) as client:

        async def work(count: int) -> None:
            for _ in range(count):
                held = await client.acquire(LeaseDemand(count=1))
                client.release(held, token_counts=[1000])

        await asyncio.gather(*(work(-(-WARM // callers)) for _ in range(callers)))
        each = leases // callers
        before = router.measured.cpu_seconds() + here.cpu_seconds()
        await asyncio.gather(*(work(each) for _ in range(callers)))
        used = here.cpu_seconds() + router.measured.cpu_seconds() - before
    return used * 1e6 / (each * callers)


class LongQueue:
    """A pool whose ranks are all busy, with WAITING leases behind them."""

    def __init__(self) -> None:
        config = PoolConfig(client_ttl=FOREVER, engine_ttl=FOREVER, max_leases_per_client=1 << 40)
        self._pool = Pool(config, np.random.default_rng(1))
        for number in range(ENGINES):
            spec = EngineSpec(name=str(number), dp_size=RANKS, max_running=RUNNING)
            self._pool.register(spec, 0.0)
        self._now, self._running = 0.0, deque[int]()
        while self._pool.waiting.count < WAITING:
            first = self._pool.tables.leases.next_id
            groups = [(f"{first}-{group}", SIBLINGS) for group in range(128)]
            request = LeaseRequest(count=128 * SIBLINGS, groups=groups, may_wait=True)
            grant = self._pool.acquire("client", request, self._now)
            self._running.extend((first + np.flatnonzero(grant.targets != QUEUED)).tolist())

    def cpu_per_release(self, count: int) -> float:
        """CPU us to give one lease back and bind the one that follows."""
        outcomes = np.array([Outcome.OK])
        started = time.process_time()
        for number in range(count):
            self._now += 0.001
            lease, tokens = np.array([self._running.popleft()]), np.array([500 + number % 700])
            self._pool.release("client", lease, self._now, outcomes=outcomes, output_tokens=tokens)
            self._running.extend(lease for lease, _ in self._pool.collect("client"))
        assert len(self._running) == ENGINES * RANKS * RUNNING, "one follows each"
        return (time.process_time() - started) * 1e6 / count
