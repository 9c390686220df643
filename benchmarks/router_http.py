"""Fake HTTP engines and a raw keep-alive client, cheap enough not to be what is measured."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque

import uvloop

BODY = json.dumps(
    {"input_ids": list(range(1000, 1512)), "sampling_params": {"max_new_tokens": 16}}
).encode()
_ANSWER = json.dumps(
    {
        "text": "x" * 120,
        "output_ids": list(range(16)),
        "meta_info": {"id": "0", "finish_reason": {"type": "length"}, "completion_tokens": 16},
    }
).encode()
_REPLY = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(_ANSWER)).encode()
    + b"\r\n\r\n"
    + _ANSWER
)


class FakeEngine(asyncio.Protocol):
    """Answers every request at once with the same body."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            length = end + 4 + _content_length(buffer[:end])
            if len(buffer) < length:
                break
            buffer = buffer[length:]
            self._transport.write(_REPLY)  # type: ignore[attr-defined]
        self._buffer = buffer


class HttpConnection(asyncio.Protocol):
    """One request at a time over one connection."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0 or len(buffer) < end + 4 + _content_length(buffer[:end]):
            return
        self._buffer = b""
        answer, self._answer = self._answer, None
        assert answer is not None
        if buffer.startswith(b"HTTP/1.1 200"):
            answer.set_result(None)
        else:
            answer.set_exception(ConnectionError(buffer[:120].decode(errors="replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("closed"))

    def post(self, host: bytes) -> asyncio.Future[None]:
        """Send the request; done when the answer is there."""
        self._answer = asyncio.get_running_loop().create_future()
        head = (
            b"POST /generate HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % (host, len(BODY))
        )
        self._transport.write(head + BODY)  # type: ignore[attr-defined]
        return self._answer

    def close(self) -> None:
        self._transport.close()


class HttpPool:
    """Idle connections to one address."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._name = host, int(port), address.encode()
        self._idle: deque[HttpConnection] = deque()

    async def post(self) -> None:
        loop = asyncio.get_running_loop()
        if self._idle:
            connection = self._idle.pop()
        else:
            _, connection = await loop.create_connection(HttpConnection, self._host, self._port)
        await connection.post(self._name)
        self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def _content_length(head: bytes) -> int:
    start = head.lower().find(b"content-length:")
    if start < 0:
        return 0
    end = head.find(b"\r\n", start)
    return int(head[start + 15 : end if end >= 0 else None])


async def _serve(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(FakeEngine, "127.0.0.1", 0) for _ in range(count)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the parent closes it


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fake engines; prints their ports as JSON.")
    parser.add_argument("--count", type=int, default=4)
    uvloop.run(_serve(parser.parse_args().count))
