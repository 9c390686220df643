"""The processes the router benchmark measures, and what they cost."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import psutil

from benchmarks.router_http import HttpPool
from sluice.api.common.v1 import sample_pb2
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.ports import free_port

START_SECONDS = 60.0
LONG = 3600.0  # TTLs: nothing expires while it is measured


@dataclass(frozen=True)
class Measured:
    """A process and its children."""

    process: psutil.Process
    alone: bool = False

    @classmethod
    def this(cls) -> Measured:
        """This process alone."""
        return cls(psutil.Process(), alone=True)

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        family = [self.process]
        if not self.alone:
            family += self.process.children(recursive=True)
        return sum(one.cpu_times().user + one.cpu_times().system for one in family)

    def resident_mib(self) -> float:
        return self.process.memory_info().rss / 2**20


@dataclass(frozen=True)
class LeaseRouter:
    """Our router; engines are registered."""

    measured: Measured
    stub: pb_grpc.RouterServiceStub
    address: str


@dataclass(frozen=True)
class BareServer:
    """A gRPC server that does nothing."""

    measured: Measured
    address: str


@dataclass(frozen=True)
class ProxyRouter:
    """A router that forwards HTTP."""

    measured: Measured
    http: HttpPool


@asynccontextmanager
async def _running(
    *command: str, stdin: int = asyncio.subprocess.DEVNULL, stdout: int | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=stdout if stdout is not None else asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(30):
            await process.wait()


@asynccontextmanager
async def fake_engines(count: int) -> AsyncIterator[list[str]]:
    """Addresses of HTTP engines in one process."""
    pipe = asyncio.subprocess.PIPE
    module = ("-m", "benchmarks.router_http", "--count", str(count))
    async with _running(sys.executable, *module, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            ports = json.loads(await process.stdout.readline())
        yield [f"127.0.0.1:{port}" for port in ports]


@asynccontextmanager
async def bare_server() -> AsyncIterator[BareServer]:
    """gRPC that answers without reading; see benchmarks/router_bare.py."""
    pipe = asyncio.subprocess.PIPE
    module = ("-m", "benchmarks.router_bare")
    async with _running(sys.executable, *module, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            port = int(await process.stdout.readline())
        yield BareServer(Measured(psutil.Process(process.pid)), f"127.0.0.1:{port}")


@asynccontextmanager
async def lease_router(
    addresses: list[str], engines: int, ranks: int
) -> AsyncIterator[LeaseRouter]:
    """Our router with `engines` engines of `ranks` ranks, which share the addresses."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "address.json"
        flags = {
            "server.address_file": file,
            "server.drain_seconds": 1,
            "default_pool.client_ttl": LONG,
            "default_pool.engine_ttl": LONG,
        }
        arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        async with _running(sys.executable, "-m", "services.router", *arguments) as process:
            async with asyncio.timeout(START_SECONDS):
                while not file.exists():
                    assert process.returncode is None, "the router has ended"
                    await asyncio.sleep(0.05)
            address = json.loads(file.read_text())["address"]
            options = [("grpc.max_receive_message_length", 64 << 20)]
            async with grpc.aio.insecure_channel(address, options) as channel:
                stub = pb_grpc.RouterServiceStub(channel)
                for number in range(engines):
                    engine = pb.Engine(
                        engine_id=f"engine-{number}",
                        address=addresses[number % len(addresses)],
                        role=pb.ROLE_ENGINE,
                        dp_size=ranks,
                        weights=sample_pb2.WeightVersion(version=1),
                    )
                    request = pb.RegisterEngineRequest(engine=engine)
                    await stub.RegisterEngine(request, timeout=10)
                yield LeaseRouter(Measured(psutil.Process(process.pid)), stub, address)


@asynccontextmanager
async def sglang_router(binary: str, addresses: list[str]) -> AsyncIterator[ProxyRouter]:
    """sglang-router in front of the same engines, round robin: its cheapest policy."""
    port, metrics_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [binary, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--policy", "round_robin"]
    command += ["--log-level", "error", "--worker-urls", *(f"http://{a}" for a in addresses)]
    async with _running(*command) as process:
        http = HttpPool(f"127.0.0.1:{port}")
        async with asyncio.timeout(START_SECONDS):
            while not await _answers(http):
                assert process.returncode is None, "sglang-router has ended"
                await asyncio.sleep(0.2)
        yield ProxyRouter(Measured(psutil.Process(process.pid)), http)
        http.close()


async def _answers(http: HttpPool) -> bool:
    try:
        await http.post()
    except OSError:
        return False
    return True
