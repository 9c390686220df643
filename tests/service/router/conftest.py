"""A router process on port 0, engines that only count, and clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from services.router.__main__ import RouterProcess
from services.router.config import RouterConfig
from services.router.pools import RouterClock
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as engine_grpc
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.balance.routing import PoolConfig
from sluice.config import parse_config
from sluice.router_client import LeaseClient
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import QueueFullError
from tests.patience import PATIENCE

FOREVER = 600.0  # seconds until an engine of a test is lost, which sends no heartbeats


@dataclass
class Router:
    """A running router and a stub to it."""

    process: RouterProcess
    channel: grpc.aio.Channel
    stub: pb_grpc.RouterServiceStub

    @property
    def address(self) -> str:
        return self.process.server.address

    def leases_out(self, pool: str = "policy") -> int:
        """What the table says is charged, which must equal the live leases."""
        tables = self.process.pools.room(pool).pool.tables
        assert tables.targets.charges.min(initial=0) >= 0
        return int(tables.targets.charges.sum())

    async def register(
        self, engine_id: str, *, known_epoch: int = 0, **fields: object
    ) -> pb.RegisterEngineResponse:
        values = {"address": "localhost:1", "role": pb.ROLE_ENGINE, "incarnation": "a", **fields}
        version = values.pop("version", 1)
        if version is not None:
            values["weights"] = sample_pb2.WeightVersion(version=version, digest="d")  # type: ignore[arg-type]
        engine = pb.Engine(engine_id=engine_id, **values)  # type: ignore[arg-type]
        request = pb.RegisterEngineRequest(engine=engine, known_epoch=known_epoch)
        return await self.stub.RegisterEngine(request, timeout=PATIENCE)

    async def acquire(self, client: str, count: int, **fields: object) -> pb.AcquireLeasesResponse:
        request = pb.AcquireLeasesRequest(client_id=client, count=count, **fields)  # type: ignore[arg-type]
        return await self.stub.AcquireLeases(request, timeout=PATIENCE)


class Clock:
    """A router's time, which passes when a test says so and not while the machine is busy."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeEngine(engine_grpc.EngineServiceServicer):
    """Answers Generate at once, or when `gate` opens; `fail` makes it abort with a code."""

    requests: list[engine_pb.GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fail: grpc.StatusCode | None = None
    address: str = ""
    streams: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def Generate(self, request, context):
        self.requests.append(request)
        await self.gate.wait()
        if self.fail is not None:
            details = QueueFullError("the engine says no").to_status().details
            status = status_pb2.Status(
                code=self.fail.value[0], message="the engine says no", details=details
            )
            await context.abort_with_status(rpc_status.to_status(status))
        count = request.sample_count or 1
        return engine_pb.GenerateResponse(
            completions=[
                engine_pb.Completion(index=index, token_ids=[7] * 3) for index in range(count)
            ]
        )

    async def StreamGenerate(self, request, context):
        self.requests.append(request.generate)
        self.streams += 1
        try:
            for token in range(3):
                delta = engine_pb.Completion(token_ids=[token])
                yield engine_pb.StreamGenerateResponse(delta=delta)
                if self.fail is not None:
                    await context.abort(self.fail, "the engine says no")
                await self.gate.wait()
        finally:
            self.streams -= 1

    async def Score(self, request, context):
        return engine_pb.ScoreResponse(logprobs=[-1.0])

    async def Abort(self, request, context):
        if self.fail is not None:
            await context.abort(self.fail, "the engine says no")
        self.aborted += request.request_ids
        return engine_pb.AbortResponse(aborted_request_ids=request.request_ids)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def start_router(stack: AsyncExitStack) -> Callable[..., Awaitable[Router]]:
    async def start(
        drain: float = 0.2,
        clock: Clock | None = None,
        max_pools: int = 64,
        pools: Mapping[str, object] | None = None,
        **pool: object,
    ) -> Router:
        config = parse_config(
            RouterConfig,
            {
                "seed": 7,
                "tick_seconds": 0.05,
                "max_pools": max_pools,
                "default_pool": PoolConfig(**{"engine_ttl": FOREVER, **pool}),
                "pools": pools or {},
                "server": {"port": 0, "drain_seconds": drain},
            },
        )
        process = RouterProcess(config, CollectorRegistry())
        # Where it is held up, so are all that a test has beside it: it need not ask what they hold.
        own = RouterClock(lambda _: None) if clock is None else clock
        process.pools.clock = process.episodes._clock = own
        await process.start()
        stack.push_async_callback(process.close)
        stack.push_async_callback(process.server.stop)
        channel = grpc.aio.insecure_channel(process.server.address)  # refusals come at once
        stack.push_async_callback(channel.close)
        return Router(process, channel, pb_grpc.RouterServiceStub(channel))

    return start


@pytest.fixture
async def router(start_router: Callable[..., Awaitable[Router]]) -> Router:
    return await start_router()


@pytest.fixture
def start_engine(stack: AsyncExitStack) -> Callable[..., Awaitable[FakeEngine]]:
    async def start() -> FakeEngine:
        engine = FakeEngine()
        server = grpc.aio.server()
        engine_grpc.add_EngineServiceServicer_to_server(engine, server)
        engine.address = f"localhost:{server.add_insecure_port('localhost:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        return engine

    return start


@pytest.fixture
def connect(stack: AsyncExitStack) -> Callable[..., Awaitable[LeaseClient]]:
    async def connect(address: str, **options: object) -> LeaseClient:
        channel = create_channel(address)
        stack.push_async_callback(channel.close)
        client = LeaseClient(channel, seed=3, **options)  # type: ignore[arg-type]
        return await stack.enter_async_context(client)

    return connect


class Relay:
    """A line to a server that can be cut, lose all that comes back, or lead to another one."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        # Bound for good: nobody else, a client on its way here included, gets the port while cut.
        self._bound = socket.socket()
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._bound.bind(("127.0.0.1", 0))
        self.port: int = self._bound.getsockname()[1]
        self.is_deaf = False

    async def mend(self) -> None:
        self.is_deaf = False
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, reuse_port=True
        )

    async def close(self) -> None:
        await self.cut()
        self._bound.close()

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers += [writer, forth]
        if self._server is None or not self._server.is_serving():  # cut in the meantime
            await self.cut()
        await asyncio.gather(self._pass(reader, forth, False), self._pass(back, writer, True))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                if not (is_answer and self.is_deaf):
                    writer.write(piece)
        writer.close()


@pytest.fixture
def relay(stack: AsyncExitStack) -> Callable[[int], Awaitable[Relay]]:
    async def start(target: int) -> Relay:
        line = Relay(target)
        await line.mend()
        stack.push_async_callback(line.close)
        return line

    return start


async def eventually(check: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until `check` holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


def released(ids: Iterable[int], **columns: object) -> pb.ReleasedLeases:
    return pb.ReleasedLeases(lease_ids=ids, **columns)  # type: ignore[arg-type]


def new_id() -> str:
    return str(uuid.uuid4())
