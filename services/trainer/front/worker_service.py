"""WorkerService: where the ranks connect, on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from services.trainer.config import TrainerConfig
from services.trainer.front.generation import Generation, RankLink
from services.trainer.front.rank_group import RankGroup
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.interceptors import ServiceInterceptor
from sluice.runtime.security import server_credentials
from sluice.runtime.server import opening

HELLO_SECONDS = 30.0
CLOSE_SECONDS = 2.0  # in which ranks hear that they may end


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Connects the streams of ranks with the group."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    async def Follow(
        self,
        request_iterator: AsyncIterator[pb.FollowRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.FollowResponse]:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("event") != "hello":
            raise InvalidFieldError("hello", "must come first")
        generation, link = await self._group.admit(first.hello)
        listener = asyncio.create_task(_listen(generation, link, request_iterator))
        try:
            while (command := await link.outgoing.get()) is not None:
                yield command
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
            generation.leave(link)


async def _listen(
    generation: Generation, link: RankLink, events: AsyncIterator[pb.FollowRequest]
) -> None:
    """Take in what the rank says until its stream ends; then end the other direction too."""
    try:
        async for event in events:
            generation.hear(link, event)
    finally:
        link.outgoing.put_nowait(None)


class WorkerServer:
    """The gRPC server of the ranks; its security is that of the public one."""

    def __init__(self, config: TrainerConfig, group: RankGroup) -> None:
        security, ranks = config.server.security, config.ranks
        self._server = grpc.aio.server(
            interceptors=[ServiceInterceptor(security.token())],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.server.max_message_bytes),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ],
        )
        pb_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(group), self._server)
        listen = f"{ranks.listen_host}:{ranks.listen_port}"
        with opening("ranks.listen_port", listen):
            if security.tls is None:
                self.port = self._server.add_insecure_port(listen)
            else:
                self.port = self._server.add_secure_port(listen, server_credentials(security.tls))
        self.address = f"{ranks.listen_host}:{self.port}"

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(CLOSE_SECONDS)
