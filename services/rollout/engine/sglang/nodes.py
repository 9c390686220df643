"""The further nodes of an engine over several hosts, as its first one sees them.

A *node* is a process of one engine; the first, number 0, serves, the others keep one process of
SGLang each. They report every second and are told what is to run. All that runs together is a
*group incarnation*: it has a number, meets at an address of its own, and is ended whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.rollout.errors import EngineFailedError
from sluice.api.rollout.v1 import engine_node_service_pb2 as pb
from sluice.api.rollout.v1 import engine_node_service_pb2_grpc as pb_grpc
from sluice.runtime import waits
from sluice.runtime.errors import InvalidFieldError

logger = logging.getLogger(__name__)

NODE_SERVICE = "sluice.api.rollout.v1.EngineNodeService"
BEAT_SECONDS = 1.0
PORT_BLOCK = 16  # free ports that a node offers; SGLang derives further ones from one it is told
LONGEST_NAME = 256


class NodeState(StrEnum):
    """What the server of a node does."""

    IDLE = "idle"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node says of itself. `port` is the first of its block of free ports."""

    engine_id: str
    node: int
    process: str
    host: str
    port: int
    incarnation: int = 0
    state: NodeState = NodeState.IDLE
    message: str = ""


@dataclass(frozen=True)
class NodeOrder:
    """What is to run on a node, from now on; nothing without arguments."""

    incarnation: int = 0
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str = ""


@dataclass(eq=False)
class _Link:
    """The stream of one node, from its first report on."""

    report: NodeReport
    heard: float
    order: NodeOrder = NodeOrder()
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False  # another process of that number has come


class EngineNodes:
    """Knows the nodes 1 to `count` of an engine, and what each is to run."""

    def __init__(self, count: int, silent_seconds: float) -> None:
        self._count, self._silent_seconds = count, silent_seconds
        self._links: dict[int, _Link] = {}
        self._orders: dict[int, tuple[str, NodeOrder]] = {}  # for one start of a node's process
        self._heard = asyncio.Event()  # set and replaced at each report

    async def follow(self, reports: AsyncIterator[NodeReport]) -> AsyncIterator[NodeOrder]:
        """Yields orders for the node of this stream, at each report and whenever one changes.

        Raises InvalidFieldError for a node that is none of this engine.
        """
        first = await anext(reports, None)
        if first is None:
            return
        if not 1 <= first.node <= self._count:
            raise InvalidFieldError("node", f"is 1 to {self._count} in this engine")
        link = self._take(first)
        reading = asyncio.create_task(self._read(link, reports), name=f"node {first.node}")
        try:
            while not (reading.done() or link.is_over):
                link.changed.clear()
                yield link.order
                await link.changed.wait()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if self._links.get(first.node) is link:
                del self._links[first.node]
                logger.warning("node %d on %s has gone", first.node, link.report.host)
            self._tell()

    async def gather(self, seconds: float) -> dict[int, NodeReport]:
        """Waits until all are there and run nothing; returns what they said, by number.

        Raises EngineFailedError after so many seconds.
        """
        deadline = time.monotonic() + seconds
        with waits.waiting("nodes of the engine", timeout=seconds, explain=self._missing):
            while missing := self._missing():
                if not await self._hear(deadline):
                    raise EngineFailedError(f"not all nodes came in {seconds:g} s: {missing}")
        return {number: link.report for number, link in sorted(self._links.items())}

    def run(self, orders: Mapping[int, tuple[NodeReport, NodeOrder]]) -> None:
        """Has each node run its order; one that was started anew since its report gets none."""
        self._orders = {n: (report.process, order) for n, (report, order) in orders.items()}
        for link in self._links.values():
            self._give(link)

    def end(self) -> None:
        """Has all nodes end what they run."""
        self.run({})

    async def lost(self, incarnation: int) -> str:
        """Waits until a node does not run its part of an incarnation any more; says which."""
        while not (why := self._lost(incarnation)):
            await self._hear(time.monotonic() + BEAT_SECONDS)
        return why

    def _take(self, report: NodeReport) -> _Link:
        """Takes a node in; one that has its number already gives way."""
        before = self._links.get(report.node)
        if before is not None:
            logger.warning("node %d comes from %s now", report.node, report.host)
            before.is_over = True
            before.changed.set()
        link = self._links[report.node] = _Link(report, time.monotonic())
        self._give(link)
        self._tell()
        return link

    def _give(self, link: _Link) -> None:
        process, order = self._orders.get(link.report.node, ("", NodeOrder()))
        if process != link.report.process:
            order = NodeOrder()
        if order != link.order:
            link.order = order
            link.changed.set()

    async def _read(self, link: _Link, reports: AsyncIterator[NodeReport]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async for report in reports:
                link.report, link.heard = report, time.monotonic()
                link.changed.set()  # an answer to each shows that this side lives
                self._tell()
        link.changed.set()

    def _tell(self) -> None:
        self._heard.set()
        self._heard = asyncio.Event()

    async def _hear(self, deadline: float) -> bool:
        """Waits for the next report, a second at most; False once the deadline is over."""
        seconds = min(BEAT_SECONDS, deadline - time.monotonic())
        if seconds <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        return True

    def _is_silent(self, link: _Link) -> bool:
        return time.monotonic() - link.heard > self._silent_seconds

    def _missing(self) -> str:
        """Says who is not there, or has not ended what it ran; empty where all are ready."""
        found = []
        for number in range(1, self._count + 1):
            link = self._links.get(number)
            if link is None:
                found.append(f"node {number} has not come")
            elif self._is_silent(link):
                found.append(f"node {number} on {link.report.host} is silent")
            elif link.report.state is NodeState.RUNNING:
                found.append(f"node {number} on {link.report.host} still runs what it had")
        return "; ".join(found)

    def _lost(self, incarnation: int) -> str:
        for number, (process, _) in self._orders.items():
            link = self._links.get(number)
            if link is None:
                return f"node {number} has gone"
            report, where = link.report, f"node {number} on {link.report.host}"
            if report.process != process:
                return f"{where} was started anew"
            if self._is_silent(link):
                return f"{where} is silent"
            if report.incarnation == incarnation and report.state is not NodeState.RUNNING:
                return f"{where}: {report.message}"
        return ""


class NodeServicer(pb_grpc.EngineNodeServiceServicer):
    """Serves the nodes of one engine."""

    def __init__(self, nodes: EngineNodes) -> None:
        self._nodes = nodes

    async def Follow(
        self, request_iterator: AsyncIterator[pb.FollowRequest], context: Any
    ) -> AsyncIterator[pb.FollowResponse]:
        reports = (report_from_proto(request) async for request in request_iterator)
        async with contextlib.aclosing(self._nodes.follow(reports)) as orders:  # type: ignore[type-var]
            async for order in orders:
                yield order_to_proto(order)


_STATES = {
    NodeState.IDLE: pb.NODE_STATE_IDLE,
    NodeState.RUNNING: pb.NODE_STATE_RUNNING,
    NodeState.ENDED: pb.NODE_STATE_ENDED,
}
_STATES_BY_NUMBER = {number: state for state, number in _STATES.items()}


def report_from_proto(message: pb.FollowRequest) -> NodeReport:
    """Reads a report. Raises InvalidFieldError."""
    if message.state not in _STATES_BY_NUMBER:
        raise InvalidFieldError("state", "is none that this engine knows")
    if not 0 < message.port < (1 << 16) - PORT_BLOCK:
        raise InvalidFieldError("port", f"is 1 to {(1 << 16) - PORT_BLOCK - 1}")
    if len(message.host) > LONGEST_NAME or not message.host.isprintable():
        raise InvalidFieldError("host", "is no name of a host")
    return NodeReport(
        engine_id=message.engine_id,
        node=message.node,
        process=message.process,
        host=message.host,
        port=message.port,
        incarnation=message.incarnation,
        state=_STATES_BY_NUMBER[message.state],
        message=message.message,
    )


def report_to_proto(report: NodeReport) -> pb.FollowRequest:
    return pb.FollowRequest(
        engine_id=report.engine_id,
        node=report.node,
        process=report.process,
        host=report.host,
        port=report.port,
        incarnation=report.incarnation,
        state=_STATES[report.state],
        message=report.message,
    )


def order_from_proto(message: pb.FollowResponse) -> NodeOrder:
    return NodeOrder(
        incarnation=message.incarnation,
        arguments=tuple(message.arguments),
        environment=dict(message.environment),
        model=message.model,
    )


def order_to_proto(order: NodeOrder) -> pb.FollowResponse:
    return pb.FollowResponse(
        incarnation=order.incarnation,
        arguments=order.arguments,
        environment=dict(order.environment),
        model=order.model,
    )
