"""The sampler gives back every lease, whenever its group is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from services.rollout.engine.interface import Delta, FinishReason, Generation, Sampling
from services.rollout.engine.wire import VersionBounds
from services.rollout.episodes.sampler import Sampler, SamplingPrompt
from sluice.router_client import Lease
from sluice.runtime.waits import Waits


class CountedLeases:
    """Leases that come all at once; those held are known."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.futures: list[asyncio.Future[Lease]] = []

    async def request(self, group_id: str, count: int, *_: Any) -> list[asyncio.Future[Lease]]:
        loop = asyncio.get_running_loop()
        self.futures = [loop.create_future() for _ in range(count)]
        return self.futures

    def grant(self) -> None:
        for lease_id, future in enumerate(self.futures):
            self.held.add(lease_id)
            future.set_result(Lease(lease_id, f"engine-{lease_id % 2}", "address", 0))

    def release(self, pool: str, leases: Sequence[Lease], *_: Any) -> None:
        self.held -= {lease.lease_id for lease in leases}

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None:
        came = [future for future in futures if not future.cancel() and not future.cancelled()]
        self.release(pool, [future.result() for future in came])

    def end(self, *_: Any) -> None:
        pass


class SilentEngines:
    async def generate(self, *_: Any) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("turns", range(8))
async def test_a_group_cancelled_just_after_its_leases_came_gives_them_back(turns: int) -> None:
    """So many turns of the loop after: in one of them nobody has begun to use the leases."""
    leases = CountedLeases()
    engines: Any = SilentEngines()
    sampler = Sampler(leases, engines, Waits(), attempts=1)
    prompt = SamplingPrompt(
        group_id="g",
        token_ids=(1, 2),
        sample_count=4,
        sampling=Sampling(max_new_tokens=4),
        bounds=VersionBounds(),
        pool="p",
    )
    group = asyncio.create_task(sampler.sample(prompt))
    while not leases.futures:
        await asyncio.sleep(0)
    leases.grant()
    for _ in range(turns):
        await asyncio.sleep(0)
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)
    for _ in range(10):  # for what was cancelled to end
        await asyncio.sleep(0)
    assert not leases.held


class CountedFuture(asyncio.Future[Lease]):
    looks = 0

    def add_done_callback(self, *arguments: Any, **named: Any) -> None:
        CountedFuture.looks += 1
        super().add_done_callback(*arguments, **named)


class ScarceLeases(CountedLeases):
    """Leases of which each comes when the one before was used."""

    async def request(self, group_id: str, count: int, *_: Any) -> list[asyncio.Future[Lease]]:
        self.futures = [CountedFuture() for _ in range(count)]
        self._rest = iter(enumerate(self.futures))
        self.grant()
        return self.futures

    def grant(self) -> None:
        for lease_id, future in self._rest:
            future.set_result(Lease(lease_id, "engine", "address", 0))
            return


class EnginesThatGrant:
    def __init__(self, leases: ScarceLeases) -> None:
        self._leases = leases

    async def generate(self, address: str, generation: Generation, *_: Any) -> list[Delta]:
        self._leases.grant()
        return [
            Delta(
                index=i,
                token_ids=(7,),
                logprobs=(0.0,),
                logprobs_t1=(),
                spans=(),
                finish_reason=FinishReason.STOP,
            )
            for i in range(generation.sample_count)
        ]


async def test_a_group_whose_leases_come_one_by_one_looks_at_each_once() -> None:
    leases, before = ScarceLeases(), CountedFuture.looks
    engines: Any = EnginesThatGrant(leases)
    sampler = Sampler(leases, engines, Waits(), attempts=1)
    prompt = SamplingPrompt(
        group_id="g",
        token_ids=(1, 2),
        sample_count=40,
        sampling=Sampling(max_new_tokens=4),
        bounds=VersionBounds(),
        pool="p",
    )
    assert [delta.index for delta in await sampler.sample(prompt)] == list(range(40))
    assert CountedFuture.looks - before <= 2 * 40
