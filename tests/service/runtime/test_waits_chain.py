"""`sluice waits` follows whom a process waits for, down to one that gives no answer."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from sluice import waits_command
from sluice.api.common.v1 import wait_service_pb2_grpc as pb_grpc
from sluice.runtime.security import SecurityConfig
from sluice.runtime.waits import Waits
from tests.patience import growing

Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers = []

    async def start(what: str, *on: str) -> str:
        """A process that waits for something; returns its address."""
        waits, server = Waits(), grpc.aio.server()
        waits.begin(what, on=on)
        pb_grpc.add_WaitServiceServicer_to_server(waits, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(0)


async def test_the_one_that_gives_no_answer_is_named_and_not_who_waits_for_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # takes a connection, and no more
        engine = f"127.0.0.1:{stopped.getsockname()[1]}"
        worker = await serve("Generate", engine)
        router = await serve("nothing of theirs")
        loop = await serve("Rollout", worker, router)
        for seconds in growing(0.5):
            monkeypatch.setattr(waits_command, "FURTHER_SECONDS", seconds)
            told = [each async for each in waits_command.follow(loop, SecurityConfig())]
            if sum(each.what == "(does not tell)" for each in told) == 1:  # the others did in time
                break
    assert [(each.what, each.depth) for each in told] == [
        ("Rollout", 0),
        ("Generate", 1),
        ("(does not tell)", 2),
        ("nothing of theirs", 1),
    ]
    assert told[2].on == engine
    assert "it is stopped, or cut off" in told[2].explanation
