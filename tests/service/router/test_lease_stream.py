"""Requests for leases on a stream: each answered on its own, once, whatever happens to the line."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from sluice import faults
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.router_client import LeaseDemand
from sluice.router_client import client as client_module
from sluice.router_client.lease_stream import LeaseStream
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import RemoteError, error_from_status, typed_errors
from sluice.runtime.interceptors import RPC_SECONDS, RPCS_RUNNING
from tests.patience import PATIENCE
from tests.service.router.conftest import eventually, released

METHOD = "/sluice.api.router.v1.RouterService/"


@pytest.fixture(autouse=True)
def _a_router_that_is_slow_is_there(monkeypatch):
    monkeypatch.setattr(client_module, "_CALL_SECONDS", PATIENCE)


class Stream:
    """A stream as any client may use it."""

    def __init__(self, stub: pb_grpc.RouterServiceStub) -> None:
        self._messages: asyncio.Queue[pb.StreamLeasesRequest | None] = asyncio.Queue()
        self.call = stub.StreamLeases(self._sent(), timeout=PATIENCE)
        self.order: list[int] = []

    async def _sent(self) -> AsyncIterator[pb.StreamLeasesRequest]:
        while (message := await self._messages.get()) is not None:
            yield message

    def send(self, **requests: pb.AcquireLeasesRequest) -> None:
        """In one message; names are `n` and the number."""
        self._messages.put_nowait(
            pb.StreamLeasesRequest(
                requests=[
                    pb.StreamedLeaseRequest(number=int(name[1:]), acquire=request)
                    for name, request in requests.items()
                ]
            )
        )

    def end(self) -> None:
        self._messages.put_nowait(None)

    async def answers(self, count: int) -> dict[int, pb.StreamedLeaseAnswer]:
        found: dict[int, pb.StreamedLeaseAnswer] = {}
        while len(found) < count:
            response = await self.call.read()
            assert response is not grpc.aio.EOF
            found |= {answer.number: answer for answer in response.answers}
            self.order += [answer.number for answer in response.answers]
        return found


def ask(count: int, *, wait: float | None = 0.0, **fields: object) -> pb.AcquireLeasesRequest:
    request = pb.AcquireLeasesRequest(client_id="c", count=count, **fields)  # type: ignore[arg-type]
    if wait is not None:
        request.max_wait.CopyFrom(Duration(seconds=int(wait)))
    return request


async def test_requests_of_a_stream_are_answered_each_on_its_own(router):
    await router.register("a", max_running_count=2)
    stream = Stream(router.stub)
    stream.send(
        n1=ask(2, request_id="x"),
        n2=ask(1, wait=PATIENCE),
        n3=ask(1, expected_token_counts=[math.inf]),
        n4=ask(1, wait=None),
        n5=ask(2, request_id="x"),
    )
    answers = await stream.answers(4)  # all but the one that waits
    assert stream.order == [1, 3, 4, 5]
    errors = {number: error_from_status(answers[number].error) for number in (3, 4)}
    assert errors[3].code is grpc.StatusCode.INVALID_ARGUMENT
    assert errors[3].metadata["field"] == "expected_token_counts"
    assert (errors[4].reason, errors[4].retry_seconds) == ("NO_CREDIT", 0.5)
    granted = answers[1].leases
    assert answers[5].leases.first_lease_id == granted.first_lease_id, "the same request"
    alone = await router.stub.AcquireLeases(ask(2, request_id="x"), timeout=PATIENCE)
    assert alone.first_lease_id == granted.first_lease_id
    assert router.leases_out() == 2
    stream.send(n6=ask(0, released=released([granted.first_lease_id])))
    answers = await stream.answers(2)
    news = [list(answers[number].leases.bound_lease_ids) for number in (2, 6)]
    assert sorted(map(len, news)) == [0, 1], "of what came free one of them tells"
    stream.end()
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_more_requests_than_are_served_at_a_time_are_all_answered(router):
    await router.register("a")
    stream = Stream(router.stub)
    stream.send(**{f"n{number}": ask(1) for number in range(1, 3001)})
    assert len(await stream.answers(3000)) == 3000
    assert router.leases_out() == 3000


async def test_bytes_that_are_no_message_end_a_stream_with_invalid_argument(router):
    call = router.channel.stream_stream(METHOD + "StreamLeases")(
        iter([b"\xff" * 9]), timeout=PATIENCE
    )
    with pytest.raises(RemoteError) as caught, typed_errors():
        await call.read()
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.reason == "MALFORMED_MESSAGE"
    assert (await router.stub.ListEngines(pb.ListEnginesRequest(), timeout=PATIENCE)) is not None


async def test_a_router_that_stops_answers_what_waits_and_ends_its_streams(start_router):
    router = await start_router(drain=10 * PATIENCE)
    stream = Stream(router.stub)
    stream.send(n1=ask(1, wait=PATIENCE))
    waiting = router.process.pools.room("").pool.waiting
    await eventually(lambda: waiting.count == 1)
    async with asyncio.timeout(PATIENCE):
        await router.process.server.stop()
    answers = await stream.answers(1)
    assert list(answers[1].leases.target_indices) == [-1]
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_router_that_stops_ends_a_stream_on_which_nothing_waits(start_router):
    router = await start_router(drain=10 * PATIENCE)
    await router.register("a")
    stream = Stream(router.stub)
    stream.send(n1=ask(1))
    await stream.answers(1)
    async with asyncio.timeout(PATIENCE):
        await router.process.server.stop()
        assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_what_is_asked_beside_a_wait_is_answered_in_time(router):
    """A message that comes while another request waits is read, and one that comes after it."""
    await router.register("a", max_running_count=1)
    stream = Stream(router.stub)
    stream.send(n1=ask(1))
    held = (await stream.answers(1))[1].leases.first_lease_id
    stream.send(n2=ask(1, wait=PATIENCE))
    for number in (3, 4):
        stream.send(**{f"n{number}": ask(0)})
        assert list(await stream.answers(1)) == [number]
    stream.send(n5=ask(0, released=released([held])))
    await stream.answers(2)
    stream.send(n6=ask(0))
    assert list(await stream.answers(1)) == [6]
    stream.end()
    async with asyncio.timeout(PATIENCE):
        assert await stream.call.read() is grpc.aio.EOF


async def test_all_callers_of_a_client_share_one_stream(router, connect):
    await router.register("a", dp_size=4)
    client = await connect(router.address)
    alone = RPC_SECONDS.labels(METHOD + "AcquireLeases", "OK")
    streams = RPCS_RUNNING.labels(METHOD + "StreamLeases")
    before, running = alone._sum.get(), streams._value.get()
    for _ in range(3):
        asked = [client.acquire(LeaseDemand(count=1), timeout=PATIENCE) for _ in range(64)]
        leases = [lease for (lease,) in await asyncio.gather(*asked)]
        assert len({lease.lease_id for lease in leases}) == 64
        assert router.leases_out() == 64
        client.release(leases)
    await eventually(lambda: router.leases_out() == 0)
    assert alone._sum.get() == before
    assert streams._value.get() == running + 1


@pytest.mark.parametrize(
    "bad",
    [
        LeaseDemand(count=1, expected_tokens=[math.inf]),  # which the router refuses in its answer
        LeaseDemand(count=1, sessions=["a\x00b"]),  # and this at the door, with the whole message
    ],
)
async def test_what_is_wrong_with_one_caller_hurts_no_other(router, connect, bad):
    await router.register("a")
    client = await connect(router.address)
    wanted = [LeaseDemand(count=1), bad, LeaseDemand(count=2, groups=[("g", 2)])]
    asked = [client.acquire(one, timeout=PATIENCE) for one in wanted]
    first, second, third = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(second, RemoteError)
    assert second.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (len(first), len(third)) == (1, 2)
    assert router.leases_out() == 3


async def test_callers_who_together_ask_for_too_much_are_served_in_turn(
    start_router, connect, monkeypatch
):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.05)
    router = await start_router(max_leases_per_client=2)
    await router.register("a")
    client = await connect(router.address)

    async def work() -> None:
        client.release(await client.acquire(LeaseDemand(count=1), timeout=PATIENCE))

    await asyncio.gather(*(work() for _ in range(5)))
    await eventually(lambda: router.leases_out() == 0)


async def test_a_caller_who_leaves_takes_nothing_from_those_who_asked_with_him(router, connect):
    await router.register("a")
    client = await connect(router.address)
    asked = [
        asyncio.create_task(client.acquire(LeaseDemand(count=2), timeout=PATIENCE))
        for _ in range(3)
    ]
    async with asyncio.timeout(PATIENCE):
        while not router.leases_out():
            await asyncio.sleep(0)
    asked[1].cancel()
    first, second, third = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(second, asyncio.CancelledError)
    assert (len(first), len(third)) == (2, 2)
    await eventually(lambda: router.leases_out() == 4)
    client.release([*first, *third])
    await eventually(lambda: router.leases_out() == 0)


async def test_a_stream_cut_before_its_answer_is_asked_again_and_counts_once(
    start_router, connect, relay
):
    router = await start_router(client_ttl=6 * PATIENCE)  # no renewal cleans up
    await router.register("a")
    line = await relay(router.process.server.port)
    one, other = [await connect(f"127.0.0.1:{line.port}") for _ in range(2)]
    held = await one.acquire(LeaseDemand(count=1), timeout=PATIENCE)
    line.is_deaf = True
    asked = [
        asyncio.create_task(client.acquire(LeaseDemand(count=2), timeout=PATIENCE))
        for client in (one, other)
    ]
    one.release(held)  # which goes with what is asked
    await eventually(lambda: router.leases_out() == 4)
    await line.cut()
    await line.mend()
    leases = [lease for some in await asyncio.gather(*asked) for lease in some]
    assert all(lease.lease_id > 0 for lease in leases)
    assert router.leases_out() == len({lease.lease_id for lease in leases}) == 4


async def test_an_answer_of_a_stream_that_is_lost_is_given_again(
    start_router, connect, tmp_path, monkeypatch
):
    monkeypatch.setattr(faults, "_directory", str(tmp_path))
    router = await start_router(client_ttl=6 * PATIENCE)  # no renewal cleans up
    await router.register("a")
    client = await connect(router.address)
    await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)
    faults.arm(tmp_path, "reply.StreamLeases")
    (lease,) = await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)
    assert not (tmp_path / "reply.StreamLeases").exists(), "it was lost"
    assert (lease.lease_id > 0, router.leases_out()) == (True, 2)


async def test_a_router_that_hears_and_does_not_answer_is_waited_for_no_longer_than_a_call(
    start_router, connect, relay, monkeypatch
):
    router = await start_router()
    await router.register("a")
    line = await relay(router.process.server.port)
    client = await connect(f"127.0.0.1:{line.port}")
    (known,) = await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)
    line.is_deaf = True
    monkeypatch.setattr(client_module, "_CALL_SECONDS", 0.3)
    (picked,) = await client.acquire(LeaseDemand(count=1), timeout=PATIENCE)
    assert known.lease_id > 0 > picked.lease_id, "it was picked without the router"


async def test_one_request_without_an_answer_fails_alone(router):
    """What else is asked goes on another stream, and is not told that the router has ended it."""
    await router.register("a")
    opened = []

    class SilentAtFirst(pb_grpc.RouterServiceServicer):
        async def StreamLeases(self, requests, context):
            opened.append(context)
            if len(opened) == 1:
                await asyncio.get_running_loop().create_future()
            async for answer in router.stub.StreamLeases(requests, timeout=PATIENCE):
                yield answer

    server = grpc.aio.server()
    pb_grpc.add_RouterServiceServicer_to_server(SilentAtFirst(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with create_channel(f"127.0.0.1:{port}") as channel:
            stream = LeaseStream(pb_grpc.RouterServiceStub(channel))
            first, *others = [stream.ask(ask(1), s) for s in (0.3, PATIENCE, PATIENCE)]
            with pytest.raises(RemoteError) as caught:
                await first
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            answers = await asyncio.gather(*others)
            assert len({answer.first_lease_id for answer in answers}) == 2
            later = await stream.ask(ask(1), PATIENCE)
            assert later.first_lease_id not in {answer.first_lease_id for answer in answers}
            assert len(opened) == 2
            await stream.close()
    finally:
        await server.stop(0)


async def test_a_router_that_knows_no_streams_is_asked_one_by_one(router, connect):
    await router.register("a")

    class Old(pb_grpc.RouterServiceServicer):
        async def AcquireLeases(self, request, context):
            return await router.stub.AcquireLeases(request, timeout=PATIENCE)

    server = grpc.aio.server()
    pb_grpc.add_RouterServiceServicer_to_server(Old(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        client = await connect(f"127.0.0.1:{port}")
        for _ in range(2):
            leases = await client.acquire(LeaseDemand(count=2), timeout=PATIENCE)
            assert router.leases_out() == 2
            client.release(leases)
            await eventually(lambda: router.leases_out() == 0)
        await client.close()
    finally:
        await server.stop(0)
