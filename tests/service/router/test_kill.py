"""SIGKILL of a client, an engine and the router: no charge is left, and no lease counted twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from sluice.api.common.v1 import sample_pb2
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.router_client import Wanted
from sluice.router_client import client as client_module

TTL = 1.5
ENGINE = """
import asyncio, sys, uuid, grpc
from sluice.api.common.v1 import sample_pb2
from sluice.api.router.v1 import router_service_pb2 as pb, router_service_pb2_grpc as pb_grpc
async def main(address, name):
    engine = pb.Engine(engine_id=name, address="localhost:1", role=pb.ROLE_ENGINE, dp_size=2,
                       incarnation=str(uuid.uuid4()), weights=sample_pb2.WeightVersion(version=1))
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
HOLDER = """
import asyncio, sys
from sluice.router_client import LeaseClient, Wanted
from sluice.runtime.channel import create_channel
async def main(address, count):
    async with LeaseClient(create_channel(address)) as client:
        await client.acquire(Wanted(count=int(count)))
        print("held", flush=True)
        await asyncio.sleep(60)
asyncio.run(main(*sys.argv[1:]))
"""


class Processes:
    """Subprocesses of a test, and the router among them."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "address.json"
        self._started: list[asyncio.subprocess.Process] = []
        self.address = ""

    async def spawn(self, *arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        self._started.append(process)
        return process

    async def router(self) -> asyncio.subprocess.Process:
        """Starts one, on the port of the one before."""
        self._file.unlink(missing_ok=True)
        port = self.address.rpartition(":")[2] or "0"
        process = await self.spawn(
            *("-m", "services.router", "--server.address_file", str(self._file)),
            *("--server.port", port, "--tick_seconds", "0.1"),
            *("--default_pool.client_ttl", str(TTL), "--default_pool.engine_ttl", str(TTL)),
        )
        async with asyncio.timeout(30):
            while not self._file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        self.address = json.loads(self._file.read_text())["address"]
        return process

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def close(self) -> None:
        for process in self._started:
            if process.returncode is None:
                await self.kill(process)


@asynccontextmanager
async def processes(directory: Path) -> AsyncIterator[Processes]:
    started = Processes(directory)
    try:
        yield started
    finally:
        await started.close()


async def until(address: str, expected: Callable[[dict[str, int], int], bool]) -> None:
    """Wait until states by engine and the number of charged leases are as expected."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
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
    both = {"a": pb.ENGINE_STATE_ACTIVE, "b": pb.ENGINE_STATE_ACTIVE}
    async with processes(tmp_path) as started:
        router = await started.router()
        engines = {n: await started.spawn("-c", ENGINE, started.address, n) for n in both}
        await until(started.address, lambda states, _: states == both)
        client = await connect(started.address)
        mine = await client.acquire(Wanted(count=6), timeout=10)
        other = await started.spawn("-c", HOLDER, started.address, "10")
        assert other.stdout is not None
        async with asyncio.timeout(20):
            await other.stdout.readline()
        await until(started.address, lambda _, charged: charged == 16)

        await started.kill(other)
        await until(started.address, lambda _, charged: charged == 6)

        await started.kill(router)
        await started.router()
        await until(started.address, lambda states, charged: (states, charged) == (both, 6))

        await started.kill(engines["a"])
        await until(started.address, lambda states, _: states["a"] == pb.ENGINE_STATE_LOST)
        lost = [lease for lease in mine if lease.engine_id == "a"]
        client.release(lost, pb.OUTCOME_CONNECT_ERROR)
        await until(started.address, lambda _, charged: charged == 6 - len(lost))
        again = await client.acquire(Wanted(count=4), timeout=10)
        assert {lease.engine_id for lease in again} == {"b"}

        await started.spawn("-c", ENGINE, started.address, "a")
        await until(started.address, lambda states, _: states == both)
        client.release([*mine, *again])
        await until(started.address, lambda _, charged: charged == 0)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_killed_engine_that_returns_voids_what_ran_before(router, connect, version):
    """Same name, another process: its old leases end at once, whoever held them."""
    await router.register("a", dp_size=2)
    client = await connect(router.address)
    before = await client.acquire(Wanted(count=4), timeout=5)
    engine = pb.Engine(
        engine_id="a",
        address="localhost:2",
        role=pb.ROLE_ENGINE,
        dp_size=2,
        incarnation="second",
        weights=sample_pb2.WeightVersion(version=version),
    )
    await router.stub.RegisterEngine(pb.RegisterEngineRequest(engine=engine), timeout=5)
    assert router.leases_out() == 0
    after = await client.acquire(Wanted(count=2, min_version=version), timeout=5)
    assert {lease.address for lease in after} == {"localhost:2"}
    client.release(before)  # they are void: nothing else is given back with them
    await asyncio.sleep(0.1)
    assert router.leases_out() == 2
