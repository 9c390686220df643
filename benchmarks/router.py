"""Our router beside sglang-router 0.3.2: what a decision costs, and requests end to end.

    python -m benchmarks.router --sglang-router PATH [--rounds N]

Both routers, the fake engines and this client share one machine, so requests per second are
contended; processor time of the router's process per decision is the number to compare. Every
round measures all in turn. What else runs on the machine can only add to a cost, so the least of
the rounds is judged, for both routers; the median is shown beside it. A decision: a lease acquired
and the one before it given back, with outcome and token count, in groups of eight. Of single leases
the client is counted too: `single_us`, `callers64_us`; sglang-router's costs beside them are its
own with the client of 1 and of 64 callers counted, and those of gRPC alone, which a single lease
cannot go below.

Exits with 1 when a target is missed (see TARGETS).
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import uvloop

from benchmarks.router_bare import STREAM, UNARY, cpu_per_message
from benchmarks.router_http import HttpPool
from benchmarks.router_leases import LongQueue, cpu_per_lease
from benchmarks.router_processes import (
    LeaseRouter,
    Measured,
    bare_server,
    fake_engines,
    lease_router,
    sglang_router,
)
from sluice.api.router.v1 import router_service_pb2 as pb

FEW, MANY, RANKS = 32, 256, 8  # engines: 256 and 2,048 targets
GROUP = 8
HELD = 4  # calls whose leases a client holds at a time
LIVE = 100_000
BARE_STREAM, BARE_UNARY = "bare gRPC stream, client: us", "bare gRPC call, client: us"
AT_MANY, MANY_OVER_FEW = "us@256, 2048 targets", "2048/256 targets"
TARGETS = {  # name: (limit, what)
    "us@8": (60.0, "CPU us per decision, 8 per call"),
    "us@256": (5.0, "CPU us per decision, 256 per call"),
    "us@1024": (1.0, "CPU us per decision, 1,024 per call"),
    "p50_ms@8": (1.0, "latency of a call of 8, one at a time, ms"),
    MANY_OVER_FEW: (1.5, "CPU at 2,048 targets over 256, 256 per call"),
    "single_us": (250.0, "CPU us of router and client per lease, one caller"),
    "callers64_us": (50.0, "CPU us of router and client per lease, 64 callers"),
    "queued_us": (30.0, "CPU us to give one back and bind the next of 100,000"),
    "rss_mib": (150.0, "resident MiB, 2,048 targets and 100,000 live leases"),
}


@dataclass
class Results:
    """Values of each round, by name."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def best(self, name: str) -> float:
        """The least disturbed round."""
        return (max if name.endswith("requests/s") else min)(self.values[name])


class LeaseLoad:
    """One client that leases `count` at a time and gives back what it got HELD calls ago."""

    def __init__(self, router: LeaseRouter, count: int) -> None:
        self._router, self._count = router, count
        self._client = str(uuid.uuid4())
        self._held: deque[range] = deque()
        self._calls = 0
        self._epoch = 0
        self.seconds: list[float] = []

    async def call(self) -> pb.AcquireLeasesResponse:
        returned = self._held.popleft() if len(self._held) >= HELD else range(0)
        groups = -(-self._count // GROUP)
        self._calls += 1
        request = pb.AcquireLeasesRequest(
            client_id=self._client,
            count=self._count,
            released=pb.ReleasedLeases(lease_ids=returned, token_counts=[1000] * len(returned)),
            group_ids=[f"{self._client}-{self._calls}-{group}" for group in range(groups)],
            group_sizes=[min(GROUP, self._count - GROUP * g) for g in range(groups)],
            known_epoch=self._epoch,
            request_id=str(uuid.uuid4()),
        )
        request.max_wait.SetInParent()
        started = time.perf_counter()
        response = await self._router.stub.AcquireLeases(request, timeout=30)
        self.seconds.append(time.perf_counter() - started)
        self._epoch = response.epoch
        first = response.first_lease_id
        self._held.append(range(first, first + self._count))
        return response

    async def close(self) -> None:
        for ids in self._held:
            released = pb.ReleasedLeases(lease_ids=ids)
            request = pb.AcquireLeasesRequest(client_id=self._client, released=released)
            await self._router.stub.AcquireLeases(request, timeout=30)


async def cpu_per_decision(
    router: LeaseRouter, count: int, clients: int, decisions: int
) -> tuple[float, list[float]]:
    """CPU us of the router per decision, and the seconds of each call."""
    loads = [LeaseLoad(router, count) for _ in range(clients)]
    calls = max(decisions // count // clients, 1)
    for _ in range(HELD + 1):
        await asyncio.gather(*(load.call() for load in loads))

    async def repeat(load: LeaseLoad) -> None:
        load.seconds.clear()
        for _ in range(calls):
            await load.call()

    before = router.measured.cpu_seconds()
    await asyncio.gather(*(repeat(load) for load in loads))
    used = router.measured.cpu_seconds() - before
    for load in loads:
        await load.close()
    seconds = [value for load in loads for value in load.seconds]
    return used * 1e6 / (calls * count * clients), seconds


async def resident_when_full(router: LeaseRouter) -> float:
    """Resident MiB while LIVE leases are out."""
    loads = [LeaseLoad(router, 1000) for _ in range(LIVE // 1000 // HELD)]
    for _ in range(HELD):
        for load in loads:
            await load.call()
    resident = router.measured.resident_mib()
    for load in loads:
        await load.close()
    return resident


class Lookaside:
    """Leases `count` at a time for all workers, then posts to the engine of each lease."""

    def __init__(self, router: LeaseRouter, count: int, engines: dict[str, HttpPool]) -> None:
        self._load, self._engines = LeaseLoad(router, count), engines
        self._places: dict[int, HttpPool] = {}
        self._ready: deque[HttpPool] = deque()
        self._fetching = asyncio.Lock()

    async def post(self) -> None:
        while not self._ready:
            async with self._fetching:
                if not self._ready:
                    self._take(await self._load.call())
        await self._ready.popleft().post()

    def _take(self, response: pb.AcquireLeasesResponse) -> None:
        for engine in response.engines:
            for rank in range(engine.dp_size):
                index = engine.first_target_index + rank
                self._places[index] = self._engines[engine.address]
        self._ready.extend(self._places[index] for index in response.target_indices)

    async def close(self) -> None:
        await self._load.close()


async def requests_per_second(
    post: Callable[[], Awaitable[None]], measured: Measured, workers: int, seconds: float
) -> tuple[float, float, float]:
    """(requests per second, CPU us per request of the router, and with this client) of workers
    that post one by one."""
    count, here = 0, Measured.this()
    end = time.perf_counter() + seconds

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await post()
            count += 1

    await post()
    before, before_here, started = measured.cpu_seconds(), here.cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(workers)))
    elapsed, used_here = time.perf_counter() - started, here.cpu_seconds() - before_here
    used = measured.cpu_seconds() - before
    return count / elapsed, used * 1e6 / count, (used + used_here) * 1e6 / count


async def run(binary: str, rounds: int) -> Results:
    results = Results()
    put, queue = results.values, LongQueue()
    async with AsyncExitStack() as stack:
        addresses = await stack.enter_async_context(fake_engines(4))
        few = await stack.enter_async_context(lease_router(addresses, FEW, RANKS))
        many = await stack.enter_async_context(lease_router(addresses, MANY, RANKS))
        bare = await stack.enter_async_context(bare_server())
        proxy = await stack.enter_async_context(sglang_router(binary, addresses))
        engines = {address: HttpPool(address) for address in addresses}
        for _ in range(rounds):
            for count, clients, decisions in (
                (8, 16, 24_000),
                (256, 4, 400_000),
                (1024, 4, 1_200_000),
            ):
                cost, _ = await cpu_per_decision(few, count, clients, decisions)
                put[f"us@{count}"].append(cost)
            _, seconds = await cpu_per_decision(few, 8, 1, 4_000)
            put["p50_ms@8"].append(statistics.median(seconds) * 1e3)
            put["single_us"].append(await cpu_per_lease(few, 1, 3_000))
            for name, method in ((BARE_STREAM, STREAM), (BARE_UNARY, UNARY)):
                cost = await cpu_per_message(bare.address, bare.measured, method, 3_000)
                put[name].append(cost)
            put["callers64_us"].append(await cpu_per_lease(few, 64, 19_200))
            put["queued_us"].append(queue.cpu_per_release(5_000))
            cost, _ = await cpu_per_decision(many, 256, 4, 400_000)
            put[AT_MANY].append(cost)
            for name, count in (("lookaside 8", 8), ("lookaside 256", 256)):
                aside = Lookaside(few, count, engines)
                rate, cost, _ = await requests_per_second(aside.post, few.measured, 64, 2.0)
                await aside.close()
                put[f"{name}: requests/s"].append(rate)
                put[f"{name}: us"].append(cost)
            _, _, both = await requests_per_second(proxy.http.post, proxy.measured, 1, 1.0)
            put["sglang-router, client: us@1"].append(both)
            rate, cost, both = await requests_per_second(proxy.http.post, proxy.measured, 64, 2.0)
            put["sglang-router, client: us@64"].append(both)
            put["sglang-router: requests/s"].append(rate)
            put["sglang-router: us"].append(cost)
            direct = engines[addresses[0]]
            rate, _, _ = await requests_per_second(direct.post, proxy.measured, 64, 1.0)
            put["no router: requests/s"].append(rate)
        put["rss_mib"].append(await resident_when_full(many))
        for pool in engines.values():
            pool.close()
    return results


def report(results: Results) -> int:
    """Print the table and the summary; 1 when a target is missed."""
    results.values[MANY_OVER_FEW].append(results.best(AT_MANY) / results.best("us@256"))
    print(f"{'':<30}{'best':>12}{'median':>12}")
    for name in sorted(results.values):
        print(f"{name:<30}{results.best(name):>12.2f}{results.median(name):>12.2f}")
    reached = True
    for name, (limit, what) in TARGETS.items():
        verdict = "pass" if results.best(name) <= limit else "FAIL"
        print(f"{verdict}  {what}: {results.best(name):.2f} <= {limit:g}")
        reached &= verdict == "pass"
    print(
        f"floor of single_us: {results.best(BARE_STREAM):.0f} for a message and its answer on a "
        f"stream that nobody reads, {results.best(BARE_UNARY):.0f} for such a call"
    )
    ratio = results.best("sglang-router: us") / results.best("us@256")
    print(
        f"router: cpu_us_per_decision={results.best('us@256'):.2f} "
        f"vs_sglang_router={ratio:.1f} p50_ms={results.best('p50_ms@8'):.2f} "
        f"single_us={results.best('single_us'):.0f} "
        f"callers64_us={results.best('callers64_us'):.0f} "
        f"queued_us={results.best('queued_us'):.0f}"
    )
    return 0 if reached else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Our router beside sglang-router 0.3.2.")
    parser.add_argument("--sglang-router", default=shutil.which("sglang-router") or "")
    parser.add_argument("--rounds", type=int, default=8)
    flags = parser.parse_args()
    if not shutil.which(flags.sglang_router):
        print("router: give --sglang-router, e.g. from `pip install sglang-router==0.3.2`")
        return 2
    return report(uvloop.run(run(flags.sglang_router, flags.rounds)))


if __name__ == "__main__":
    sys.exit(main())
