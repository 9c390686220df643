"""Two routers at one address by mistake: the one that was started first is refused by name."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rollout.process import Registration, RouterSightings
from services.router.__main__ import SERVICE
from sluice.api.common.v1 import sample_pb2, wait_service_pb2, wait_service_pb2_grpc
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import RemoteError, typed_errors
from sluice.runtime.waits import Waits
from tests.patience import PATIENCE
from tests.service.router.conftest import Clock, Router

ENGINE = pb.Engine(
    engine_id="rollout-0",
    address="localhost:1",
    role=pb.ROLE_ENGINE,
    weights=sample_pb2.WeightVersion(version=1, digest="d"),
    incarnation="a",
)


async def is_serving(router: Router) -> bool:
    health = health_pb2_grpc.HealthStub(router.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def explained(router: Router) -> list[str]:
    """What it says of the other one."""
    stub = wait_service_pb2_grpc.WaitServiceStub(router.channel)
    answer = await stub.ListWaits(wait_service_pb2.ListWaitsRequest(), timeout=PATIENCE)
    return [wait.explanation for wait in answer.waits if "two routers" in wait.what]


async def is_leased(router: Router) -> bool:
    answer = await router.stub.ListEngines(pb.ListEnginesRequest(), timeout=PATIENCE)
    return [engine.state for engine in answer.engines] == [pb.ENGINE_STATE_ACTIVE]


async def comes(condition, *arguments) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition(*arguments):
            await asyncio.sleep(0.02)


async def test_two_routers_that_an_engine_hears_in_turn_say_so_and_one_is_refused(
    start_router, relay
):
    first, second = [await start_router(engine_ttl=3.0, client_ttl=3.0) for _ in range(2)]
    line = await relay(int(first.address.rpartition(":")[2]))
    channel = create_channel(f"127.0.0.1:{line.port}")
    registration = Registration(channel, lambda: ENGINE, Waits())
    registration.start()

    async def lead_to(router: Router) -> None:
        await line.cut()
        line.target = int(router.address.rpartition(":")[2])
        await line.mend()

    try:
        await comes(is_leased, first)
        await lead_to(second)  # as after a restart
        await comes(is_leased, second)
        assert await is_serving(first) and not await explained(first)
        await lead_to(first)

        async def is_refused(router: Router) -> bool:
            return not await is_serving(router)

        await comes(is_refused, first)
        (said,) = await explained(first)
        assert first.address in said and second.address in said and "rollout-0" in said
        with pytest.raises(RemoteError) as refused, typed_errors():
            await first.acquire("c", 1)
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert refused.value.reason == "SECOND_ROUTER"
        assert second.address in str(refused.value)

        await lead_to(second)
        await comes(explained, second)  # it knows of the other one, and goes on
        await comes(is_leased, second)
        assert await is_serving(second)
        wait = Duration(seconds=int(PATIENCE))
        given = await second.acquire("c", 1, max_wait=wait)  # once it has settled
        assert [*given.target_indices, *given.bound_target_indices][-1] == 0
    finally:
        await registration.close()
        await channel.close()


def test_a_restarted_router_takes_the_place_of_the_one_before():
    clock = Clock()
    sightings = RouterSightings(clock)
    for router in ("1 a", "1 a", "2 b", "2 b", "3 c", "3 c"):
        sightings.note(router)
        clock.now += 1.0
    assert sightings.pair() == ("", "")


def test_of_two_that_answer_in_turn_the_first_is_refused_while_both_are_heard():
    clock = Clock()
    sightings = RouterSightings(clock)
    for router in ("2 b", "1 a", "2 b"):
        sightings.note(router)
        clock.now += 1.0
    assert sightings.pair() == ("1 a", "2 b")
    clock.now += RouterSightings.REMEMBER_SECONDS - 10.0
    sightings.note("2 b")
    clock.now += 9.0
    assert sightings.pair() == ("", "")  # the other one is gone
