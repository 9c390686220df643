"""What gRPC alone costs: messages of a lease's size, there and back, that nobody reads.

`python -m benchmarks.router_bare` answers them and prints its port; it ends with its input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
import uvloop

from benchmarks.router_processes import Measured
from sluice.runtime.channel import create_channel

STREAM, UNARY = "Stream", "Unary"
SERVICE = "bare.Bare"
ASKED, ANSWERED = bytes(96), bytes(64)
WARM = 300


async def cpu_per_message(address: str, server: Measured, method: str, count: int) -> float:
    """CPU us of server and client together for one message and its answer, one at a time."""
    here = Measured.this()
    async with create_channel(address) as channel:
        path = f"/{SERVICE}/{method}"
        if method == STREAM:
            stream = channel.stream_stream(path)()

            async def ask() -> None:
                await stream.write(ASKED)
                assert await stream.read() == ANSWERED
        else:
            unary = channel.unary_unary(path)

            async def ask() -> None:
                assert await unary(ASKED, timeout=30) == ANSWERED

        for _ in range(WARM):
            await ask()
        before = server.cpu_seconds() + here.cpu_seconds()
        for _ in range(count):
            await ask()
        used = server.cpu_seconds() + here.cpu_seconds() - before
        if method == STREAM:
            await stream.done_writing()
    return used * 1e6 / count


async def _stream(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    while await context.read() is not grpc.aio.EOF:
        await context.write(ANSWERED)


async def _unary(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return ANSWERED


async def serve() -> None:
    server = grpc.aio.server()
    handlers = {
        STREAM: grpc.stream_stream_rpc_method_handler(_stream),
        UNARY: grpc.unary_unary_rpc_method_handler(_unary),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(serve())
