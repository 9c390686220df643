"""The rank's end of its stream to the front, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import AsyncIterator, Iterator

import grpc

from services.trainer.config import TrainerConfig
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from sluice.runtime.channel import create_channel

logger = logging.getLogger(__name__)

STREAM_SECONDS = 365 * 86400.0  # heartbeats, not the deadline, bound the stream
EXIT_SECONDS = 5.0  # the device thread has so long to end once the front is gone


class FrontStream:
    """Sends answers and heartbeats, hands out commands in order.

    The process ends itself when the front goes away, even if the device thread hangs.
    """

    def __init__(self, front: str, hello: pb.RankHello, config: TrainerConfig) -> None:
        self._front, self._hello, self._config = front, hello, config
        self._commands: queue.SimpleQueue[pb.FollowResponse | None] = queue.SimpleQueue()
        self._activity = "loading"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outgoing: asyncio.Queue[pb.FollowRequest | None] = asyncio.Queue()
        self._started = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="front-stream", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started.wait(EXIT_SECONDS)

    def commands(self) -> Iterator[pb.FollowResponse]:
        """Commands in order, until the stream ends."""
        while (command := self._commands.get()) is not None:
            yield command

    def set_activity(self, activity: str) -> None:
        self._activity = activity

    def send(self, event: pb.FollowRequest) -> None:
        """Queue an event; from the device thread."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed in between: the front is gone
                self._loop.call_soon_threadsafe(self._outgoing.put_nowait, event)

    def close(self) -> None:
        """Send what is queued and end the stream."""
        self._closing.set()
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._outgoing.put_nowait, None)
        self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except grpc.aio.AioRpcError as error:
            logger.error("the front is gone: %s: %s", error.code().name, error.details())
        finally:
            self._started.set()
            self._commands.put(None)
            if not self._closing.wait(
                EXIT_SECONDS
            ):  # the device thread hangs, e.g. in a collective
                os._exit(1)

    async def _follow(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outgoing.put_nowait(pb.FollowRequest(hello=self._hello))
        self._started.set()
        config = self._config
        channel = create_channel(self._front, config.server.security, name=config.front_name)
        heart = asyncio.create_task(self._beat())
        try:
            stub = pb_grpc.WorkerServiceStub(channel)
            async for command in stub.Follow(self._events(), timeout=STREAM_SECONDS):
                self._commands.put(command)
        finally:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
            await channel.close()

    async def _events(self) -> AsyncIterator[pb.FollowRequest]:
        while (event := await self._outgoing.get()) is not None:
            yield event

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.ranks.heartbeat_seconds)
            beat = pb.RankHeartbeat(activity=self._activity)
            self._outgoing.put_nowait(pb.FollowRequest(heartbeat=beat))
