"""A client of a service by its name goes where that is, as the file tells; real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from sluice.api.common.v1 import wait_service_pb2, wait_service_pb2_grpc
from sluice.client import Client, RemoteError
from sluice.config import ConfigError
from sluice.durable import replace_file
from sluice.runtime.addresses import by_name, read_services
from sluice.runtime.channel import create_channel
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable]:
    servers: list[Server] = []

    async def started(wait: str) -> Server:
        """A server that waits for what it is named by."""
        server = Server(ServerConfig(metrics_port=0))
        await server.start()
        server.waits.begin(wait)
        servers.append(server)
        return server

    yield started
    for server in servers:
        await server.stop()


def write(path: Path, **services: Server) -> None:
    entries = {
        name: {"kind": name.partition("-")[0], "address": server.address}
        for name, server in services.items()
    }
    replace_file(path, json.dumps(entries).encode(), temporary=path.parent, sync=False)


async def told(client: Client) -> list[str]:
    """By which server a call is answered.

    Channels of a process share what they know of an address: where a server of an earlier test was
    at this port, calls fail until gRPC tries it again.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(RemoteError):
                return [wait.what for wait in await client.list_waits()]


async def test_a_client_goes_on_at_the_address_to_which_a_service_has_moved(
    tmp_path: Path, start: Callable
) -> None:
    file, first = tmp_path / "services.json", await start("first")
    write(file, router=first)
    async with Client(by_name(file, "router")) as client, Client(first.address) as pinned:
        assert await told(client) == await told(pinned) == ["first"]
        await first.stop()
        with pytest.raises(RemoteError) as caught:
            await client.list_waits()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        second = await start("second")
        assert second.address != first.address
        write(file, router=second)
        assert await told(client) == ["second"]
        assert client.address == second.address
        with pytest.raises(RemoteError):  # one of host:port stays where it is
            await pinned.list_waits()


async def test_one_that_still_answers_at_its_old_address_is_left_too(
    tmp_path: Path, start: Callable
) -> None:
    file, first, second = tmp_path / "services.json", await start("first"), await start("second")
    write(file, **{"trainer-0": first, "trainer-1": second})
    async with Client(by_name(file, "trainer-0")) as client:
        assert await told(client) == ["first"]
        write(file, **{"trainer-0": second, "trainer-1": first})
        assert await told(client) == ["second"]
        write(file, **{"trainer-0": first})
        assert await told(client) == ["first"]


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b'{"router": 1}', b"\xff", b"{" * 9])
async def test_while_the_file_does_not_tell_a_service_is_where_it_was(
    tmp_path: Path, start: Callable, content: bytes | None
) -> None:
    file, first, second = tmp_path / "services.json", await start("first"), await start("second")
    write(file, router=first)
    async with Client(by_name(file, "router")) as client:
        assert await told(client) == ["first"]
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        assert await told(client) == ["first"]
        write(file, router=second)
        assert await told(client) == ["second"]


async def test_a_stream_ends_with_its_server_and_the_next_one_is_at_the_new_place(
    tmp_path: Path, start: Callable
) -> None:
    """All four kinds of calls follow; the lease stream and the watch of engines are such ones."""
    file, first = tmp_path / "services.json", await start("first")
    write(file, router=first)
    async with create_channel(by_name(file, "router")) as channel:
        request = wait_service_pb2.ListWaitsRequest()
        calls = [
            getattr(channel, kind)(
                "/sluice.api.common.v1.WaitService/ListWaits",
                request_serializer=wait_service_pb2.ListWaitsRequest.SerializeToString,
                response_deserializer=wait_service_pb2.ListWaitsResponse.FromString,
            )
            for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        ]

        async def ask(index: int) -> list[str]:
            call = calls[index](request if index < 2 else iter([request]))
            answers = [await call] if index % 2 == 0 else [answer async for answer in call]
            return [wait.what for answer in answers for wait in answer.waits]

        assert [await ask(index) for index in range(4)] == [["first"]] * 4
        second = await start("second")
        write(file, router=second)
        await first.stop()
        assert [await ask(index) for index in range(4)] == [["second"]] * 4
        assert wait_service_pb2_grpc.WaitServiceStub(channel) is not None


@pytest.mark.parametrize("name", ["", "../router", "ro\0uter", "r" * 5000, "trainer", "#"])
def test_a_service_that_nobody_knows_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file = tmp_path / "services.json"
    file.write_text('{"router": {"kind": "router", "address": "127.0.0.1:1"}}')
    with pytest.raises(ConfigError, match="services: "):
        by_name(file, name)


@pytest.mark.parametrize("target", ["#", "#router", "/no/file#router", "\0#r", "f" * 5000 + "#r"])
def test_a_file_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="services: "):
        create_channel(target)


def test_a_damaged_file_is_refused_or_read_as_addresses(tmp_path: Path) -> None:
    whole = {f"rollout-{i}": {"kind": "rollout", "address": f"127.0.0.1:{i}"} for i in range(3)}
    data = json.dumps(whole).encode()
    file, rng = tmp_path / "services.json", random.Random(0)
    damaged = [data[:cut] for cut in range(0, len(data), 7)]
    for _ in range(300):
        at = rng.randrange(len(data))
        damaged.append(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    refused = 0
    for each in damaged:
        file.write_bytes(each)
        try:
            found = read_services(file)
        except ConfigError:
            refused += 1
        else:
            assert all(isinstance(text, str) for pair in found.items() for text in pair)
    assert refused > len(damaged) // 4
    file.write_bytes(data)
    assert read_services(file) == {name: entry["address"] for name, entry in whole.items()}
