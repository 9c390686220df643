"""EngineService through the router, for callers who want one address.

A request gets a lease and is sent to its engine; answers pass as bytes, undecoded.
Metadata `x-sluice-pool` names the pool, `x-sluice-session` keeps a conversation on one rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import Default, DescriptorPool

from services.router import metrics
from services.router.config import ProxySettings
from services.router.pools import PoolRoom, Pools, QueueTimeoutError, RouterDrainingError
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.balance.routing import QUEUED, LeaseRequest, Needs, Outcome
from sluice.router_client import outcome_of
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import NotFoundError
from sluice.runtime.security import SecurityConfig

logger = logging.getLogger(__name__)

SERVICE = "sluice.api.rollout.v1.EngineService"
METHODS = ("Generate", "StreamGenerate", "Score", "Abort")
_LEAST_SECONDS = 0.001


def describe_proxied(services: Sequence[str]) -> DescriptorPool:
    """Describe services for reflection, with EngineService as the router serves it."""
    described = DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        message = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(message)
        for service in message.service:
            if f"{message.package}.{service.name}" == SERVICE:
                kept = [method for method in service.method if method.name in METHODS]
                del service.method[:]
                service.method.extend(kept)
        described.Add(message)

    for name in services:
        add(Default().FindFileContainingSymbol(name))
    return described


@dataclass
class ProxiedRequest:
    """Holds a forwarded request's leases and the engine they are on."""

    room: PoolRoom
    leases: np.ndarray
    engine: str = ""
    address: str = ""
    dp_rank: int = 0
    outcome: Outcome = Outcome.ABORTED
    session: str = ""
    one_shot: bool = False
    released: bool = False
    request_id: str = ""  # once it may be aborted


class Proxy:
    """Forwards Generate, StreamGenerate, Score and Abort."""

    def __init__(
        self,
        pools: Pools,
        settings: ProxySettings,
        security: SecurityConfig,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises while this router should lease nothing."""
        self._pools, self._settings, self._security = pools, settings, security
        self._check = check
        self._client = f"proxy/{uuid.uuid4()}"
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._running: dict[str, ProxiedRequest] = {}  # by request id, the latest that has it
        self._waiting: dict[tuple[str, int], asyncio.Future[None]] = {}  # by pool and lease

    def add_to_server(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Generate": grpc.unary_unary_rpc_method_handler(
                self.generate, request_deserializer=pb.GenerateRequest.FromString
            ),
            "StreamGenerate": grpc.unary_stream_rpc_method_handler(
                self.stream_generate, request_deserializer=pb.StreamGenerateRequest.FromString
            ),
            "Score": grpc.unary_unary_rpc_method_handler(
                self.score, request_deserializer=pb.ScoreRequest.FromString
            ),
            "Abort": grpc.unary_unary_rpc_method_handler(
                self.abort,
                request_deserializer=pb.AbortRequest.FromString,
                response_serializer=pb.AbortResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def heartbeat(self) -> None:
        """Keep the leases of requests that run."""
        for room in self._pools:
            room.pool.heartbeat(self._client, self._pools.clock())

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def generate(self, request: pb.GenerateRequest, context: Any) -> bytes:
        async def send(proxied: ProxiedRequest) -> AsyncIterator[bytes]:
            self._start(proxied, request)
            call = self._method(proxied, "Generate", pb.GenerateRequest.SerializeToString)
            yield await call(request, timeout=_remaining(context))

        count = max(request.sample_count, 1)
        (answer,) = [part async for part in self._forward(send, request.versions, count, context)]
        return answer

    async def score(self, request: pb.ScoreRequest, context: Any) -> bytes:
        async def send(proxied: ProxiedRequest) -> AsyncIterator[bytes]:
            call = self._method(proxied, "Score", pb.ScoreRequest.SerializeToString)
            yield await call(request, timeout=_remaining(context))

        (answer,) = [part async for part in self._forward(send, request.versions, 1, context)]
        return answer

    async def stream_generate(
        self, request: pb.StreamGenerateRequest, context: Any
    ) -> AsyncIterator[bytes]:
        generate = request.generate

        def send(proxied: ProxiedRequest) -> AsyncIterator[bytes]:
            self._start(proxied, generate)
            method = self._channel(proxied.address).unary_stream(
                f"/{SERVICE}/StreamGenerate",
                request_serializer=pb.StreamGenerateRequest.SerializeToString,
            )
            return method(request, timeout=_remaining(context))

        count = max(generate.sample_count, 1)
        forwarded = self._forward(send, generate.versions, count, context)
        async with contextlib.aclosing(forwarded):
            async for message in forwarded:
                yield message

    async def abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        by_address: dict[str, list[str]] = {}
        for request_id in request.request_ids:
            if proxied := self._running.get(request_id):
                by_address.setdefault(proxied.address, []).append(request_id)
        answers = await asyncio.gather(
            *(
                self._abort_at(address, ids, _remaining(context))
                for address, ids in by_address.items()
            )
        )
        return pb.AbortResponse(aborted_request_ids=itertools.chain.from_iterable(answers))

    async def _abort_at(self, address: str, ids: list[str], seconds: float) -> Sequence[str]:
        """Returns what the engine aborted: nothing where it cannot be reached, and all ends."""
        method = self._channel(address).unary_unary(
            f"/{SERVICE}/Abort",
            request_serializer=pb.AbortRequest.SerializeToString,
            response_deserializer=pb.AbortResponse.FromString,
        )
        try:
            answer: pb.AbortResponse = await method(
                pb.AbortRequest(request_ids=ids), timeout=seconds
            )
        except grpc.aio.AioRpcError as error:
            logger.warning("engine at %s: not aborted: %s", address, error.details())
            return ()
        return answer.aborted_request_ids

    async def _forward(
        self,
        send: Callable[[ProxiedRequest], AsyncIterator[bytes]],
        versions: pb.VersionBounds,
        count: int,
        context: Any,
    ) -> AsyncGenerator[bytes, None]:
        """Yields an engine's answer, and tries another engine where one cannot be reached."""
        failed: set[str] = set()
        for attempt in range(1, self._settings.attempts + 1):
            proxied, begun = await self._lease(versions, count, context, failed), False
            try:
                async for message in send(proxied):
                    begun = True
                    yield message
                proxied.outcome = Outcome.OK
                metrics.PROXIED.labels("OK").inc()
                return
            except grpc.aio.AioRpcError as error:
                # What has begun cannot be sent again: the caller has half of it.
                is_last = begun or attempt == self._settings.attempts
                await self._failed(proxied, error, context, is_last=is_last)
                failed.add(proxied.engine)
            finally:
                self._release(proxied)

    async def _failed(
        self, proxied: ProxiedRequest, error: grpc.aio.AioRpcError, context: Any, *, is_last: bool
    ) -> None:
        """Ends the call with the engine's own error, unless another engine may be tried."""
        proxied.outcome = Outcome(outcome_of(error.code()))
        metrics.PROXIED.labels(error.code().name).inc()
        logger.info("engine %s: %s: %s", proxied.engine, error.code().name, error.details())
        self._release(proxied)  # before the caller hears of it
        if is_last or proxied.outcome is not Outcome.CONNECT_ERROR:
            trailing = tuple(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details() or "", trailing)

    async def _lease(
        self, versions: pb.VersionBounds, count: int, context: Any, failed: set[str]
    ) -> ProxiedRequest:
        """Lease for the samples of one request, all on one target."""
        self._check()
        sent = {str(key): value for key, value in context.invocation_metadata() or ()}
        room = self._pools.room(str(sent.get("x-sluice-pool", "")))
        session = str(sent.get("x-sluice-session", ""))
        key = session or f"{self._client}/{uuid.uuid4()}"  # one key puts all on one target
        needs = Needs(
            minimum=versions.min_version if versions.HasField("min_version") else 0,
            exact=versions.exact_version if versions.HasField("exact_version") else None,
        )
        wanted = LeaseRequest(
            count=count,
            sessions=[key] * count,
            needs=needs,
            may_wait=True,
            excluded=frozenset(failed),
        )
        grant = room.acquire(self._client, wanted, room.clock())
        leases = np.arange(grant.first_id, grant.first_id + count)
        proxied = ProxiedRequest(room, leases, session=key, one_shot=not session)
        if grant.targets[0] == QUEUED:
            await self._wait(proxied, _remaining(context))
        located = room.pool.located(int(room.pool.targets_of(leases[:1])[0]))
        if located is None:
            self._release(proxied)
            raise NotFoundError("engine", "of a lease just given")
        view, proxied.dp_rank = located
        proxied.engine, proxied.address = view.spec.name, view.spec.address
        return proxied

    async def _wait(self, proxied: ProxiedRequest, seconds: float) -> None:
        """Wait until the request's leases have a target; gives them back where they get none."""
        if proxied.room.closed:  # nobody will say so again
            self._release(proxied)
            raise RouterDrainingError("the router stops")
        key = (proxied.room.name, int(proxied.leases[0]))
        seconds = min(seconds, self._settings.wait_seconds)
        self._follow(proxied.room)
        bound = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await bound
        except TimeoutError:
            self._release(proxied)
            raise QueueTimeoutError(f"no rank came free in {seconds:g} s") from None
        except (RouterDrainingError, asyncio.CancelledError):
            self._release(proxied)
            raise
        finally:
            del self._waiting[key]

    def _follow(self, room: PoolRoom) -> None:
        """Hand targets of this pool to the requests that wait for them, from now on."""
        if room.tells(self._client):
            return

        def notify() -> None:
            for lease, _ in room.pool.collect(self._client):
                bound = self._waiting.get((room.name, lease))
                if bound is not None and not bound.done():
                    bound.set_result(None)
            if room.closed:
                for (name, _), bound in self._waiting.items():
                    if name == room.name and not bound.done():
                        bound.set_exception(RouterDrainingError("the router stops"))

        room.tell(self._client, notify)

    def _start(self, proxied: ProxiedRequest, request: pb.GenerateRequest) -> None:
        """Send the request to the rank of its leases; Abort finds it until they are released."""
        request.dp_rank, proxied.request_id = proxied.dp_rank, request.request_id
        self._running[proxied.request_id] = proxied

    def _release(self, proxied: ProxiedRequest) -> None:
        if proxied.released:
            return
        proxied.released = True
        if self._running.get(proxied.request_id) is proxied:  # else a retry has the same id
            del self._running[proxied.request_id]
        outcomes = np.full(len(proxied.leases), int(Outcome.UNKNOWN))
        outcomes[0] = int(proxied.outcome)
        now = self._pools.clock()
        proxied.room.pool.release(self._client, proxied.leases, now, outcomes=outcomes)
        if proxied.one_shot:
            proxied.room.pool.end_sessions([proxied.session])
        proxied.room.notify_waiters()

    def _method(self, proxied: ProxiedRequest, name: str, serializer: Any) -> Any:
        return self._channel(proxied.address).unary_unary(
            f"/{SERVICE}/{name}", request_serializer=serializer
        )

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = create_channel(address, self._security)
        return channel


def _remaining(context: Any) -> float:
    """Returns the seconds left of the caller's deadline."""
    left = context.time_remaining()
    return 600.0 if left is None else max(left, _LEAST_SECONDS)
