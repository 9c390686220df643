"""Ranks without a model: they speak the protocol and answer as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from services.trainer.config import RanksConfig
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from tests.patience import PATIENCE

Answer = Callable[[pb.FollowResponse], Awaitable[pb.CommandResult | None]]


async def answer_ok(command: pb.FollowResponse) -> pb.CommandResult:
    return pb.CommandResult()


class ScriptedRank:
    """Connects like a rank process. `answer` may return None to stay silent about a command.

    only_hello: it writes nothing more. A rank that is refused while it writes may hear INTERNAL
    in place of the refusal (grpc/grpc issue 36066).
    """

    def __init__(
        self,
        address: str,
        rank: int,
        world_size: int,
        *,
        answer: Answer = answer_ok,
        beat: float = 0.05,
        generation: int = 0,
        ready: pb.RankReady | None = None,
        only_hello: bool = False,
    ) -> None:
        self.received: list[pb.FollowResponse] = []
        self.meeting = ""  # of the launch that it was taken into
        self.beating = asyncio.Event()
        self.error: grpc.aio.AioRpcError | None = None
        self._answer, self._beat_seconds = answer, beat
        self._outgoing: asyncio.Queue[pb.FollowRequest | None] = asyncio.Queue()
        hello = pb.RankHello(
            rank=rank, world_size=world_size, generation=generation, process_id=1, host="test"
        )
        layout = trainer_pb.ParallelLayout(data=world_size, context=1, pipeline=1)
        ready = ready or pb.RankReady(layout=layout, data_rank=rank, reports=True)
        self._outgoing.put_nowait(pb.FollowRequest(hello=hello))
        if not only_hello:
            self._outgoing.put_nowait(pb.FollowRequest(ready=ready))
            self.beating.set()
        self._task = asyncio.create_task(self._follow(address))
        self._heart = asyncio.create_task(self._beat())

    def say(self, event: pb.FollowRequest) -> None:
        """Send an event beside the answers."""
        self._outgoing.put_nowait(event)

    async def ended(self) -> None:
        """Until the stream is over, long before its own deadline."""
        async with asyncio.timeout(PATIENCE):
            await asyncio.shield(self._task)

    async def leave(self) -> None:
        """Close the stream, as a process does that ends."""
        self._heart.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, self._heart, return_exceptions=True)

    async def _events(self) -> AsyncIterator[pb.FollowRequest]:
        while (event := await self._outgoing.get()) is not None:
            yield event

    async def _follow(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.WorkerServiceStub(channel)
            try:
                async for command in stub.Follow(self._events(), timeout=10 * PATIENCE):
                    if command.HasField("welcome"):
                        self.meeting = command.welcome.meeting
                        continue
                    self.received.append(command)
                    result = await self._answer(command)
                    if result is not None:
                        result.sequence = command.sequence
                        self._outgoing.put_nowait(pb.FollowRequest(result=result))
            except grpc.aio.AioRpcError as error:
                self.error = error

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            await self.beating.wait()
            self._outgoing.put_nowait(
                pb.FollowRequest(heartbeat=pb.RankHeartbeat(activity="pondering"))
            )


def ranks_config(**settings: Any) -> RanksConfig:
    """Nothing is late by itself, whatever holds the process up: tests of that set what is short."""
    values: dict[str, Any] = {
        "count": 2,
        "launch": "external",
        "silent_seconds": 120.0,
        "lost_seconds": 240.0,
        "start_timeout": 120.0,
        "command_timeout": 120.0,
        "restart_backoff": 0.0,
        "max_restarts": 1,
    }
    return RanksConfig(**{**values, **settings})


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
