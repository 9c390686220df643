"""A further node of an engine: keeps one process of SGLang, as the engine's first node says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.sglang.nodes import (
    BEAT_SECONDS,
    PORT_BLOCK,
    NodeOrder,
    NodeReport,
    NodeState,
    order_from_proto,
    report_to_proto,
)
from services.rollout.engine.sglang.servers import (
    Launch,
    ServerProcess,
    check_python,
    with_python,
)
from sluice.api.rollout.v1 import engine_node_service_pb2 as pb
from sluice.api.rollout.v1 import engine_node_service_pb2_grpc as pb_grpc
from sluice.client import RemoteError, typed_errors
from sluice.config import ConfigError
from sluice.ports import free_port
from sluice.runtime.channel import create_channel
from sluice.runtime.security import SecurityConfig
from sluice.runtime.waits import Waits

logger = logging.getLogger(__name__)

STREAM_SECONDS = 365 * 86400.0  # reports, not the deadline, bound a stream
RETRY_SECONDS = 0.5
OPEN_PORTS = (
    (
        "SGLang on further nodes of an engine: HTTP of a prefill server, health, where nodes meet",
        "`engine.sglang.node_host`, 16 free ports in a row of 20000 to 31999",
        "`engine.sglang.api_key` for HTTP, where one is set; else nothing, and no TLS",
    ),
)


class FollowerNode:
    """Follows the first node of an engine, and runs what it says; `run` never returns.

    Without a word from it for `silent_seconds` its server is ended: the group may have gone on
    without this node.
    """

    def __init__(
        self, config: EngineConfig, engine_id: str, security: SecurityConfig, waits: Waits
    ) -> None:
        check_python(config.sglang)
        self._sglang, self._security, self._waits = config.sglang, security, waits
        self._report = NodeReport(
            engine_id=engine_id,
            node=config.sglang.node_rank,
            process=uuid.uuid4().hex,
            host=config.sglang.node_host,
            port=free_port(config.sglang.node_host, PORT_BLOCK),
        )
        self._server: ServerProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._reports: asyncio.Queue[NodeReport] = asyncio.Queue()
        self.follows = asyncio.Event()  # it has been heard by the first node
        self._last_error = "it has not been asked yet"

    @property
    def pids(self) -> list[int]:
        """Of the server that runs, if any."""
        return [] if self._server is None else [self._server.pid]

    async def run(self) -> None:
        """Follows for ever, over one stream after another."""
        while True:
            leader = self._sglang.leader
            with self._waits.waiting("a stream", on=[leader], explain=lambda: self._last_error):
                try:
                    channel = create_channel(leader, self._security)
                except ConfigError as error:  # a services.json without it, so far
                    self._note(str(error))
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
            try:
                with typed_errors():
                    await self._follow(channel)
                self._note("the stream has ended")
            except (RemoteError, TimeoutError) as error:
                self._note(str(error) or "not a word from the first node")
            finally:
                self.follows.clear()
                await self._end("the first node has gone")
                await channel.close()
            await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        await self._end("the process ends")

    def _note(self, error: str) -> None:
        if error != self._last_error:  # once each, not twice a second
            logger.warning("first node at %s: %s", self._sglang.leader, error)
        self._last_error = error

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        self._reports = asyncio.Queue()
        self._fresh_ports()
        call = pb_grpc.EngineNodeServiceStub(channel).Follow(self._speak(), timeout=STREAM_SECONDS)
        try:
            while True:
                async with asyncio.timeout(self._sglang.silent_seconds):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                if not self.follows.is_set():
                    logger.info("node %d follows %s", self._report.node, self._sglang.leader)
                self.follows.set()
                await self._obey(order_from_proto(message))
        finally:
            call.cancel()

    async def _speak(self) -> AsyncIterator[pb.FollowRequest]:
        """A report every second, and at once when something has changed."""
        while True:
            yield report_to_proto(self._report)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._reports.get()

    def _say(self, report: NodeReport) -> None:
        self._report = report
        self._reports.put_nowait(report)

    async def _obey(self, order: NodeOrder) -> None:
        runs = self._report.state is NodeState.RUNNING
        if not order.arguments:
            if runs:
                await self._end("the group has ended")
            return
        if order.incarnation == self._report.incarnation:
            return  # it runs, or has ended, and the first node knows or will
        await self._end("another group begins")
        await self._start(order)

    async def _start(self, order: NodeOrder) -> None:
        incarnation, model = order.incarnation, Path(order.model)
        if not await asyncio.to_thread(model.joinpath("config.json").exists):
            ended = f"it does not see {model}: all nodes of an engine need it at one place"
            logger.error(ended)
            self._say(
                replace(self._report, incarnation=incarnation, state=NodeState.ENDED, message=ended)
            )
            return
        launch = Launch(
            role=f"node {self._report.node}",
            url=f"{self._report.host}, incarnation {incarnation}",
            command=with_python(self._sglang, order.arguments),
            environment=order.environment,
        )
        server = ServerProcess(launch, self._sglang.stop_seconds)
        try:
            await server.spawn()
        except OSError as error:
            message = f"SGLang cannot be started: {error}"
            self._say(
                replace(
                    self._report, incarnation=incarnation, state=NodeState.ENDED, message=message
                )
            )
            return
        self._server = server
        self._say(
            replace(self._report, incarnation=incarnation, state=NodeState.RUNNING, message="")
        )
        self._watcher = asyncio.create_task(self._watch(server, incarnation), name="server")

    async def _watch(self, server: ServerProcess, incarnation: int) -> None:
        status = await server.wait()
        await server.kill()  # what it has left behind
        self._server = None
        message = f"SGLang ended with {status}"
        logger.error("incarnation %d: %s", incarnation, message)
        self._fresh_ports()
        self._say(replace(self._report, state=NodeState.ENDED, message=message))

    async def _end(self, why: str) -> None:
        """Ends the server at once: a part of a broken group has nothing to save.

        Holds it until it has ended: who is called off leaves it to the next.
        """
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        server = self._server
        if server is None:
            return
        began = time.monotonic()
        await server.kill()
        self._server = None
        logger.warning("SGLang was ended in %.1f s: %s", time.monotonic() - began, why)
        self._fresh_ports()
        self._say(replace(self._report, state=NodeState.IDLE, message=why))

    def _fresh_ports(self) -> None:
        """Others than those of the group before, which may linger."""
        with contextlib.suppress(OSError):
            port = free_port(self._report.host, PORT_BLOCK)
            self._report = replace(self._report, port=port)
