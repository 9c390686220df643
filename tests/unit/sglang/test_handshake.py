"""Servers that lack something, or break off, are typed errors. SGLang's answers are played back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.rollout.engine.sglang.client import (
    FOR_CHECKSUMS,
    FOR_EXPERTS,
    FOR_PROFILES,
    FOR_TRANSFERS,
    NEEDED,
    MissingFeatureError,
    SglangClient,
    SGLangRefusedError,
    shake_hands,
)
from services.rollout.errors import EngineFailedError

SERVER = {
    "version": "0.5.23",
    "tp_size": 2,
    "dp_size": 1,
    "device": "gpu",
    "dtype": "bfloat16",
    "max_req_input_len": 4090,
    "max_total_num_tokens": 1000,
    "incremental_streaming_output": True,
    "weight_version": "4:ab",
}


def openapi(**without: str) -> dict[str, Any]:
    """What SGLang offers, less the named field of the path of that name, or the whole path."""
    paths, schemas = {}, {}
    for path, fields in {**NEEDED, **FOR_CHECKSUMS, **FOR_TRANSFERS, **FOR_PROFILES}.items():
        if path == without.get("path") and "field" not in without:
            continue
        name = path.strip("/")
        fields += FOR_EXPERTS.get(path, ())
        kept = [f for f in fields if (path, f) != (without.get("path"), without.get("field"))]
        schemas[name] = {"properties": {field: {} for field in [*kept, "other"]}}
        schema = {"anyOf": [{"$ref": f"#/components/schemas/{name}"}, {"type": "null"}]}
        body = {"content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"requestBody": body}}
    return {"paths": paths, "components": {"schemas": schemas}}


@asynccontextmanager
async def playing(answers: dict[str, tuple[int, bytes]]) -> AsyncIterator[SglangClient]:
    """A client of a server that gives these answers by path; others are cut off."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        if path in answers:
            status, body = answers[path]
            length = len(body) + (100 if status == 200 and path == "/generate" else 0)
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = SglangClient(f"http://127.0.0.1:{port}")
    async with server:
        yield client
        await client.close()


def offering(document: dict[str, Any], **changes: Any) -> dict[str, tuple[int, bytes]]:
    return {
        "/server_info": (200, json.dumps({**SERVER, **changes}).encode()),
        "/openapi.json": (200, json.dumps(document).encode()),
    }


async def test_a_whole_server_is_understood() -> None:
    async with playing(offering(openapi())) as client:
        found = await shake_hands(client, checksums=True)
    assert (found.release, found.tp_size, found.serving) == ("0.5.23", 2, (4, "ab"))
    assert found.max_length == 4088
    assert found.can_transfer
    assert not (found.can_sleep or found.is_seeded or found.is_language_only)


async def test_transfers_need_one_data_parallel_rank() -> None:
    async with playing(offering(openapi(), dp_size=2)) as client:
        assert not (await shake_hands(client, checksums=True)).can_transfer
    async with playing(offering(openapi(), pp_size=2)) as client:  # whose stages are ranks alike
        assert not (await shake_hands(client, checksums=True)).can_transfer
    without = openapi(path="/begin_weight_update")
    async with playing(offering(without)) as client:
        assert not (await shake_hands(client, checksums=True)).can_transfer


@pytest.mark.parametrize(
    ("without", "gap"),
    [
        ({"path": "/pause_generation"}, "/pause_generation"),
        ({"path": "/generate", "field": "routed_dp_rank"}, "/generate: routed_dp_rank"),
        ({"path": "/weights_checker"}, "/weights_checker"),
    ],
)
async def test_what_is_missing_is_named(without: dict[str, str], gap: str) -> None:
    async with playing(offering(openapi(**without))) as client:
        with pytest.raises(MissingFeatureError) as raised:
            await shake_hands(client, checksums=True)
        assert raised.value.metadata == {"feature": gap, "version": "0.5.23"}
        if gap == "/weights_checker":
            found = await shake_hands(client, checksums=False)
            assert not found.overlaps, "it cannot be asked to wait for the device"


async def test_what_overlaps_is_known() -> None:
    for disabled in (False, True):
        async with playing(offering(openapi(), disable_overlap_schedule=disabled)) as client:
            assert (await shake_hands(client, checksums=True)).overlaps is not disabled


async def test_routed_experts_need_a_field_and_a_server_that_keeps_them() -> None:
    keeping = {"enable_return_routed_experts": True}
    async with playing(offering(openapi(), **keeping)) as client:
        await shake_hands(client, checksums=True, experts=True)
    async with playing(offering(openapi())) as client:
        await shake_hands(client, checksums=True)
        with pytest.raises(MissingFeatureError) as raised:
            await shake_hands(client, checksums=True, experts=True)
    assert raised.value.metadata["feature"] == "enable_return_routed_experts"
    without = openapi(path="/generate", field="return_routed_experts")
    async with playing(offering(without, **keeping)) as client:
        await shake_hands(client, checksums=True)
        with pytest.raises(MissingFeatureError) as raised:
            await shake_hands(client, checksums=True, experts=True)
    assert raised.value.metadata["feature"] == "/generate: return_routed_experts"


async def test_nobody_there_and_refusals() -> None:
    async with playing({"/server_info": (404, b"no")}) as client:
        with pytest.raises(MissingFeatureError):
            await shake_hands(client, checksums=True)
    async with playing({}) as client:
        with pytest.raises(EngineFailedError):
            await shake_hands(client, checksums=True)
        assert not await client.answers()
    answers = {"/a": (200, b'{"success": false, "message": "why"}'), "/b": (200, b"null")}
    async with playing(answers) as client:
        with pytest.raises(SGLangRefusedError, match="why"):
            await client.post("/a", {}, 5)
        assert await client.post("/b", {}, 5) == {}


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    piece = b'data: {"index": 0}\n\n'
    async with playing({"/generate": (200, piece)}) as client:
        found = []
        with pytest.raises(EngineFailedError, match="broke off"):
            async for message in client.stream({}):
                found.append(message)
        assert found == [{"index": 0}]
    refused = b'{"error": {"message": "bad"}}'
    async with playing({"/generate": (400, refused)}) as client:
        with pytest.raises(SGLangRefusedError, match="bad"):
            async for _ in client.stream({}):
                pass


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b\x0c\x1c\x1e", "\r\n"])
async def test_a_text_may_hold_whatever_ends_a_line_elsewhere(separator: str) -> None:
    message = {"text": f"a{separator}b", "index": 0}
    event = json.dumps(message, ensure_ascii=False).encode()
    stream = b"data: %b\n\ndata: %b\r\n\r\ndata: [DONE]\n\n" % (event, event)
    async with playing({"/generate": (200, stream)}) as client:
        assert [each async for each in client.stream({})] == [message] * 2


async def test_a_stream_that_is_cancelled_leaves_nothing_in_the_pool() -> None:
    """A pool looks through all its requests for each new one."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        body = b'data: {"index": 0}\n\ndata: [DONE]\n\n'
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%b\r\n" % (len(body), body))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = SglangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    begun = asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(client.stream({})) as messages:
            async for _ in messages:
                begun.set()

    for _ in range(8):
        begun.clear()
        reading = asyncio.create_task(read())
        await begun.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    pool = client._http._transport._pool
    assert (len(pool._requests), len(pool._connections)) == (0, 0)
    await client.close()
    server.close()
