"""Heartbeats, restarts, drains and silence: what is charged stays true through all of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import grpc
import pytest

from services.router.pools import RouterClock
from services.router.servicer import NEWS_SECONDS
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.runtime.errors import RemoteError, typed_errors
from sluice.runtime.wire import seconds_of
from tests.patience import PATIENCE
from tests.service.router.conftest import Clock, eventually, released


def held(answer: pb.AcquireLeasesResponse, engine: str, count: int, rank: int = 0):
    """A renewal of leases that are all on one rank."""
    return pb.RenewLeasesRequest(
        client_id="c",
        lease_ids=range(answer.first_lease_id, answer.first_lease_id + count),
        engine_ids=[engine],
        dp_ranks=[rank] * count,
        engine_indices=[0] * count,
    )


async def states(router) -> dict[str, int]:
    answer = await router.stub.ListEngines(pb.ListEnginesRequest(), timeout=PATIENCE)
    return {engine.engine_id: engine.state for engine in answer.engines}


async def test_a_silent_client_loses_its_leases_and_a_renewing_one_keeps_them(start_router):
    clock = Clock()
    router = await start_router(clock=clock, client_ttl=10.0)
    await router.register("a")
    kept = await router.acquire("c", 5)
    await router.acquire("dead", 7)
    for _ in range(3):
        clock.now += 4.0
        await router.stub.RenewLeases(held(kept, "a", 5), timeout=PATIENCE)
    await eventually(lambda: router.leases_out() == 5)
    clock.now += 9.0
    router.process.pools.expire()
    assert router.leases_out() == 5
    clock.now += 2.0
    await eventually(lambda: router.leases_out() == 0)


async def test_a_restarted_router_rebuilds_its_table_without_double_charging(start_router):
    first, second = await start_router(), await start_router()
    await first.register("a", dp_size=2)
    answer = await first.acquire("c", 4)
    on_zero = [i for i, target in enumerate(answer.target_indices) if target == 0]
    ids = [answer.first_lease_id + i for i in range(4)]
    renewal = pb.RenewLeasesRequest(
        client_id="c",
        lease_ids=ids,
        engine_ids=["a"],
        dp_ranks=answer.target_indices,
        engine_indices=[0] * 4,
    )
    early = await second.stub.RenewLeases(renewal, timeout=PATIENCE)  # before the engine is back
    assert sorted(early.void_lease_ids) == ids and second.leases_out() == 0
    await second.register("a", dp_size=2)
    for expected in (4, 0):
        again = await second.stub.RenewLeases(renewal, timeout=PATIENCE)
        assert again.adopted_count == expected and not again.void_lease_ids
    listed = await second.stub.ListEngines(pb.ListEnginesRequest(), timeout=PATIENCE)
    assert list(listed.engines[0].leased_counts) == [len(on_zero), 4 - len(on_zero)]
    await second.acquire("c", 0, released=released(ids))
    assert second.leases_out() == 0
    # A renewal that was under way while the leases were given back charges nothing.
    late = await second.stub.RenewLeases(renewal, timeout=PATIENCE)
    assert late.adopted_count == 0 and second.leases_out() == 0


async def test_leases_whose_answer_was_lost_are_given_back(start_router):
    clock = Clock()
    router = await start_router(clock=clock, client_ttl=2.0)
    await router.register("a")
    kept = await router.acquire("c", 1)
    await router.acquire("c", 9)  # the client never hears of these
    for dropped in (0, 9, 0):
        answer = await router.stub.RenewLeases(held(kept, "a", 1), timeout=PATIENCE)
        assert answer.dropped_count == dropped
        clock.now += 0.25  # an answer on its way would have come by then
    assert router.leases_out() == 1


async def test_a_restarted_engine_voids_its_leases_and_no_others(router):
    await router.register("a")
    await router.register("b")
    answer = await router.acquire("c", 8)
    await router.register("a", incarnation="b")
    assert router.leases_out() == 4
    ids = range(answer.first_lease_id, answer.first_lease_id + 8)
    await router.acquire("c", 0, released=released(ids))
    assert router.leases_out() == 0


async def test_a_drained_engine_gets_no_lease_until_resumed(router):
    await router.register("a")
    await router.register("b")
    before = await router.acquire("c", 2)
    answer = await router.stub.DrainEngine(pb.DrainEngineRequest(engine_id="a"), timeout=PATIENCE)
    assert answer.engine.state == pb.ENGINE_STATE_DRAINING
    assert list(answer.engine.leased_counts) == [1]
    assert answer.epoch > before.epoch
    await router.register("a")  # a heartbeat does not end a drain
    after = await router.acquire("c", 4)
    assert len(set(after.target_indices)) == 1
    await router.stub.DrainEngine(
        pb.DrainEngineRequest(engine_id="a", resume=True), timeout=PATIENCE
    )
    resumed = await router.acquire("c", 4)
    assert set(resumed.target_indices) == set(before.target_indices) - set(after.target_indices)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.stub.DrainEngine(pb.DrainEngineRequest(engine_id="x"), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_episode_worker_that_was_killed_keeps_no_room_of_engines(router):
    """One that is killed with its engine had all of it, as it came back, until it had expired."""
    await router.register("a", max_running_count=2)
    await router.register("w", role=pb.ROLE_EPISODES, incarnation="old")
    await router.acquire("old", 2)
    assert set((await router.acquire("old", 2, max_wait={})).target_indices) == {-1}
    await router.register("a", max_running_count=2, incarnation="b")
    assert router.leases_out() == 2, "what waited has the room of what was lost"
    await router.register("w", role=pb.ROLE_EPISODES, incarnation="old")
    assert router.leases_out() == 2, "a heartbeat ends nothing"
    await router.register("w", role=pb.ROLE_EPISODES, incarnation="new")
    assert router.leases_out() == 0
    assert set((await router.acquire("new", 2)).target_indices) == {0}


async def test_a_silent_engine_is_lost_and_its_heartbeat_brings_it_back(start_router):
    clock = Clock()
    router = await start_router(clock=clock, engine_ttl=10.0)
    await router.register("a")
    await router.register("e", role=pb.ROLE_EPISODES)
    assert await states(router) == {"a": pb.ENGINE_STATE_ACTIVE, "e": pb.ENGINE_STATE_ACTIVE}
    clock.now += 11.0
    async with asyncio.timeout(PATIENCE):
        while await states(router) != {"a": pb.ENGINE_STATE_LOST, "e": pb.ENGINE_STATE_LOST}:
            await asyncio.sleep(0.01)
    with pytest.raises(grpc.aio.AioRpcError):
        await router.acquire("c", 1)
    await router.register("a")
    assert len((await router.acquire("c", 1)).target_indices) == 1


async def test_an_engine_without_weights_waits_and_version_bounds_hold(router):
    await router.register("old", version=3)
    await router.register("empty", version=None)
    assert (await states(router))["empty"] == pb.ENGINE_STATE_EMPTY
    answer = await router.acquire("c", 4, min_version=4, max_wait={})
    assert set(answer.target_indices) == {-1}
    await router.register("new", version=4)
    bound = await router.acquire("c", 0, max_wait={"seconds": 5})
    new = next(e for e in bound.engines if e.engine_id == "new")
    assert set(bound.bound_target_indices) == {new.first_target_index}
    exact = await router.acquire("c", 4, exact_version=3)
    old = next(e for e in bound.engines if e.engine_id == "old")
    assert set(exact.target_indices) == {old.first_target_index}


async def test_failures_of_the_engine_break_it_and_refusals_never_do(router):
    await router.register("a")
    await router.register("b")
    answer = await router.acquire("c", 40)
    first = answer.engines[0]
    ids = [
        answer.first_lease_id + i
        for i, target in enumerate(answer.target_indices)
        if target == first.first_target_index
    ]
    await router.acquire(
        "c", 0, released=released(ids[:10], outcomes=[pb.OUTCOME_CLIENT_ERROR] * 10)
    )
    assert (await states(router))[first.engine_id] == pb.ENGINE_STATE_ACTIVE
    await router.acquire(
        "c", 0, released=released(ids[10:15], outcomes=[pb.OUTCOME_CONNECT_ERROR] * 5)
    )
    assert (await states(router))[first.engine_id] == pb.ENGINE_STATE_BROKEN
    broken = await router.acquire("c", 6)
    assert first.first_target_index not in broken.target_indices
    await router.register(first.engine_id, incarnation="b")  # half-open: one trial
    trial = await router.acquire("c", 20)
    assert list(trial.target_indices).count(first.first_target_index) == 1


async def test_watchers_hear_of_every_change(router):
    await router.register("a")
    watch = router.stub.WatchEngines(pb.WatchEnginesRequest(), timeout=PATIENCE)
    seen = await watch.read()
    assert [engine.engine_id for engine in seen.engines] == ["a"]
    await router.register("a")
    await router.register("b", version=2)
    then = await watch.read()
    assert [engine.engine_id for engine in then.engines] == ["a", "b"]
    assert then.epoch > seen.epoch
    watch.cancel()


async def test_a_burst_of_changes_is_few_news_and_the_last_one_is_told(router):
    """A fleet that takes new weights changes once an engine, and each is told to every client."""
    await router.register("a", version=1)
    watch = router.stub.WatchEngines(pb.WatchEnginesRequest(), timeout=PATIENCE)
    await watch.read()
    began = time.monotonic()
    for version in range(2, 102):
        await router.register("a", version=version)
    count, told = 0, 1
    while told < 101:
        news = await watch.read()
        (engine,) = news.engines
        assert engine.weights.version > told
        count, told = count + 1, engine.weights.version
    assert count <= 2 + (time.monotonic() - began) / NEWS_SECONDS
    watch.cancel()


async def test_pools_are_apart_and_an_engine_may_move(router):
    await router.register("a")
    await router.register("t", pool="teacher")
    await router.acquire("c", 3, pool="teacher")
    assert (router.leases_out(), router.leases_out("teacher")) == (0, 3)
    await router.register("t", pool="policy")
    assert (router.leases_out(), router.leases_out("teacher")) == (0, 0)
    answer = await router.acquire("c", 2)
    assert len(set(answer.target_indices)) == 2


async def test_a_session_stays_on_its_rank_until_it_ends(router):
    await router.register("a", dp_size=8)
    first = await router.acquire("c", 8, session_ids=[f"s{i}" for i in range(8)])
    assert len(set(first.target_indices)) == 8
    for _ in range(3):
        again = await router.acquire("c", 8, session_ids=[f"s{i}" for i in range(8)])
        assert again.target_indices == first.target_indices
    request = pb.EndSessionRequest(session_ids=["s0", "s1", "unknown"])
    assert (await router.stub.EndSession(request, timeout=PATIENCE)).ended_count == 2


async def test_stopping_ends_waits_and_watches_at_once(start_router):
    router = await start_router(drain=2 * PATIENCE)
    await router.register("a", max_running_count=1)
    await router.acquire("c", 1)
    watch = router.stub.WatchEngines(pb.WatchEnginesRequest(), timeout=PATIENCE)
    await watch.read()
    waiting = asyncio.create_task(router.acquire("c", 1, max_wait={"seconds": 600}))
    await eventually(lambda: router.process.pools.room("").pool.waiting.count == 1)
    async with asyncio.timeout(PATIENCE / 2):  # less than the wait, the watch or the drain
        await router.process.server.stop()
        answer = await waiting
        assert list(answer.target_indices) == [-1]
        assert await watch.read() is grpc.aio.EOF


def test_the_router_imports_neither_torch_nor_transformers():
    code = (
        "import sys, services.router.__main__;"
        "print([m for m in ('torch', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.stdout.strip() == "[]"


def test_the_clock_of_a_router_leaves_out_what_it_could_not_hear():
    source, gaps = Clock(), []
    clock = RouterClock(gaps.append, source)
    start = clock()
    source.now += 3.0  # slow, and still there
    assert clock() == start + 3.0
    source.now += 3600.0
    assert clock() == start + 3.0
    source.now += 1.0
    assert clock() == start + 4.0
    assert gaps == [3600.0]


async def test_a_large_fleet_is_not_asked_to_report_more_often_than_is_answered(start_router):
    """After a restart: late reports would have its engines lost, and closed anew."""
    router = await start_router(clock=Clock(), engine_ttl=15.0)
    seconds = []
    for number in range(400):
        engine = pb.Engine(engine_id=f"e{number}", address="localhost:1", role=pb.ROLE_ENGINE)
        request = pb.RegisterEngineRequest(engine=engine, known_epoch=1)
        answer = await router.stub.RegisterEngine(request, timeout=PATIENCE)
        seconds.append(seconds_of(answer.heartbeat_interval))
    assert seconds[0] == 1.0
    assert 400 / seconds[-1] == pytest.approx(200)


@pytest.mark.parametrize("role", [pb.ROLE_ENGINE, pb.ROLE_EPISODES])
async def test_of_two_processes_with_one_name_the_older_is_told(start_router, role):
    """They took turns: each heartbeat of one ended what the other had begun."""
    clock = Clock()
    router = await start_router(clock=clock, engine_ttl=10.0)
    one = {"address": "localhost:1", "incarnation": "one", "role": role}
    two = {"address": "localhost:2", "incarnation": "two", "role": role}
    told = await router.register("rollout-0", **one)
    told_two = await router.register("rollout-0", **two)  # as one that was started again
    for _ in range(2):
        with pytest.raises(RemoteError) as refused, typed_errors():
            await router.register("rollout-0", known_epoch=told.epoch, **one)
        assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS
        assert refused.value.reason == "ENGINE_ID_TAKEN"
        assert refused.value.metadata["address"] == "localhost:2"
        await router.register("rollout-0", known_epoch=told_two.epoch, **two)
    clock.now += 11.0
    router.process.pools.expire()
    await router.register("rollout-0", known_epoch=told.epoch, **one)  # the other is lost
    listed = await router.stub.ListEngines(pb.ListEnginesRequest(), timeout=PATIENCE)
    assert [engine.address for engine in listed.engines] == ["localhost:1"]
