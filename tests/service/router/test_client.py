"""The lease client against a real router: waiting, restarts, fail-open, nothing leaked."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from services.router import metrics
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.router_client import LeaseClient, LeaseDemand
from sluice.router_client import client as client_module
from tests.patience import PATIENCE
from tests.service.router.conftest import Clock, eventually


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(client_module, "DOWN_SECONDS", 0.3)
    monkeypatch.setattr(client_module, "_CALL_SECONDS", PATIENCE)  # a router that is slow is there


async def test_leases_name_engine_address_and_rank_and_are_given_back(router, connect):
    await router.register("a", dp_size=2, address="host:1")
    await router.register("b", dp_size=2, address="host:2")
    client = await connect(router.address)
    leases = await client.acquire(LeaseDemand(count=8, groups=[("g", 8)]), timeout=PATIENCE)
    places = Counter((lease.engine_id, lease.address, lease.dp_rank) for lease in leases)
    assert places == {
        (name, f"host:{port}", rank): 2 for name, port in (("a", 1), ("b", 2)) for rank in (0, 1)
    }
    client.release(leases[:5], token_counts=[1, 2, 3, 4, 5])
    client.release(leases[:5])
    await eventually(lambda: router.leases_out() == 3)
    await client.close()
    assert router.leases_out() == 0


async def test_each_waiting_lease_comes_as_soon_as_a_rank_is_free(router, connect):
    await router.register("a", max_running_count=2)
    client = await connect(router.address)
    futures = await client.request(LeaseDemand(count=6))
    for _ in range(4):
        async with asyncio.timeout(PATIENCE):
            done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        assert router.leases_out() <= 2
        first = next(iter(done))
        futures.remove(first)
        client.release([await first])
    async with asyncio.timeout(PATIENCE):
        client.release(await asyncio.gather(*futures))
    await eventually(lambda: router.leases_out() == 0)


async def test_leases_asked_for_before_any_engine_come_with_it(router, connect):
    client = await connect(router.address)
    asked = asyncio.create_task(
        client.acquire(LeaseDemand(count=2, min_version=5), timeout=PATIENCE)
    )
    await asyncio.sleep(0.2)
    await router.register("a", version=4)
    await asyncio.sleep(0.2)
    assert not asked.done()
    await router.register("a", version=5)
    assert len(await asked) == 2


async def test_a_demand_that_no_message_can_hold_is_the_callers_error(router, connect):
    await router.register("a")
    client = await connect(router.address)
    with pytest.raises(ValueError, match="out of range"):  # not as if it had been cancelled
        await client.acquire(LeaseDemand(count=1, min_version=2**70), timeout=PATIENCE)
    assert len(await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)) == 1


async def test_a_refused_client_comes_back_when_it_is_told_to(start_router, connect):
    router = await start_router(max_leases_per_client=1)
    await router.register("a")
    client = await connect(router.address)
    held = await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)
    refusals = metrics.REFUSALS.labels("policy", "TOO_MANY_LEASES_OF_CLIENT")
    before, start = refusals._value.get(), time.monotonic()
    asked = asyncio.create_task(client.acquire(LeaseDemand(count=1), timeout=PATIENCE))
    await eventually(lambda: refusals._value.get() >= before + 2)
    assert time.monotonic() - start >= 1.0, "in 1 s, it was told"
    client.release(held)
    assert (await asked)[0].engine_id == "a"


async def test_a_caller_that_leaves_while_the_router_answers_leaves_nothing_behind(
    start_router, connect
):
    router = await start_router(client_ttl=6 * PATIENCE)
    await router.register("a")
    client = await connect(router.address)
    asked = asyncio.create_task(client.acquire(LeaseDemand(count=4), timeout=PATIENCE))
    async with asyncio.timeout(PATIENCE):
        while not router.leases_out():
            await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await eventually(lambda: router.leases_out() == 0)  # before a renewal is due


async def test_a_client_that_closes_waits_for_what_those_who_left_were_given(router, connect):
    await router.register("a")
    client = await connect(router.address)
    asked = asyncio.create_task(client.acquire(LeaseDemand(count=4), timeout=PATIENCE))
    async with asyncio.timeout(PATIENCE):
        while not router.leases_out():
            await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await client.close()
    assert router.leases_out() == 0


async def test_leases_given_back_while_the_line_is_cut_are_given_back_later(router, connect, relay):
    await router.register("a")
    line = await relay(router.process.server.port)
    client = await connect(f"127.0.0.1:{line.port}")
    leases = await client.acquire(LeaseDemand(count=3), timeout=PATIENCE)
    await line.cut()
    client.release(leases)
    await asyncio.sleep(1.5)  # longer than the channel tries
    assert router.leases_out() == 3
    await line.mend()
    await eventually(lambda: router.leases_out() == 0)


async def test_a_client_that_was_cut_off_for_longer_than_its_ttl_holds_its_leases_again(
    start_router, connect, relay
):
    router = await start_router(client_ttl=1.0)
    await router.register("a")
    line = await relay(router.process.server.port)
    client = await connect(f"127.0.0.1:{line.port}")
    leases = await client.acquire(LeaseDemand(count=3), timeout=PATIENCE)
    await line.cut()
    await eventually(lambda: router.leases_out() == 0)
    await line.mend()
    await eventually(lambda: router.leases_out() == 3)
    client.release(leases[:2])
    await eventually(lambda: router.leases_out() == 1)


async def test_leases_nobody_heard_of_end_though_the_client_lives_and_holds_none(
    start_router, connect, relay
):
    clock = Clock()
    router = await start_router(clock=clock, client_ttl=3.0)
    await router.register("a")
    line = await relay(router.process.server.port)
    client = await connect(f"127.0.0.1:{line.port}")
    client.release(await client.acquire(LeaseDemand(count=1), timeout=PATIENCE))
    await eventually(lambda: router.leases_out() == 0)
    line.is_deaf = True
    asked = asyncio.create_task(client.acquire(LeaseDemand(count=2), timeout=PATIENCE))
    await eventually(lambda: router.leases_out() == 2)
    await line.cut()
    local = await asked
    assert router.leases_out() == 2 and all(lease.lease_id < 0 for lease in local)
    client.release(local)
    await line.mend()
    async with asyncio.timeout(PATIENCE):
        while router.leases_out() == 2:  # the router hears of the client all the time
            await router.acquire(client.client_id, 0)
            clock.now += 0.4
            await asyncio.sleep(0.05)


async def test_a_refused_wait_holds_up_no_renewal(start_router, connect, relay):
    first = await start_router(client_ttl=1.0)
    await first.register("a", max_running_count=1)
    line = await relay(first.process.server.port)
    client = await connect(f"127.0.0.1:{line.port}")
    await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)
    asked = await client.request(LeaseDemand(count=2, exact_version=2))  # never picked locally
    await line.cut()
    await first.process.server.stop()
    await client.acquire(
        LeaseDemand(count=1), timeout=PATIENCE
    )  # the client has seen that it is gone
    second = await start_router(max_queued=0, client_ttl=1.0)
    line.target = second.process.server.port
    await line.mend()
    await asyncio.sleep(1.0)  # what waits is void by now, and refused again and again
    await second.register("a", max_running_count=1)
    await eventually(lambda: second.leases_out() == 2)
    assert not any(future.done() for future in asked)


async def test_giving_up_a_wait_leaves_nothing_behind(router, connect):
    await router.register("a", max_running_count=1)
    client = await connect(router.address)
    held = await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)
    with pytest.raises(TimeoutError):
        await client.acquire(LeaseDemand(count=3), timeout=0.2)
    client.release(held)
    pool = router.process.pools.room("").pool
    await eventually(lambda: pool.tables.leases.live_count == 0)
    assert len(await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)) == 1


async def test_while_the_router_is_down_engines_are_picked_locally_and_then_reported(
    start_router, connect, relay
):
    first = await start_router(client_ttl=1.0)
    await first.register("a", dp_size=2)
    await first.register("b", dp_size=2, version=2)
    line = await relay(first.process.server.port)
    client = await connect(f"127.0.0.1:{line.port}")
    await client.acquire(LeaseDemand(count=2), timeout=PATIENCE)
    await eventually(lambda: client._fleet.epoch == first.process.pools.room("").pool.epoch)
    await line.cut()
    await first.process.server.stop()
    local = await client.acquire(LeaseDemand(count=12), timeout=PATIENCE)
    newest = await client.acquire(LeaseDemand(count=2, min_version=2), timeout=PATIENCE)
    assert all(lease.lease_id < 0 for lease in (*local, *newest))
    assert {lease.engine_id for lease in newest} == {"b"}
    spread = Counter((lease.engine_id, lease.dp_rank) for lease in local)
    assert len(spread) >= 3 and max(spread.values()) <= 7  # which two are drawn is chance
    wanted = LeaseDemand(count=9, excluded_engines=["a"])
    assert {lease.engine_id for lease in await client.acquire(wanted, timeout=PATIENCE)} == {"b"}
    client.release(newest, pb.OUTCOME_CONNECT_ERROR)
    rest = await client.acquire(LeaseDemand(count=9), timeout=PATIENCE)
    assert {lease.engine_id for lease in rest} == {"a"}, "b has just been out of reach"

    second = await start_router(client_ttl=1.0)
    line.target = second.process.server.port
    await line.mend()
    await second.register("a", dp_size=2)
    await second.register("b", dp_size=2, version=2)
    await eventually(lambda: second.leases_out() == 32)
    client.release(list(client._book.leases.values()))
    await eventually(lambda: second.leases_out() == 0)
    assert (await client.acquire(LeaseDemand(count=1), timeout=PATIENCE))[0].lease_id > 0


async def test_waiting_leases_survive_a_restart_of_the_router(start_router, connect, relay):
    first = await start_router(client_ttl=6.0)
    await first.register("a", max_running_count=1)
    line = await relay(first.process.server.port)
    client = await connect(f"127.0.0.1:{line.port}")
    held = await client.acquire(LeaseDemand(count=1, exact_version=1), timeout=PATIENCE)
    asked = asyncio.create_task(
        client.acquire(LeaseDemand(count=1, exact_version=2), timeout=PATIENCE)
    )
    await eventually(lambda: first.process.pools.room("").pool.waiting.count == 1)
    await line.cut()
    await first.process.server.stop()
    second = await start_router(client_ttl=6.0)
    # Before the client is back: an engine that came later would be free for what waits.
    await second.register("a", max_running_count=1, version=2)
    line.target = second.process.server.port
    await line.mend()
    await eventually(lambda: second.leases_out() == 1)  # the lease held is charged again
    assert not asked.done()
    client.release(held)
    assert (await asked)[0].engine_id == "a"


async def test_leases_outlive_their_ttl_while_the_client_lives(start_router, connect):
    clock = Clock()
    router = await start_router(clock=clock, client_ttl=3.0)
    await router.register("a")
    client = await connect(router.address)
    leases = await client.acquire(LeaseDemand(count=3), timeout=PATIENCE)
    end = clock.now + 4.0
    while clock.now < end:  # real time, but it stands still where the whole process does
        await asyncio.sleep(0.02)
        clock.now += 0.02
    assert router.leases_out() == 3
    client.release(leases, pb.OUTCOME_OK)
    await eventually(lambda: router.leases_out() == 0)


@pytest.mark.parametrize("seed", range(2))
async def test_no_place_is_leased_twice_over_restarts_of_the_router(
    start_router, connect, relay, seed
):
    rng, places, out = random.Random(seed), 2, []
    router = await start_router(client_ttl=9.0)
    epochs = dict.fromkeys("ab", 0)

    async def register() -> None:
        for name in epochs:
            answer = await router.register(
                name, known_epoch=epochs[name], dp_size=2, max_running_count=places
            )
            epochs[name] = answer.epoch

    async def work(client: LeaseClient, number: int) -> None:
        chance = random.Random(number)
        while True:
            leases = await client.acquire(LeaseDemand(count=chance.randint(1, 3)))
            out.append(len(leases))
            await asyncio.sleep(chance.uniform(0, 0.5))
            client.release(leases)

    async def watch() -> None:
        while True:
            tables = router.process.pools.room("").pool.tables
            entries = tables.leases._old.items()
            local = Counter(entry[0] for lease, entry in entries if lease < 0)
            for target, count in enumerate(tables.targets.charges.tolist()):
                assert count <= places + local[target]
            await asyncio.sleep(0.003)

    await register()
    lines = [await relay(router.process.server.port) for _ in range(3)]
    clients = [await connect(f"127.0.0.1:{line.port}") for line in lines]
    async with asyncio.TaskGroup() as tasks:
        jobs = [tasks.create_task(work(client, at)) for at, client in enumerate(clients)]
        jobs.append(tasks.create_task(watch()))
        for _ in range(2):
            before = len(out)
            await eventually(lambda before=before: len(out) > before + 10)
            for line in lines:
                await line.cut()
            await router.process.server.stop()
            router = await start_router(client_ttl=9.0)
            await register()
            for line in rng.sample(lines, len(lines)):
                await asyncio.sleep(rng.uniform(0, 0.6))
                line.target = router.process.server.port
                await line.mend()
        before = len(out)
        await eventually(lambda: len(out) > before + 10)
        for job in jobs:
            job.cancel()
