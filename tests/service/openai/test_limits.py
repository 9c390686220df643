"""Who may call, how much at once, how long, and what is left when a caller goes away."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    DefaultAsyncHttpxClient,
    InternalServerError,
    RateLimitError,
)

from services.rollout.engine.interface import PauseMode
from services.rollout.process import RolloutProcess
from sluice.config import ConfigError
from sluice.runtime import http
from tests.patience import PATIENCE
from tests.service.openai.conftest import client_of, running_openai
from tests.service.rollout.harness import SERVER, Store, running_rollout
from tests.service.security.trust import create_trust

LONG = {"model": "policy", "prompt": "1=", "max_tokens": 40}


async def until_idle(process: RolloutProcess) -> None:
    assert process.engine is not None
    async with asyncio.timeout(PATIENCE):
        while any(
            load.running_count or load.waiting_count for load in process.engine.status().rank_loads
        ):
            await asyncio.sleep(0.01)


async def until_waiting(process: RolloutProcess, count: int = 1) -> None:
    """Until so many samples wait in an engine that is paused."""
    assert process.engine is not None
    async with asyncio.timeout(PATIENCE):
        while process.engine.status().rank_loads[0].waiting_count < count:
            await asyncio.sleep(0.01)


async def test_tls_and_the_key_of_the_server_guard_this_port_too(
    store: Store, model: Path, tmp_path: Path
) -> None:
    trust = create_trust(tmp_path)
    security = trust.right.model_dump(mode="json")
    server = {**SERVER, "security": security}
    async with running_openai(store, model, server=server) as process:
        tls = trust.right.tls
        assert tls is not None
        context = ssl.create_default_context(cafile=str(tls.ca))
        context.load_cert_chain(str(tls.cert), str(tls.key))
        for key, is_right in (("open sesame", True), ("wrong", False)):
            http = DefaultAsyncHttpxClient(verify=context)
            async with client_of(process, api_key=key, http_client=http) as client:
                if is_right:
                    assert (await client.completions.create(**LONG)).choices
                else:
                    with pytest.raises(AuthenticationError) as refused:
                        await client.completions.create(**LONG)
                    assert refused.value.code == "invalid_api_key"
        stranger = ssl.create_default_context(cafile=str(tls.ca))
        async with httpx2.AsyncClient(verify=stranger) as plain:
            assert process.openai is not None
            with pytest.raises(httpx2.TransportError):
                await plain.get(process.openai.url + "/models")


async def test_one_request_too_many_is_told_to_wait(store: Store, model: Path) -> None:
    async with running_openai(store, model, openai={"max_running": 2}) as process:
        assert process.engine is not None
        await process.engine.pause(PauseMode.IN_PLACE)
        async with client_of(process) as client, asyncio.TaskGroup() as tasks:
            held = [tasks.create_task(client.completions.create(**LONG)) for _ in range(2)]
            await until_waiting(process, 2)
            with pytest.raises(RateLimitError) as refused:
                await client.completions.create(**LONG)
            assert refused.value.response.headers["Retry-After"] == "1"
            await process.engine.resume()
        assert all(task.result().choices for task in held)


async def test_a_request_ends_in_time_and_leaves_nothing_running(store: Store, model: Path) -> None:
    async with running_openai(store, model, openai={"request_seconds": 0.3}) as process:
        assert process.engine is not None
        await process.engine.pause(PauseMode.IN_PLACE)
        async with client_of(process) as client:
            with pytest.raises(InternalServerError) as late:
                await client.completions.create(**LONG)
            assert (late.value.status_code, late.value.code) == (504, "request_timed_out")
            with pytest.raises(InternalServerError):
                await client.completions.create(**LONG, stream=True)
        await process.engine.resume()
        await until_idle(process)


async def test_a_caller_that_leaves_ends_its_sampling(
    process: RolloutProcess, client: AsyncOpenAI
) -> None:
    assert process.engine is not None
    await process.engine.pause(PauseMode.IN_PLACE)
    call = asyncio.create_task(client.completions.create(**LONG, n=4))
    await until_waiting(process, 4)
    call.cancel()
    await until_idle(process)
    await process.engine.resume()


def sent_and_held(process: RolloutProcess, data: bytes) -> socket.socket:
    """A connection that has sent this, and sends no more."""
    assert process.openai is not None
    where = urlsplit(process.openai.url)
    connection = socket.create_connection((where.hostname, where.port))
    connection.sendall(data)
    return connection


async def test_connections_without_a_request_keep_nobody_out(process: RolloutProcess) -> None:
    begun, refused = b"POST / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    async with client_of(process) as client:
        assert (await client.completions.create(**LONG)).choices
        silent = [
            await asyncio.to_thread(sent_and_held, process, (b"", begun, refused)[number % 3])
            for number in range(http.MOST_IDLE + 20)
        ]
        silent[0].settimeout(PATIENCE)
        assert await asyncio.to_thread(silent[0].recv, 1) == b""
        assert (await client.completions.create(**LONG)).choices
    for connection in silent:
        connection.close()


async def test_connections_that_never_shake_hands_keep_nobody_out(
    store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = create_trust(tmp_path)
    server = {**SERVER, "security": trust.right.model_dump(mode="json")}
    tls = trust.right.tls
    assert tls is not None
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(str(tls.cert), str(tls.key))
    begun = b"\x16\x03\x01\x02\x00\x01"  # of a hello
    monkeypatch.setattr(http, "HANDSHAKE_SECONDS", 2 * PATIENCE)
    async with running_openai(store, model, server=server) as process:
        assert process.openai is not None
        silent = [
            await asyncio.to_thread(sent_and_held, process, begun[: 6 * (number % 2)])
            for number in range(http.MOST_IDLE + 20)
        ]
        secured = DefaultAsyncHttpxClient(verify=context)
        key = trust.right.token()
        async with client_of(process, api_key=key, http_client=secured) as client:
            assert (await client.completions.create(**LONG)).choices
            ours = [each.laddr for each in psutil.Process().net_connections("tcp")]
            assert sum(each.port == process.openai.port for each in ours) <= http.MOST_IDLE + 2
        for connection in silent:
            connection.close()
    monkeypatch.setattr(http, "HANDSHAKE_SECONDS", 0.1)
    async with running_openai(store, model, server=server) as process:
        late = await asyncio.to_thread(sent_and_held, process, begun)
        late.settimeout(PATIENCE)
        assert await asyncio.to_thread(late.recv, 1) == b""
        late.close()


async def test_bodies_that_do_not_end_take_bounded_room(store: Store, model: Path) -> None:
    settings = {"server": {**SERVER, "max_held_bytes": 1 << 20}}
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 400000\r\n\r\n"
    async with running_openai(store, model, **settings) as process:
        held = [
            await asyncio.to_thread(sent_and_held, process, begun + b" " * 390_000)
            for _ in range(5)
        ]
        for connection in held[:3]:
            connection.settimeout(PATIENCE)
            assert b"body_timed_out" in await asyncio.to_thread(connection.recv, 2000)
        async with client_of(process) as client:
            assert (await client.completions.create(**LONG)).choices
        for connection in held:
            connection.close()


async def test_too_large_a_body_is_refused(store: Store, model: Path) -> None:
    async with (
        running_openai(store, model, openai={"max_body_bytes": 2000}) as process,
        client_of(process) as client,
    ):
        with pytest.raises(APIStatusError) as refused:
            await client.completions.create(model="policy", prompt="1" * 5000)
        assert refused.value.status_code == 413


async def test_no_request_is_given_more_answers_than_are_allowed(store: Store, model: Path) -> None:
    async with (
        running_openai(store, model, openai={"max_choices": 4}) as process,
        client_of(process) as client,
    ):
        asked = {"model": "policy", "max_tokens": 1, "n": 2}
        answer = await client.completions.create(prompt=["1=", "2="], **asked)
        assert len(answer.choices) == 4
        with pytest.raises(APIStatusError, match="n: must not exceed 4") as refused:
            await client.completions.create(prompt=["1=", "2=", "3="], **asked)
        assert (refused.value.status_code, refused.value.body["param"]) == (400, "n")


async def test_before_the_first_weights_a_client_is_told_to_come_again(
    store: Store, model: Path
) -> None:
    settings = {"roles": ["engine"], "openai": {}, "tokenizer": str(model)}
    settings["episodes"] = {"engine_attempts": 1}
    async with running_rollout(store, **settings) as process, client_of(process) as client:
        with pytest.raises(InternalServerError) as refused:
            await client.completions.create(**LONG)
        assert (refused.value.status_code, refused.value.code) == (503, "no_weights")
        assert refused.value.response.headers["Retry-After"] == "1"


async def test_other_paths_and_bodies_are_refused_in_the_same_form(
    process: RolloutProcess,
) -> None:
    assert process.openai is not None
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        missing = await client.get(process.openai.url + "/embeddings")
        broken = await client.post(process.openai.url + "/completions", content=b"{")
        health = await client.get(process.openai.url.replace("/v1", "/health"))
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert health.status_code == 200


async def test_running_requests_end_before_the_process_does(store: Store, model: Path) -> None:
    server = {"drain_seconds": PATIENCE}
    async with running_openai(store, model, server=server) as process, client_of(process) as client:
        assert process.engine is not None
        await process.engine.pause(PauseMode.IN_PLACE)
        call = asyncio.create_task(client.completions.create(**LONG))
        await until_waiting(process)
        stopping = asyncio.create_task(process.server.stop())
        await process.server.stopping.wait()
        assert not call.done()
        await process.engine.resume()
        assert (await call).choices
        await stopping


async def test_its_host_may_be_of_ipv6(store: Store, model: Path) -> None:
    async with running_openai(store, model, server={**SERVER, "host": "::1"}) as process:
        assert process.openai is not None and "//[::1]:" in process.openai.url
        async with client_of(process) as client:
            assert (await client.models.list()).data


async def test_a_taken_port_is_named(process: RolloutProcess, store: Store, model: Path) -> None:
    assert process.openai is not None
    with pytest.raises(ConfigError, match=r"openai\.port: .*in use"):
        async with running_openai(store, model, openai={"port": process.openai.port}):
            pass
