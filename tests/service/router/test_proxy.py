"""EngineService through the router: one address, the answers of the engines, no leaks."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as pb_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.runtime.errors import RemoteError, typed_errors
from tests.patience import PATIENCE
from tests.service.router.conftest import FOREVER, Clock, eventually, new_id, released


def generate(count: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=new_id(),
        prompt_token_ids=[1, 2],
        sampling=pb.SamplingParams(max_new_tokens=3),
        sample_count=count,
    )


@pytest.fixture
def stub(router):
    return pb_grpc.EngineServiceStub(router.channel)


async def test_requests_reach_all_ranks_and_all_charges_end(router, stub, start_engine):
    engine = await start_engine()
    await router.register("a", dp_size=4, address=engine.address)
    engine.gate.clear()
    calls = [asyncio.ensure_future(stub.Generate(generate(2), timeout=PATIENCE)) for _ in range(8)]
    await eventually(lambda: len(engine.requests) == 8)
    assert router.leases_out() == 16  # a request weighs what it samples
    assert sorted(request.dp_rank for request in engine.requests) == [0, 0, 1, 1, 2, 2, 3, 3]
    engine.gate.set()
    answers = await asyncio.gather(*calls)
    assert all(len(answer.completions) == 2 for answer in answers)
    assert router.leases_out() == 0


async def test_another_engine_is_tried_when_one_cannot_be_reached(router, stub, start_engine):
    engine = await start_engine()
    await router.register("dead", address="localhost:1", max_running_count=8)
    await router.register("good", address=engine.address, max_running_count=8)
    answers = await asyncio.gather(*(stub.Generate(generate(), timeout=PATIENCE) for _ in range(6)))
    assert all(answer.completions[0].token_ids == [7, 7, 7] for answer in answers)
    assert router.leases_out() == 0


async def test_an_engines_refusal_is_passed_on_with_its_code(router, stub, start_engine):
    engine = await start_engine()
    engine.fail = grpc.StatusCode.INVALID_ARGUMENT
    await router.register("a", address=engine.address)
    for _ in range(8):
        with pytest.raises(RemoteError) as caught, typed_errors():
            await stub.Generate(generate(), timeout=PATIENCE)
        error = caught.value
        assert (error.code, error.message) == (engine.fail, "the engine says no")
        assert error.reason == "QUEUE_FULL" and error.retry_seconds == 1
    assert len(engine.requests) == 8 and router.leases_out() == 0
    listed = await router.stub.ListEngines(router_pb.ListEnginesRequest(), timeout=PATIENCE)
    assert listed.engines[0].state == router_pb.ENGINE_STATE_ACTIVE


async def test_streams_pass_through_and_a_broken_one_is_not_sent_twice(router, stub, start_engine):
    engine = await start_engine()
    await router.register("a", address=engine.address)
    request = pb.StreamGenerateRequest(generate=generate())
    tokens = [m.delta.token_ids[0] async for m in stub.StreamGenerate(request, timeout=PATIENCE)]
    assert tokens == [0, 1, 2]
    engine.fail = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.StreamGenerate(request, timeout=PATIENCE):
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(engine.requests) == 2 and router.leases_out() == 0


async def test_a_caller_that_leaves_frees_the_rank(router, stub, start_engine):
    engine = await start_engine()
    await router.register("a", address=engine.address, max_running_count=1)
    engine.gate.clear()
    running = stub.Generate(generate(), timeout=PATIENCE)
    await eventually(lambda: len(engine.requests) == 1)
    waiting = stub.Generate(generate(), timeout=PATIENCE)
    await asyncio.sleep(0.1)
    assert len(engine.requests) == 1, "it waits for the credit"
    running.cancel()
    await eventually(lambda: len(engine.requests) == 2)
    waiting.cancel()
    await eventually(lambda: router.leases_out() == 0)


async def test_a_rank_that_comes_free_serves_who_waits_and_nobody_else_notices(
    router, stub, start_engine
):
    engine = await start_engine()
    await router.register("a", address=engine.address, max_running_count=1)
    engine.gate.clear()
    calls = [asyncio.ensure_future(stub.Generate(generate(), timeout=PATIENCE)) for _ in range(2)]
    pool = router.process.pools.room("").pool
    await eventually(lambda: len(engine.requests) == 1 and pool.waiting.count == 1)
    engine.gate.set()
    answers = await asyncio.gather(*calls)  # of whom gave the rank back, too
    assert [len(answer.completions) for answer in answers] == [1, 1]
    assert router.leases_out() == 0


async def test_a_rank_of_a_silent_client_serves_who_waits_and_the_next_silent_one_ends_too(
    start_router, start_engine
):
    clock = Clock()
    router = await start_router(clock=clock, client_ttl=10.0)
    engine = await start_engine()
    await router.register("a", address=engine.address, max_running_count=1)
    await router.acquire("silent", 1)
    stub = pb_grpc.EngineServiceStub(router.channel)
    call = asyncio.ensure_future(stub.Generate(generate(), timeout=PATIENCE))
    await eventually(lambda: router.process.pools.room("").pool.waiting.count == 1)
    clock.now += 11.0
    assert len((await call).completions) == 1
    await router.acquire("silent, too", 1)
    clock.now += 11.0
    await eventually(lambda: router.leases_out() == 0)


async def test_a_request_that_has_to_wait_again_is_let_go_where_the_router_stops(
    start_router, start_engine
):
    router = await start_router(drain=600.0)
    engine = await start_engine()
    await router.register("a", address=engine.address)
    engine.gate.clear()
    stub = pb_grpc.EngineServiceStub(router.channel)
    call = asyncio.ensure_future(stub.Generate(generate(), timeout=PATIENCE))
    await eventually(lambda: len(engine.requests) == 1)
    stopping = asyncio.create_task(router.process.server.stop())
    room = router.process.pools.room("")
    await eventually(lambda: room.closed)
    room.pool.drain("a", True, router.process.pools.clock())  # its process stops as well
    engine.fail = grpc.StatusCode.UNAVAILABLE
    engine.gate.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.details() == "the router stops"
    assert room.pool.tables.leases.live_count == 0
    await stopping


async def test_a_reader_that_leaves_a_stream_frees_the_rank_and_ends_the_engines_call(
    router, stub, start_engine
):
    engine = await start_engine()
    await router.register("a", address=engine.address)
    engine.gate.clear()
    call = stub.StreamGenerate(pb.StreamGenerateRequest(generate=generate()), timeout=PATIENCE)
    assert (await call.read()).delta.token_ids == [0]
    assert router.leases_out() == 1
    call.cancel()
    await eventually(lambda: router.leases_out() == 0)
    await eventually(lambda: engine.streams == 0)


async def test_a_wait_ends_with_the_callers_deadline(router, stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(generate(), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    pool = router.process.pools.room("").pool
    await eventually(lambda: pool.tables.leases.live_count == 0)


async def test_a_session_keeps_its_rank_and_abort_finds_the_engine(router, stub, start_engine):
    engine = await start_engine()
    await router.register("a", dp_size=8, address=engine.address)
    metadata = (("x-sluice-session", "talk"),)
    for _ in range(4):
        await stub.Generate(generate(), timeout=PATIENCE, metadata=metadata)
    assert len({request.dp_rank for request in engine.requests}) == 1
    engine.gate.clear()
    request = generate()
    running = stub.Generate(request, timeout=PATIENCE)
    await eventually(lambda: len(engine.requests) == 5)
    answer = await stub.Abort(
        pb.AbortRequest(request_ids=[request.request_id, "x"]), timeout=PATIENCE
    )
    assert list(answer.aborted_request_ids) == engine.aborted == [request.request_id]
    running.cancel()


async def test_abort_finds_a_call_whose_id_an_ended_one_had_too(router, stub, start_engine):
    """As of a caller that lost its connection and asked again."""
    engine = await start_engine()
    await router.register("a", address=engine.address)
    engine.gate.clear()
    request = generate()
    calls = []
    for count in (1, 2):
        calls.append(stub.Generate(request, timeout=PATIENCE))
        await eventually(lambda count=count: len(engine.requests) == count)
    calls[0].cancel()
    await eventually(lambda: router.leases_out() == 1)
    answer = await stub.Abort(pb.AbortRequest(request_ids=[request.request_id]), timeout=PATIENCE)
    assert list(answer.aborted_request_ids) == [request.request_id]
    calls[1].cancel()


async def test_an_engine_out_of_reach_keeps_no_other_from_aborting(router, stub, start_engine):
    engines = [await start_engine() for _ in range(2)]
    for number, engine in enumerate(engines):
        engine.gate.clear()
        await router.register(f"e{number}", address=engine.address, max_running_count=1)
    requests = [generate() for _ in engines]
    running = [stub.Generate(request, timeout=PATIENCE) for request in requests]
    await eventually(lambda: all(engine.requests for engine in engines))
    engines[0].fail = grpc.StatusCode.UNAVAILABLE
    ids = [request.request_id for request in requests]
    answer = await stub.Abort(pb.AbortRequest(request_ids=ids), timeout=PATIENCE)
    assert list(answer.aborted_request_ids) == [engines[1].requests[0].request_id]
    for call in running:
        call.cancel()


async def test_scores_pass_and_what_the_router_cannot_do_is_unimplemented(
    router, stub, start_engine
):
    engine = await start_engine()
    await router.register("t", pool="teacher", address=engine.address)
    request = pb.ScoreRequest(token_ids=[1, 2], prompt_length=1)
    answer = await stub.Score(request, timeout=PATIENCE, metadata=(("x-sluice-pool", "teacher"),))
    assert list(answer.logprobs) == [-1.0]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_WAIT), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_router_has_as_many_pools_as_it_may(start_router):
    router = await start_router(max_pools=2)
    for name in ("policy", "judge"):
        await router.register(name, pool=name)
    with pytest.raises(RemoteError, match="2 pools have engines") as caught, typed_errors():
        await router.register("third", pool="third")
    assert caught.value.reason == "TOO_MANY_POOLS"
    await router.register("another", pool="judge")


async def test_what_a_pool_leaves_out_is_as_in_the_default(start_router):
    slow = {"breaker": {"open_seconds": 77}}
    router = await start_router(
        max_leases_per_client=2, breaker={"failures": 9}, pools={"judge": {**slow, "max_queued": 1}}
    )
    for name in ("policy", "judge"):
        await router.register(name, pool=name, max_running_count=8)
        assert len((await router.acquire("client", 2, pool=name)).target_indices) == 2
        with pytest.raises(RemoteError) as caught, typed_errors():
            await router.acquire("client", 1, pool=name)
        assert caught.value.reason == "TOO_MANY_LEASES_OF_CLIENT"
    judge = router.process.pools.room("judge").pool.config
    assert (judge.max_queued, judge.engine_ttl) == (1, FOREVER)
    assert (judge.breaker.failures, judge.breaker.open_seconds) == (9, 77)


async def test_pools_that_nobody_uses_are_forgotten_for_new_ones(start_router, start_engine):
    clock = Clock()
    router = await start_router(clock=clock)
    engine, stub = await start_engine(), pb_grpc.EngineServiceStub(router.channel)

    async def refusal(call) -> str:
        with pytest.raises(RemoteError) as caught, typed_errors():
            await call
        return caught.value.reason

    async def waits_and_is_served() -> int:
        """A request that has to wait for the rank of a pool's only engine; its lease's id."""
        await router.register("a", pool="p", address=engine.address, max_running_count=1)
        lease = await router.acquire("c", 1, pool="p")
        call = asyncio.ensure_future(
            stub.Generate(generate(), metadata=[("x-sluice-pool", "p")], timeout=PATIENCE)
        )
        await eventually(lambda: router.process.pools.room("p").pool.waiting.count == 1)
        await router.acquire("c", 0, pool="p", released=released([lease.first_lease_id]))
        assert len((await call).completions) == 1
        return lease.first_lease_id

    first = await waits_and_is_served()
    for number in range(100):  # more than there may be
        assert await refusal(router.acquire("c", 1, pool=f"misspelt-{number}")) == "NO_ENGINE"
    watch = router.stub.WatchEngines(router_pb.WatchEnginesRequest(pool="watched"))
    assert not (await watch.read()).engines
    ids = [first]
    for number in range(62):
        await router.register(f"engine-{number}", pool=f"pool-{number}")
        ids.append((await router.acquire("c", 1, pool=f"pool-{number}")).first_lease_id)
    assert len(set(ids)) == 63
    assert await refusal(router.register("more", pool="more")) == "TOO_MANY_POOLS"
    await router.register("b", pool="watched")
    assert [engine.engine_id for engine in (await watch.read()).engines] == ["b"]
    clock.now += 11 * FOREVER  # all are lost, and forgotten
    await eventually(lambda: not router.process.pools.room("p").pool.engines())
    await eventually(lambda: not router.process.pools.room("pool-61").pool.engines())
    await router.register("more", pool="more")
    assert await waits_and_is_served() not in ids
    watch.cancel()
