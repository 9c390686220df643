"""SIGKILL of a client, an engine and the router: no charge is left, and no lease counted twice."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Callable

import grpc
import pytest

from sluice import faults
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.router_client import LeaseClient, LeaseDemand
from sluice.router_client import client as client_module
from sluice.runtime.channel import create_channel
from tests.patience import PATIENCE
from tests.service.router.processes import processes

ENGINE = """
import asyncio, sys, uuid, grpc
from sluice.api.common.v1 import sample_pb2
from sluice.api.router.v1 import router_service_pb2 as pb, router_service_pb2_grpc as pb_grpc
async def main(address, name, max_running="0"):
    engine = pb.Engine(engine_id=name, address="localhost:1", role=pb.ROLE_ENGINE, dp_size=2,
                       max_running_count=int(max_running), incarnation=str(uuid.uuid4()),
                       weights=sample_pb2.WeightVersion(version=1))
    while True:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.RouterServiceStub(channel)
            try:
                while True:
                    await stub.RegisterEngine(pb.RegisterEngineRequest(engine=engine), timeout=2)
                    await asyncio.sleep(0.2)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
asyncio.run(main(*sys.argv[1:]))
"""
LOST = pb.ENGINE_STATE_LOST  # and forgotten after a while
BOTH = {"a": pb.ENGINE_STATE_ACTIVE, "b": pb.ENGINE_STATE_ACTIVE}
HOLDER = """
import asyncio, sys
from sluice.router_client import LeaseClient, LeaseDemand
from sluice.runtime.channel import create_channel
async def main(address, count):
    async with LeaseClient(create_channel(address)) as client:
        await client.acquire(LeaseDemand(count=int(count)))
        print("held", flush=True)
        await asyncio.sleep(600)
asyncio.run(main(*sys.argv[1:]))
"""


async def until(address: str, expected: Callable[[dict[str, int], int], bool]) -> None:
    """Wait until states by engine and the number of charged leases are as expected."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(PATIENCE):
        stub = pb_grpc.RouterServiceStub(channel)
        while True:
            try:
                answer = await stub.ListEngines(pb.ListEnginesRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
                continue
            states = {engine.engine_id: engine.state for engine in answer.engines}
            charged = sum(sum(engine.leased_counts) for engine in answer.engines)
            if expected(states, charged):
                return
            await asyncio.sleep(0.05)


async def test_nothing_leaks_when_processes_are_killed(tmp_path, connect, monkeypatch):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.05)
    async with processes(tmp_path) as started:
        router = await started.router()
        engines = {n: await started.spawn("-c", ENGINE, started.address, n) for n in BOTH}
        await until(started.address, lambda states, _: states == BOTH)
        client = await connect(started.address)
        mine = await client.acquire(LeaseDemand(count=6), timeout=PATIENCE)
        other = await started.spawn("-c", HOLDER, started.address, "10")
        assert other.stdout is not None
        async with asyncio.timeout(PATIENCE):
            await other.stdout.readline()
        await until(started.address, lambda _, charged: charged == 16)

        await started.kill(other)
        await until(started.address, lambda _, charged: charged == 6)

        await started.kill(router)
        await started.router()
        await until(started.address, lambda states, charged: (states, charged) == (BOTH, 6))

        await started.kill(engines["a"])
        await until(started.address, lambda states, _: states.get("a", LOST) == LOST)
        lost = [lease for lease in mine if lease.engine_id == "a"]
        client.release(lost, pb.OUTCOME_CONNECT_ERROR)
        await until(started.address, lambda _, charged: charged == 6 - len(lost))
        again = await client.acquire(LeaseDemand(count=4), timeout=PATIENCE)
        assert {lease.engine_id for lease in again} == {"b"}

        await started.spawn("-c", ENGINE, started.address, "a")
        await until(started.address, lambda states, _: states == BOTH)
        client.release([*mine, *again])
        await until(started.address, lambda _, charged: charged == 0)


class Traffic:
    """Clients that lease and give back all the time, over two engines with few credits."""

    def __init__(self, clients: list[LeaseClient]) -> None:
        self.done = 0
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run(i, c)) for i, c in enumerate(clients)]

    async def _run(self, seed: int, client: LeaseClient) -> None:
        rng = random.Random(seed)
        for call in itertools.count():
            if self._stop.is_set():
                return
            groups = [(f"{seed}-{call}", rng.randint(1, 12))]
            leases = await client.acquire(
                LeaseDemand(count=groups[0][1], groups=groups), timeout=PATIENCE
            )
            await asyncio.sleep(rng.random() / 20)
            client.release(leases, token_counts=[rng.randint(1, 99) for _ in leases])
            self.done += len(leases)

    async def more(self, count: int = 100) -> None:
        """Until `count` more leases have come and gone."""
        wanted = self.done + count
        async with asyncio.timeout(PATIENCE):
            while self.done < wanted:
                assert not any(task.done() for task in self._tasks)
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


async def test_nothing_leaks_in_the_middle_of_traffic(tmp_path, connect, monkeypatch):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.05)
    async with processes(tmp_path) as started:
        router = await started.router()
        engines = {n: await started.spawn("-c", ENGINE, started.address, n, "8") for n in BOTH}
        await until(started.address, lambda states, _: states == BOTH)
        clients = [await connect(started.address) for _ in range(4)]
        traffic = Traffic(clients)
        for _ in range(2):
            await traffic.more()
            await started.kill(router)
            router = await started.router()
            await traffic.more()
            await started.kill(engines["a"])
            await traffic.more()
            engines["a"] = await started.spawn("-c", ENGINE, started.address, "a", "8")
            await until(started.address, lambda states, _: states == BOTH)
            other = await started.spawn("-c", HOLDER, started.address, "7")
            assert other.stdout is not None
            async with asyncio.timeout(PATIENCE):
                await other.stdout.readline()
            await started.kill(other)
        await traffic.more()
        await traffic.end()
        await until(started.address, lambda _, charged: charged == 0)


async def test_a_call_whose_answer_is_lost_is_sent_again_as_it_was(tmp_path, monkeypatch):
    """What it gave back the first time stays in it, though that has gone with others since."""
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.2)
    lost = tmp_path / "faults"
    monkeypatch.setenv(faults.VARIABLE, str(lost))
    async with processes(tmp_path) as started:
        await started.router(ttl=PATIENCE)
        async with (
            grpc.aio.insecure_channel(started.address, [("grpc.enable_retries", 0)]) as channel,
            LeaseClient(channel) as client,
        ):
            engine = pb.Engine(engine_id="a", address="localhost:1", role=pb.ROLE_ENGINE)
            engine.weights.version = 1
            request = pb.RegisterEngineRequest(engine=engine)
            await pb_grpc.RouterServiceStub(channel).RegisterEngine(request, timeout=PATIENCE)
            held = await client.acquire(LeaseDemand(count=3), timeout=PATIENCE)
            faults.arm(lost, "reply.StreamLeases")
            client.release(held[:1])
            again = await client.acquire(LeaseDemand(count=4), timeout=PATIENCE)
            assert not faults.disarm(lost)  # it fired
            assert len({lease.lease_id for lease in (*held, *again)}) == 7
            await until(started.address, lambda _, charged: charged == 6)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_killed_engine_that_returns_voids_what_ran_before(router, connect, version):
    """Same name, another process: its old leases end at once, whoever held them."""
    await router.register("a", dp_size=2)
    client = await connect(router.address)
    before = await client.acquire(LeaseDemand(count=4), timeout=PATIENCE)
    engine = pb.Engine(
        engine_id="a",
        address="localhost:2",
        role=pb.ROLE_ENGINE,
        dp_size=2,
        incarnation="second",
        weights=sample_pb2.WeightVersion(version=version),
    )
    await router.stub.RegisterEngine(pb.RegisterEngineRequest(engine=engine), timeout=PATIENCE)
    assert router.leases_out() == 0
    after = await client.acquire(LeaseDemand(count=2, min_version=version), timeout=PATIENCE)
    assert {lease.address for lease in after} == {"localhost:2"}
    client.release(before)  # they are void: nothing else is given back with them
    await asyncio.sleep(0.1)
    assert router.leases_out() == 2


async def test_a_router_stopped_and_continued_gives_away_nothing_that_is_held(tmp_path, connect):
    """Its clock has jumped, and clients have picked places while it could not answer."""
    async with processes(tmp_path) as started:
        router = await started.router(ttl=60.0)
        stub = pb_grpc.RouterServiceStub(create_channel(started.address))
        engine = pb.Engine(
            engine_id="a",
            address="localhost:1",
            role=pb.ROLE_ENGINE,
            max_running_count=2,
            incarnation="one",
            weights=sample_pb2.WeightVersion(version=1),
        )
        register = pb.RegisterEngineRequest(engine=engine)
        await stub.RegisterEngine(register, timeout=PATIENCE)
        one, two, three = [await connect(started.address) for _ in range(3)]
        (held,) = await one.acquire(LeaseDemand(count=1), timeout=PATIENCE)
        for client in (two, three):  # they know the engines, and hold nothing
            client.release(await client.acquire(LeaseDemand(count=1), timeout=PATIENCE))
        await until(started.address, lambda _, charged: charged == 1)

        router.send_signal(signal.SIGSTOP)
        (picked,) = await two.acquire(LeaseDemand(count=1), timeout=PATIENCE)
        assert picked.lease_id < 0  # without the router
        router.send_signal(signal.SIGCONT)

        wanted = await three.request(LeaseDemand(count=1))
        await until(started.address, lambda _, charged: charged >= 2)
        assert not wanted[0].done()
        load = pb.ReportLoadRequest(engine_id="a", rank_loads=[engine_pb.RankLoad(running_count=2)])
        await stub.ReportLoad(load, timeout=PATIENCE)
        await until(started.address, lambda states, charged: charged == 2)
        one.release([held])
        async with asyncio.timeout(PATIENCE):
            await wanted[0]
        await until(started.address, lambda _, charged: charged == 2)
