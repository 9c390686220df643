"""RouterService: decodes a request, asks a pool, encodes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from services.router import metrics, wire
from services.router.episode_workers import EpisodeRegistry
from services.router.pools import PoolRoom, Pools
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.balance.routing import LeaseRequest, Needs
from sluice.runtime.errors import InvalidFieldError, NotFoundError
from sluice.runtime.idempotency import RequestLog, RequestTable, request_digest
from sluice.runtime.waits import Waits
from sluice.runtime.wire import duration_of, seconds_of

_REMEMBERED_REQUESTS = 1024
_TARGET_INDICES = pb.AcquireLeasesResponse.TARGET_INDICES_FIELD_NUMBER
_LONGEST_WAIT = 600.0  # seconds
_SETTLING_HEARTBEAT = 1.0  # seconds; an engine that waits to be leased again reports often
_NOTHING = LeaseRequest(count=0, needs=Needs(), may_wait=True)


class RouterServicer(pb_grpc.RouterServiceServicer):
    """Every method that changes a pool ends without an await between change and answer."""

    def __init__(self, pools: Pools, episodes: EpisodeRegistry, waits: Waits) -> None:
        self._pools, self._episodes, self._waits = pools, episodes, waits
        self._requests = RequestLog(_REMEMBERED_REQUESTS)
        # Of calls that do not wait: they end without an await, none can be joined while it runs.
        self._answers: RequestTable[pb.AcquireLeasesResponse] = RequestTable(_REMEMBERED_REQUESTS)

    async def close(self) -> None:
        await self._requests.close()

    async def RegisterEngine(
        self, request: pb.RegisterEngineRequest, context: Any
    ) -> pb.RegisterEngineResponse:
        engine = request.engine
        if engine.role == pb.ROLE_EPISODES:
            state = self._episodes.register(engine)
            return pb.RegisterEngineResponse(
                heartbeat_interval=duration_of(self._episodes.ttl), state=state
            )
        if engine.role != pb.ROLE_ENGINE:
            raise InvalidFieldError("engine.role", "is unknown to this router")
        spec = wire.engine_from_proto(engine)
        room = self._pools.room(engine.pool)
        former = self._pools.find(spec.name)
        if former is not None and former is not room:  # it has moved to another pool
            former.pool.remove(spec.name, self._pools.clock())
            former.settle()
        view = room.pool.register(spec, self._pools.clock(), known_epoch=request.known_epoch)
        room.settle()
        interval = room.pool.config.engine_ttl
        if room.pool.is_closed(spec.name):
            interval = min(interval, _SETTLING_HEARTBEAT)
        return pb.RegisterEngineResponse(
            heartbeat_interval=duration_of(interval),
            state=wire.state_to_proto(view),
            epoch=room.pool.epoch,
        )

    async def DrainEngine(
        self, request: pb.DrainEngineRequest, context: Any
    ) -> pb.DrainEngineResponse:
        draining, now = not request.resume, self._pools.clock()
        worker = self._episodes.drain(request.engine_id, draining)
        room = self._pools.find(request.engine_id)
        if room is None:
            if worker is None:
                raise NotFoundError("engine", request.engine_id)
            return pb.DrainEngineResponse(engine=worker)
        view = room.pool.drain(request.engine_id, draining, now)
        assert view is not None, "find says it is there"
        room.settle()
        engine = wire.engine_to_proto(view, room.name, now=now)
        return pb.DrainEngineResponse(engine=engine, epoch=room.pool.epoch)

    async def ListEngines(
        self, request: pb.ListEnginesRequest, context: Any
    ) -> pb.ListEnginesResponse:
        now = self._pools.clock()
        engines: list[pb.Engine] = []
        if request.role in (pb.ROLE_UNSPECIFIED, pb.ROLE_EPISODES):
            engines += self._episodes.list(request.pool)
        if request.role in (pb.ROLE_UNSPECIFIED, pb.ROLE_ENGINE):
            for room in self._pools:
                if request.pool in ("", room.name):
                    engines += [
                        wire.engine_to_proto(view, room.name, now=now)
                        for view in room.pool.engines()
                    ]
        engines.sort(key=lambda engine: (engine.engine_id, engine.role))
        return pb.ListEnginesResponse(engines=engines)

    async def WatchEngines(
        self, request: pb.WatchEnginesRequest, context: Any
    ) -> AsyncIterator[pb.WatchEnginesResponse]:
        room = self._pools.room(request.pool)
        if request.client_id:
            room.pool.greet(request.client_id, request.known_epoch, self._pools.clock())
            room.settle()
        while not room.closed:
            changed = room.changed
            yield pb.WatchEnginesResponse(engines=room.engines(), epoch=room.pool.epoch)
            await changed.wait()  # for as long as the caller listens

    async def AcquireLeases(
        self, request: pb.AcquireLeasesRequest, context: Any
    ) -> pb.AcquireLeasesResponse:
        if request.request_id and seconds_of(request.max_wait) > 0:  # a repeat joins the wait
            response = await self._requests.once(
                request.request_id, request, lambda: self._acquire(request)
            )
        elif request.request_id:
            digest = request_digest(request)
            known = self._answers.find(request.request_id, digest)
            response = known or await self._acquire(request)
            if known is None:
                self._answers.add(request.request_id, digest, response)
                self._answers.done(request.request_id, response)
        else:
            response = await self._acquire(request)
        return self._with_engines(request, response)

    def _with_engines(
        self, request: pb.AcquireLeasesRequest, response: pb.AcquireLeasesResponse
    ) -> pb.AcquireLeasesResponse:
        """The answer with what its targets mean now, if the client does not know.

        Targets are never moved while leased, so an answer given before may be read with the
        engines of now; and none that is remembered holds a copy of them.
        """
        room = self._pools.room(request.pool)
        response.epoch = room.pool.epoch
        if request.known_epoch == response.epoch:
            return response
        full = pb.AcquireLeasesResponse()
        full.CopyFrom(response)
        full.engines.extend(room.engines())
        return full

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: Any
    ) -> pb.RenewLeasesResponse:
        room = self._pools.room(request.pool)
        held = wire.held_from_proto(request)
        renewal = room.pool.renew(
            request.client_id, held, self._pools.clock(), known_epoch=request.known_epoch
        )
        room.settle()
        metrics.ADOPTED_LEASES.labels(room.name).inc(renewal.adopted_count)
        metrics.DROPPED_LEASES.labels(room.name).inc(renewal.dropped_count)
        waiting = held.ids[held.ranks < 0]
        targets = room.pool.targets_of(waiting)
        bound = targets >= 0
        return pb.RenewLeasesResponse(
            void_lease_ids=renewal.unknown.tolist(),
            ttl=room.ttl,
            adopted_count=renewal.adopted_count,
            dropped_count=renewal.dropped_count,
            bound_lease_ids=waiting[bound].tolist(),
            bound_target_indices=targets[bound].tolist(),
            engines=room.engines() if bound.any() else (),
            epoch=room.pool.epoch,
        )

    async def EndSession(
        self, request: pb.EndSessionRequest, context: Any
    ) -> pb.EndSessionResponse:
        room = self._pools.room(request.pool)
        return pb.EndSessionResponse(ended_count=room.pool.end_sessions(request.session_ids))

    async def ReportLoad(
        self, request: pb.ReportLoadRequest, context: Any
    ) -> pb.ReportLoadResponse:
        room = self._pools.find(request.engine_id)
        if room is None:
            return pb.ReportLoadResponse(known=False)
        room.pool.report_load(
            request.engine_id,
            wire.reports_from_proto(request),
            self._pools.clock(),
            seconds_per_token=seconds_of(request.time_per_token),
            age=max(seconds_of(request.age), 0.0),
        )
        room.settle()
        return pb.ReportLoadResponse(known=True)

    async def _acquire(self, request: pb.AcquireLeasesRequest) -> pb.AcquireLeasesResponse:
        wanted = wire.request_from_proto(request) if request.count else _NOTHING
        ids, outcomes, tokens = wire.released_from_proto(request.released)
        room, client = self._pools.room(request.pool), request.client_id
        room.pool.greet(client, request.known_epoch, self._pools.clock())
        if len(ids):
            count = room.pool.release(
                client, ids, self._pools.clock(), outcomes=outcomes, output_tokens=tokens
            )
            room.releases.inc(count)
        grant = room.acquire(client, wanted)
        response = pb.AcquireLeasesResponse(first_lease_id=grant.first_id, ttl=room.ttl)
        targets = np.maximum(grant.targets, -1) if grant.queued_count else grant.targets
        response.MergeFromString(wire.write_column(_TARGET_INDICES, targets))
        if grant.queued_count == request.count:  # no lease of this call has a target
            await self._wait(room, request)
        for lease, target in room.pool.collect(client):
            response.bound_lease_ids.append(lease)
            response.bound_target_indices.append(target)
        return response

    async def _wait(self, room: PoolRoom, request: pb.AcquireLeasesRequest) -> None:
        """Until a waiting lease of the client has a target, or max_wait is over."""
        client, seconds = request.client_id, seconds_of(request.max_wait)
        if seconds <= 0 or room.closed:
            return
        if room.pool.has_news(client) or not room.pool.waits(client):
            return
        seconds = min(seconds, _LONGEST_WAIT)
        where, bound = f"{client} for a free rank of pool {room.name}", asyncio.Event()
        with (
            metrics.HOLD_SECONDS.time(),
            self._waits.waiting(where, timeout=seconds),
            room.listening(client, bound.set),
        ):
            try:
                async with asyncio.timeout(seconds):
                    await bound.wait()
            except TimeoutError:
                return  # they go on waiting; the client asks again
