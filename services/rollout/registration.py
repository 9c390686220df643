"""Keeps a role of this process known to the router."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

import grpc

from services.rollout.engine import Engine
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.client import RemoteError, typed_errors

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5  # until the router answers
ANNOUNCE_SECONDS = 3.0
HEARTBEATS_PER_INTERVAL = 3


class Registration:
    """Registers at once, then again in time; `describe` and `measure` are asked each time."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        describe: Callable[[], pb.Engine],
        measure: Callable[[], list[engine_pb.RankLoad]] | None = None,
    ) -> None:
        self._stub = pb_grpc.RouterServiceStub(channel)
        self._describe, self._measure = describe, measure
        self._task: asyncio.Task[None] | None = None
        self._is_known = False
        self._trouble = ""  # the last that was told

    def start(self) -> None:
        """Begin; the router may come later."""
        self._task = asyncio.create_task(self._keep(), name="registration")

    async def announce(self) -> None:
        """Tell the router of new weights now; where that fails the next heartbeat will."""
        try:
            await self._register()
        except RemoteError as error:
            logger.warning("router: %s", error)

    async def close(self) -> None:
        """Stop, and ask the router to lease this process no more."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._is_known:
            request = pb.DrainEngineRequest(engine_id=self._describe().engine_id)
            try:
                with typed_errors():
                    await self._stub.DrainEngine(request, timeout=ANNOUNCE_SECONDS)
            except RemoteError as error:
                logger.warning("router: %s", error)

    async def _register(self) -> float:
        """Seconds until the next heartbeat."""
        request = pb.RegisterEngineRequest(engine=self._describe())
        with typed_errors():
            response = await self._stub.RegisterEngine(request, timeout=ANNOUNCE_SECONDS)
            if self._measure is not None:
                load = pb.ReportLoadRequest(
                    engine_id=request.engine.engine_id, rank_loads=self._measure()
                )
                await self._stub.ReportLoad(load, timeout=ANNOUNCE_SECONDS)
        if not self._is_known:
            logger.info("registered as %s", request.engine.engine_id)
        self._is_known, self._trouble = True, ""
        return response.heartbeat_interval.ToNanoseconds() / 1e9 / HEARTBEATS_PER_INTERVAL

    async def _keep(self) -> None:
        while True:
            try:
                delay = await self._register()
            except RemoteError as error:
                if self._trouble != str(error):  # once each, not twice a second
                    self._trouble = str(error)
                    logger.warning("router: %s", error)
                self._is_known, delay = False, RETRY_SECONDS
            await asyncio.sleep(delay)


def engine_description(
    engine: Engine, *, engine_id: str, address: str, pool: str
) -> Callable[[], pb.Engine]:
    """What the router is told of an engine, as it stands when called."""
    incarnation = uuid.uuid4().hex

    def describe() -> pb.Engine:
        status = engine.status()
        weights = None
        if status.version is not None and not status.failure:
            weights = sample_pb2.WeightVersion(version=status.version, digest=status.digest)
        return pb.Engine(
            engine_id=engine_id,
            address=address,
            role=pb.ROLE_ENGINE,
            pool=pool,
            dp_size=len(status.rank_loads),
            max_running_count=status.max_running,
            weights=weights,
            incarnation=incarnation,
        )

    return describe


def episodes_description(*, engine_id: str, address: str, pool: str) -> Callable[[], pb.Engine]:
    """What the router is told of an episode worker."""
    incarnation = uuid.uuid4().hex
    engine = pb.Engine(
        engine_id=engine_id,
        address=address,
        role=pb.ROLE_EPISODES,
        pool=pool,
        incarnation=incarnation,
    )
    return lambda: engine
