"""What one message can do to a server: nothing that outlives its answer."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as engine_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from sluice.client import RemoteError, typed_errors
from sluice.runtime import interceptors
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import DeadlineError, NotFoundError, QueueFullError
from sluice.runtime.interceptors import RequestRoom
from sluice.runtime.messages import MessageLimits
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE

MIB = 1 << 20
NAME = "sluice.api.trainer.v1.TrainerService"
JUNK = b"\xff\xff\xff\xff"
HEALTH = health_pb2.HealthCheckResponse


class Servicer(pb_grpc.TrainerServiceServicer):
    async def DeleteBatch(self, request, context):
        raise NotFoundError("batch", request.batch)

    async def UploadBatch(self, requests, context):
        async for _ in requests:
            pass
        return pb.UploadBatchResponse()

    async def GetColumns(self, request, context):
        yield pb.GetColumnsResponse()


@pytest.fixture
async def served():
    server = Server(ServerConfig(drain_seconds=10 * PATIENCE))
    server.add(pb_grpc.add_TrainerServiceServicer_to_server, Servicer(), NAME)
    await server.start()
    async with create_channel(server.address) as channel:
        yield server, channel
    await server.stop()


async def refusal(call) -> RemoteError:
    with pytest.raises(RemoteError) as caught, typed_errors():
        await asyncio.wait_for(call, PATIENCE)
    return caught.value


async def send_raw(channel, method: str, *messages: bytes) -> list[bytes]:
    """As a client of any of the four kinds would."""

    async def requests():
        for message in messages:
            yield message

    return [answer async for answer in channel.stream_stream(method)(requests())]


@pytest.mark.parametrize(
    "method",
    [
        f"/{NAME}/DeleteBatch",
        f"/{NAME}/UploadBatch",
        f"/{NAME}/GetColumns",
        "/sluice.api.common.v1.WaitService/ListWaits",
        "/google.longrunning.Operations/GetOperation",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_malformed_bytes_are_the_callers_fault_and_one_line_of_the_log(
    served, caplog, method
):
    _, channel = served
    caplog.set_level(logging.INFO)
    for _ in range(20):
        error = await refusal(send_raw(channel, method, JUNK))
        assert (error.code, error.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "MALFORMED_MESSAGE",
        )
    lines = [record for record in caplog.records if "MALFORMED_MESSAGE" in record.getMessage()]
    assert 1 <= len(lines) < 20
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_call_without_its_message_is_malformed(served):
    _, channel = served
    error = await refusal(send_raw(channel, f"/{NAME}/DeleteBatch"))
    assert error.reason == "MALFORMED_MESSAGE"


async def test_a_name_of_5000_characters_is_refused_as_such(served):
    _, channel = served
    stub = pb_grpc.TrainerServiceStub(channel)
    error = await refusal(stub.DeleteBatch(pb.DeleteBatchRequest(batch="x" * 5000)))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.metadata["setting"] == "server.limits.name_characters"


async def test_a_status_fits_the_headers_whatever_it_quotes(served):
    """Clients take 8 KiB of headers, and say RESOURCE_EXHAUSTED of more."""
    _, channel = served
    stub = pb_grpc.TrainerServiceStub(channel)
    error = await refusal(stub.DeleteBatch(pb.DeleteBatchRequest(batch="層" * 1000)))
    assert error.reason == "BATCH_NOT_FOUND"


async def test_whoever_watches_hears_of_every_change_until_the_server_stops(served):
    server, channel = served
    watch = health_pb2_grpc.HealthStub(channel).Watch
    first, second, unknown = (
        watch(health_pb2.HealthCheckRequest(service=name)) for name in (NAME, NAME, "no such")
    )
    for call, status in (
        (first, HEALTH.NOT_SERVING),
        (second, HEALTH.NOT_SERVING),
        (unknown, HEALTH.SERVICE_UNKNOWN),
    ):
        assert (await asyncio.wait_for(call.read(), PATIENCE)).status == status
    first.cancel()  # it must not take the news from the other one
    await server.set_serving()
    assert (await asyncio.wait_for(second.read(), PATIENCE)).status == HEALTH.SERVING
    stopping = asyncio.create_task(server.stop())
    assert (await asyncio.wait_for(second.read(), PATIENCE)).status == HEALTH.NOT_SERVING
    assert await asyncio.wait_for(second.read(), PATIENCE) is grpc.aio.EOF
    await asyncio.wait_for(stopping, PATIENCE)  # far less than it would drain


class Caller:
    """The side of a call that receives."""

    def __init__(self, gate: asyncio.Event) -> None:
        self.gate = gate

    async def read(self) -> bytes:
        await self.gate.wait()
        return b"message"


async def test_requests_that_are_held_are_bounded_in_total(monkeypatch):
    room = RequestRoom(limit=100, largest=50)  # two calls receive at a time
    room.hold(60)
    with pytest.raises(QueueFullError) as caught:
        room.hold(41)
    assert caught.value.metadata["setting"] == "server.max_held_bytes"
    room.let_go(60)
    room.hold(1000)  # alone it may be as large as a message may be
    gates = [asyncio.Event() for _ in range(3)]

    calls = [asyncio.create_task(room.receive(Caller(gate))) for gate in gates]
    gates[2].set()  # the third has to wait all the same
    await asyncio.sleep(0)
    gates[0].set()
    assert await asyncio.wait_for(calls[2], PATIENCE) == b"message"
    assert not calls[1].done()
    gates[1].set()
    await asyncio.wait_for(calls[1], PATIENCE)
    monkeypatch.setattr(interceptors, "RECEIVE_SECONDS", 0.01)
    with pytest.raises(DeadlineError):
        await room.receive(Caller(asyncio.Event()))


async def test_callers_that_send_nothing_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(interceptors, "CROWDED_SECONDS", 0.01)
    room = RequestRoom(limit=100, largest=50)  # two calls receive at a time
    silent = [asyncio.create_task(room.receive(Caller(asyncio.Event()))) for _ in range(2)]
    await asyncio.sleep(0)
    gate = asyncio.Event()
    gate.set()
    for _ in range(2):
        assert await asyncio.wait_for(room.receive(Caller(gate)), PATIENCE) == b"message"
    with pytest.raises(QueueFullError) as caught:
        await silent[0]
    assert caught.value.metadata["kind"] == "calls"
    assert not silent[1].done()  # nobody waits for its place any more
    silent[1].cancel()


@pytest.fixture
def router(tmp_path):
    """A process of its own with a token."""
    (tmp_path / "token").write_text("sesame")
    address_file = tmp_path / "address.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "services.router"),
            *("--server.security.token_file", tmp_path / "token"),
            *("--server.address_file", address_file),
        ],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    deadline = time.monotonic() + PATIENCE
    while not address_file.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield psutil.Process(process.pid), json.loads(address_file.read_text())["address"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


async def shrinks(process: psutil.Process, size: int) -> None:
    """Until the process takes no more memory; what its allocator kept is given back in a second."""
    async with asyncio.timeout(PATIENCE):
        while process.memory_info().rss > size:
            await asyncio.sleep(0.1)


async def test_refused_messages_of_30_mb_leave_no_memory_behind(router, tmp_path):
    """Without a token; malformed; with far too many tokens; and for an engine that is not there."""
    process, address = router
    many = engine_pb.ScoreRequest(token_ids=[1] * 30_000_000, prompt_length=1).SerializeToString()
    right = SecurityConfig(token_file=tmp_path / "token")
    cases = (
        (None, many, "TOKEN_MISSING_OR_WRONG"),
        (right, many[:-2] + b"\xff\xff", "INVALID_FIELD"),
        (right, b"\xff" * 30_000_000, "MALFORMED_MESSAGE"),
        (right, many, "INVALID_FIELD"),
        (right, many[: 12 * MIB], "MALFORMED_MESSAGE"),
    )
    for security, message, reason in cases:
        async with create_channel(address, security) as channel:
            call = channel.unary_unary("/sluice.api.rollout.v1.EngineService/Score")
            assert await refusal(call(b""))  # connected, and all modules are there
            before, most = process.memory_info().rss, 0
            for _ in range(5):
                assert (await refusal(call(message))).reason == reason
                most = max(most, process.memory_info().rss)
            assert most - before < (64 if security is None else 256) * MIB, reason
            await shrinks(process, before + 64 * MIB)


async def test_what_is_refused_by_its_lists_alone_is_held_and_let_go_all_the_same(monkeypatch):
    """Its bytes count towards the next giving back, though nothing of it was decoded."""
    let_go, before = list[int](), RequestRoom.let_go

    def noted(room: RequestRoom, size: int) -> None:
        let_go.append(size)
        before(room, size)

    monkeypatch.setattr(RequestRoom, "let_go", noted)
    server = Server(ServerConfig(limits=MessageLimits(items=10)))
    server.add(pb_grpc.add_TrainerServiceServicer_to_server, Servicer(), NAME)
    await server.start()
    request = pb.GetColumnsRequest(batch="b", columns=["x" * 1000] * 200)
    async with create_channel(server.address) as channel:
        call = pb_grpc.TrainerServiceStub(channel).GetColumns(request, timeout=PATIENCE)
        assert (await refusal(call.read())).reason == "INVALID_FIELD"
    await server.stop()
    assert request.ByteSize() in let_go


async def test_many_small_messages_leave_no_memory_behind(router, tmp_path):
    """Each is too small to be worth giving back alone; the allocator keeps them by thread."""
    process, address = router
    async with create_channel(address, SecurityConfig(token_file=tmp_path / "token")) as channel:
        call = channel.unary_unary("/sluice.api.router.v1.RouterService/EndSession")
        names = [f"{index}" + "x" * 1000 for index in range(4000)]
        message = router_pb.EndSessionRequest(session_ids=names).SerializeToString()
        await call(message)
        before = process.memory_info().rss
        for _ in range(3):
            await asyncio.gather(*(call(message) for _ in range(40)))
        await shrinks(process, before + 32 * MIB)


async def test_what_is_let_go_while_memory_is_given_back_is_given_back_too(monkeypatch):
    """However little it is: the last of many requests may end after the others' second."""
    given: asyncio.Queue[int] = asyncio.Queue()
    monkeypatch.setattr(interceptors, "_MALLOC_TRIM", given.put_nowait)
    monkeypatch.setattr(interceptors, "TRIM_SECONDS", 0.01)
    room = RequestRoom(1 << 30, 1 << 20)
    room.hold(interceptors.FREED_BYTES + 1 + MIB)
    room.let_go(interceptors.FREED_BYTES + 1)
    async with asyncio.timeout(PATIENCE):
        await given.get()
        room.let_go(MIB)
        for _ in range(2):
            await given.get()
    await asyncio.sleep(0.1)
    assert given.empty()  # and that is all


THREADS = """
import asyncio, sys, threading, time, psutil
from sluice.runtime.interceptors import FREED_BYTES, RequestRoom
from sluice.runtime.server import Server, ServerConfig

def take(meeting):
    held = [b"x" * 100_000 for _ in range(200)]
    meeting.wait()
    del held
    meeting.wait()

async def main(most, seconds):
    Server(ServerConfig())
    room, before = RequestRoom(1 << 30, 1 << 20), psutil.Process().memory_info().rss
    large = b"x" * (30 << 20)  # of which glibc learns to keep as much
    del large
    meeting = threading.Barrier(17)
    threads = [threading.Thread(target=take, args=(meeting,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        await asyncio.to_thread(meeting.wait)
    for thread in threads:
        thread.join()
    room.hold(FREED_BYTES + 1)
    room.let_go(FREED_BYTES + 1)
    async with asyncio.timeout(seconds):
        while psutil.Process().memory_info().rss > before + most:
            await asyncio.sleep(0.1)

asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
"""


def test_what_threads_took_is_given_back_as_well():
    """320 MB in all, of which arenas of their own would keep most."""
    arguments = (sys.executable, "-c", THREADS, str(32 * MIB), str(PATIENCE))
    subprocess.run(arguments, check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


async def test_a_failed_call_lets_go_of_its_request(router, tmp_path):
    process, address = router
    async with create_channel(address, SecurityConfig(token_file=tmp_path / "token")) as channel:
        stub = engine_grpc.EngineServiceStub(channel)
        request = engine_pb.ScoreRequest(token_ids=[1] * 15_000_000, prompt_length=-1)
        before = process.memory_info().rss
        for _ in range(6):
            error = await refusal(stub.Score(request, timeout=PATIENCE))
            assert error.metadata["field"] == "prompt_length"  # it had been decoded
        await shrinks(process, before + 64 * MIB)
