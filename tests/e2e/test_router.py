"""A run over two engines and a router goes on through the death of each, and no charge is left."""

import asyncio
import os
import random
import signal
from collections import Counter

import grpc
import pytest

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.client import EngineClient
from tests.e2e.conftest import start_stack, stop_stack, wait_until

TTL = 3.0
STEPS = 8
ENGINE = {"max_running": 8, "max_model_length": 16, "threads": 1, "deterministic": True}
ENGINES = {"engine-0", "engine-1"}
KILLED = ("router", "engine-0", "episodes")


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Episodes, which hold the leases, live apart from the engines."""
    directory = tmp_path_factory.mktemp("router")
    tokenizer = str(directory / "model")
    times = {"client_ttl": TTL, "engine_ttl": TTL}
    stack = start_stack(
        directory,
        router={"kind": "router", "config": {"default_pool": times, "tick_seconds": 0.1}},
        engine={
            "kind": "rollout",
            "replicas": 2,
            "config": {"roles": ["engine"], "engine": ENGINE},
        },
        episodes={"kind": "rollout", "config": {"roles": ["episodes"], "tokenizer": tokenizer}},
        rollout=None,
    )
    yield stack
    stop_stack(stack)


def charges(stack) -> int | None:
    """Leases charged to any rank of an engine; None while the router does not answer."""
    with grpc.insecure_channel(stack.services["router"]["address"]) as channel:
        stub = pb_grpc.RouterServiceStub(channel)
        try:
            answer = stub.ListEngines(pb.ListEnginesRequest(role=pb.ROLE_ENGINE), timeout=5)
        except grpc.RpcError:
            return None
    return sum(sum(engine.leased_counts) for engine in answer.engines)


def kill(stack, name: str) -> None:
    before = stack.pid(name)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: stack.pid(name) != before, what=f"{name} to come back")


async def to_each(engines, stack, call) -> None:
    for name in engines:
        async with EngineClient(stack.services[name]["address"]) as engine:
            await call(engine)


def finished(training) -> None:
    training.finish()
    steps = Counter(group.consumed_step for group in training.groups("consumed"))
    assert steps == {step: 4 for step in range(1, len(training.rows()) + 1)}


@pytest.mark.parametrize("name", KILLED)
def test_the_run_goes_on_and_no_charge_is_left(stack, name):
    """It is killed while samples wait in engines, for as long as these are paused."""
    training = stack.train(f"killed-{name}", steps=STEPS, stops_at=("consumed", 2))
    with training.held():
        asyncio.run(to_each(ENGINES, stack, EngineClient.pause))
    wait_until(lambda: charges(stack), what="leases in flight")
    kill(stack, name)
    asyncio.run(to_each(ENGINES - {name}, stack, EngineClient.resume))
    finished(training)
    assert len(training.rows()) == STEPS
    wait_until(lambda: charges(stack) == 0, TTL + 60, what="the last charge to end")


@pytest.mark.long
def test_all_of_them_one_after_another(stack):
    rng = random.Random(0)
    training = stack.train("killed-all", steps=12)
    for step, name in enumerate(rng.sample(KILLED * 2, 5), start=1):
        training.wait_for_step(step)
        kill(stack, name)
    finished(training)
    wait_until(lambda: charges(stack) == 0, TTL + 60, what="the last charge to end")
