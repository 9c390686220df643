"""RouterService: decodes a request, asks a pool, encodes the answer. Protobuf ends here."""

from __future__ import annotations

import asyncio
import functools
import time
import weakref
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Sequence,
    Sized,
)
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from services.router import metrics
from services.router.episode_workers import EpisodeRegistry
from services.router.pools import DEFAULT_POOL, NameTakenError, PoolRoom, Pools
from services.router.rivals import Rivals
from sluice.api.common.v1 import sample_pb2
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.balance.routing import (
    NO_VERSION,
    EngineSpec,
    EngineState,
    EngineView,
    LeaseClaims,
    LeaseRequest,
    Needs,
    Outcome,
    RankReport,
)
from sluice.runtime.errors import InvalidFieldError, NotFoundError, ServiceError
from sluice.runtime.idempotency import RequestLog, cancel_all, has_failed
from sluice.runtime.waits import Waits
from sluice.runtime.wire import check_address, duration_of, seconds_of, timestamp_of

T = TypeVar("T")
IntArray = NDArray[np.int64]
_Column = NDArray[Any] | list[int]
_Answer = tuple[int, str, Any]  # a StreamedLeaseAnswer's number, field and message in it
_Released = tuple[_Column, _Column, _Column | None]  # ids, outcomes, token counts

MAX_COUNT = 65_536  # leases of one call
MAX_DP_SIZE = 4_096
_OK = int(Outcome.OK)
_ALL_OK = np.full(MAX_COUNT, _OK, np.uint8)  # to be read alone
_STATES = {
    EngineState.ACTIVE: pb.ENGINE_STATE_ACTIVE,
    EngineState.DRAINING: pb.ENGINE_STATE_DRAINING,
    EngineState.BROKEN: pb.ENGINE_STATE_BROKEN,
    EngineState.LOST: pb.ENGINE_STATE_LOST,
}
_HANDFUL = 8  # values that are cheaper one by one
_REMEMBERED_REQUESTS = 1024
_TARGET_INDICES = pb.AcquireLeasesResponse.TARGET_INDICES_FIELD_NUMBER
_LONGEST_WAIT = 600.0  # seconds
_SETTLING_HEARTBEAT = 1.0  # seconds; an engine that waits to be leased again reports often
_SETTLING_SHARE = 0.005  # of it for each engine of the pool: reports of all are answered in time
NEWS_SECONDS = 0.25  # between two of a watch: a whole fleet that takes new weights is a few
_UNDER_WAY = 1024  # requests that wait, or whose answer does; with so many no more are read
_WAITING_BYTES = 1 << 26  # of requests that wait; with so many no more are read
_ANSWER_BYTES = 1 << 20  # of answers, after which a message is full
NAMED_ENGINES = 8  # in an explanation
_NOTHING = LeaseRequest(count=0, needs=Needs(), may_wait=True)


class _LeaseAnswers:
    """One client's stream of requests for leases: many under way, each answered on its own.

    Answers go in the order in which they are there; those ready together go together. While
    nothing waits, one task reads, answers and writes.

    now: answers a request without a wait; later: one that may wait.
    """

    def __init__(
        self,
        now: Callable[[pb.AcquireLeasesRequest], pb.AcquireLeasesResponse],
        later: Callable[[pb.AcquireLeasesRequest], Awaitable[pb.AcquireLeasesResponse]],
    ) -> None:
        self._now, self._later = now, later
        self._asked: deque[pb.StreamedLeaseRequest] = deque()  # read, and not taken yet
        self._answers: deque[_Answer] = deque()  # by number, on their way
        self._waiting: dict[asyncio.Task[None], int] = {}  # with the bytes of its request
        self._changed = asyncio.Event()  # what is read, or waits
        self._idle: asyncio.Task[Any] | None = None  # of the stream, while it reads and no more
        self._ending = False
        self._failed: asyncio.Task[None] | None = None

    def end(self) -> None:
        """End once what waits has been answered, which the end of a pool hastens."""
        self._ending = True
        self._changed.set()
        if self._idle is not None:
            self._idle.cancel()

    async def answer(
        self,
        messages: AsyncIterator[pb.StreamLeasesRequest],
        write: Callable[[pb.StreamLeasesResponse], Awaitable[None]],
    ) -> None:
        """Writes until the client has no more to ask, or `end`. Raises what `messages` raises."""
        own = asyncio.current_task()
        reading: asyncio.Task[pb.StreamLeasesRequest | None] | None = None  # beside what waits
        try:
            while True:
                while self._asked and not self._is_full():
                    self._take(self._asked.popleft())
                if self._answers:
                    await write(self._next())
                    continue
                if self._failed is not None:
                    self._failed.result()
                if self._ending and not self._waiting:
                    return
                if reading is None and not self._waiting and not self._asked:
                    self._idle = own
                    message = await anext(messages, None)
                    self._idle = None
                elif reading is not None and reading.done() and not self._asked:
                    message, reading = reading.result(), None
                else:
                    if reading is None:
                        reading = asyncio.create_task(_next_of(messages), name="read requests")
                        reading.add_done_callback(lambda _: self._changed.set())
                    await self._changed.wait()  # for as long as the caller listens
                    self._changed.clear()
                    continue
                if message is None:
                    return
                self._asked.extend(message.requests[:])
        except asyncio.CancelledError:
            if own is None or self._idle is None or not self._ending:
                raise
            own.uncancel()  # it was `end`
        finally:
            self._idle = None
            await cancel_all([*self._waiting, *([] if reading is None else [reading])])

    def _is_full(self) -> bool:
        if not self._waiting:
            return len(self._answers) >= _UNDER_WAY
        under_way = len(self._answers) + len(self._waiting)
        return under_way >= _UNDER_WAY or sum(self._waiting.values()) >= _WAITING_BYTES

    def _take(self, asked: pb.StreamedLeaseRequest) -> None:
        number, request = asked.number, asked.acquire
        if seconds_of(request.max_wait) > 0:
            task = asyncio.create_task(self._wait(number, request), name="wait for leases")
            self._waiting[task] = request.ByteSize()
            task.add_done_callback(self._settle)
            return
        try:
            self._answers.append((number, "leases", self._now(request)))
        except ServiceError as error:
            self._answers.append((number, "error", error.to_status()))

    async def _wait(self, number: int, request: pb.AcquireLeasesRequest) -> None:
        try:
            self._answers.append((number, "leases", await self._later(request)))
        except ServiceError as error:
            self._answers.append((number, "error", error.to_status()))

    def _settle(self, task: asyncio.Task[None]) -> None:
        del self._waiting[task]
        if has_failed(task) and not task.cancelled():
            self._failed = task
        self._changed.set()

    def _next(self) -> pb.StreamLeasesResponse:
        """Takes out the answers of one message."""
        message, size = pb.StreamLeasesResponse(), 0
        while self._answers and size < _ANSWER_BYTES:
            answer = message.answers.add()
            answer.number, name, content = self._answers.popleft()
            getattr(answer, name).CopyFrom(content)
            size += answer.ByteSize() if self._answers else 0
        return message


async def _next_of(messages: AsyncIterator[T]) -> T | None:
    """What `anext` returns is no coroutine, as a task needs one."""
    return await anext(messages, None)


class RouterServicer(pb_grpc.RouterServiceServicer):
    """Serves leases. Between a change of a pool and its answer is no await but for a free rank."""

    def __init__(
        self, pools: Pools, episodes: EpisodeRegistry, waits: Waits, rivals: Rivals
    ) -> None:
        self._pools, self._episodes, self._waits = pools, episodes, waits
        self._rivals = rivals
        self._requests = RequestLog(_REMEMBERED_REQUESTS)
        self._news: dict[str, pb.WatchEnginesResponse] = {}  # by pool, of its epoch
        self._streams: weakref.WeakSet[_LeaseAnswers] = weakref.WeakSet()  # until they end

    def end_streams(self) -> None:
        """Let go of the clients that stream, as the server stops."""
        for stream in list(self._streams):
            stream.end()

    async def close(self) -> None:
        await self._requests.close()

    async def RegisterEngine(
        self, request: pb.RegisterEngineRequest, context: Any
    ) -> pb.RegisterEngineResponse:
        engine = request.engine
        check_address(engine.address, "engine.address")
        self._rivals.hear(request)
        engine.pool = engine.pool or DEFAULT_POOL
        if engine.role == pb.ROLE_EPISODES:
            if (worker := self._episodes.holder(engine, request.known_epoch)) is not None:
                raise NameTakenError(engine.engine_id, worker.address)
            if gone := self._episodes.former(engine):
                self._pools.end_client(gone)  # its lease client has the name of the process
            state = self._episodes.register(engine)
            return pb.RegisterEngineResponse(
                heartbeat_interval=duration_of(self._episodes.ttl),
                state=state,
                epoch=self._episodes.epoch,
                router_id=self._rivals.identity,
            )
        if engine.role != pb.ROLE_ENGINE:
            raise InvalidFieldError("engine.role", "is unknown to this router")
        spec = engine_from_proto(engine)
        room = self._pools.room(engine.pool)
        if (holder := room.pool.holder(spec, request.known_epoch)) is not None:
            raise NameTakenError(spec.name, holder.address)
        former = self._pools.find(spec.name)
        if former is not None and former is not room:  # it has moved to another pool
            former.pool.remove(spec.name, self._pools.clock())
            former.notify_waiters()
        view = room.pool.register(spec, self._pools.clock(), known_epoch=request.known_epoch)
        room.notify_waiters()
        interval = room.pool.config.engine_ttl
        if room.pool.is_closed(spec.name):
            share = _SETTLING_SHARE * len(room.pool.tables.targets.engines)
            interval = min(interval, max(_SETTLING_HEARTBEAT, share))
        return pb.RegisterEngineResponse(
            heartbeat_interval=duration_of(interval),
            state=state_to_proto(view),
            epoch=room.pool.epoch,
            router_id=self._rivals.identity,
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
        room.notify_waiters()
        engine = engine_to_proto(view, room.name, now=now)
        return pb.DrainEngineResponse(engine=engine, epoch=room.pool.epoch)

    async def ListEngines(
        self, request: pb.ListEnginesRequest, context: Any
    ) -> pb.ListEnginesResponse:
        if request.role not in (pb.ROLE_UNSPECIFIED, pb.ROLE_ENGINE, pb.ROLE_EPISODES):
            raise InvalidFieldError("role", "is unknown to this router")
        now = self._pools.clock()
        engines: list[pb.Engine] = []
        if request.role in (pb.ROLE_UNSPECIFIED, pb.ROLE_EPISODES):
            engines += self._episodes.list(request.pool)
        if request.role in (pb.ROLE_UNSPECIFIED, pb.ROLE_ENGINE):
            for room in self._pools:
                if request.pool in ("", room.name):
                    engines += [
                        engine_to_proto(view, room.name, now=now) for view in room.pool.engines()
                    ]
        engines.sort(key=lambda engine: (engine.engine_id, engine.role))
        return pb.ListEnginesResponse(engines=engines)

    async def WatchEngines(
        self, request: pb.WatchEnginesRequest, context: Any
    ) -> AsyncIterator[pb.WatchEnginesResponse]:
        room = self._pools.room(request.pool)
        if request.client_id:
            room.pool.greet(request.client_id, request.known_epoch, self._pools.clock())
            room.notify_waiters()
        watches, loop = room.watches, asyncio.get_running_loop()
        room.watchers += 1
        try:
            while not room.closed and room.watches == watches:
                changed, told = room.changed, loop.time()
                yield self._news_of(room)
                await changed.wait()  # for as long as the caller listens
                if not room.closed and (left := told + NEWS_SECONDS - loop.time()) > 0:
                    await asyncio.sleep(left)
        finally:
            room.watchers -= 1

    async def AcquireLeases(
        self, request: pb.AcquireLeasesRequest, context: Any
    ) -> pb.AcquireLeasesResponse:
        if seconds_of(request.max_wait) > 0:
            return await self._acquire_later(request)
        return self._acquire_now(request)

    async def StreamLeases(
        self, request_iterator: AsyncIterator[pb.StreamLeasesRequest], context: Any
    ) -> None:
        stream = _LeaseAnswers(self._acquire_now, self._acquire_later)
        self._streams.add(stream)
        await stream.answer(request_iterator, context.write)

    def _acquire_now(self, request: pb.AcquireLeasesRequest) -> pb.AcquireLeasesResponse:
        response = self._requests.once_now(
            request.request_id, request, lambda: self._acquire(request)
        )
        return self._with_engines(request, response)

    async def _acquire_later(self, request: pb.AcquireLeasesRequest) -> pb.AcquireLeasesResponse:
        """A repeat joins the wait."""
        response = await self._requests.once(
            request.request_id, request, lambda: self._acquire_or_wait(request)
        )
        return self._with_engines(request, response)

    def _with_engines(
        self, request: pb.AcquireLeasesRequest, response: pb.AcquireLeasesResponse
    ) -> pb.AcquireLeasesResponse:
        """Adds to an answer what its targets mean now, if the client does not know.

        Targets are never moved while leased, so an answer given before may be read with the
        engines of now; and none that is remembered holds a copy of them.
        """
        room = self._pools.room(request.pool)
        response.epoch = epoch = room.pool.epoch
        if request.known_epoch == epoch:
            return response
        full = pb.AcquireLeasesResponse()
        full.CopyFrom(response)
        full.engines.extend(self._news_of(room).engines)
        return full

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: Any
    ) -> pb.RenewLeasesResponse:
        room = self._pools.room(request.pool)
        claims = claims_from_proto(request)
        renewal = room.pool.renew(
            request.client_id, claims, self._pools.clock(), known_epoch=request.known_epoch
        )
        room.notify_waiters()
        metrics.ADOPTED_LEASES.labels(room.name).inc(renewal.adopted_count)
        metrics.DROPPED_LEASES.labels(room.name).inc(renewal.dropped_count)
        waiting = claims.ids[claims.ranks < 0]
        targets = room.pool.targets_of(waiting)
        bound = targets >= 0
        return pb.RenewLeasesResponse(
            void_lease_ids=renewal.unknown.tolist(),
            ttl=duration_of(room.pool.config.client_ttl),
            adopted_count=renewal.adopted_count,
            dropped_count=renewal.dropped_count,
            bound_lease_ids=waiting[bound].tolist(),
            bound_target_indices=targets[bound].tolist(),
            engines=self._news_of(room).engines if bound.any() else (),
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
            reports_from_proto(request),
            self._pools.clock(),
            seconds_per_token=seconds_of(request.time_per_token),
            age=seconds_of(request.age),
        )
        room.notify_waiters()
        return pb.ReportLoadResponse(known=True)

    async def _acquire_or_wait(self, request: pb.AcquireLeasesRequest) -> pb.AcquireLeasesResponse:
        """As `_acquire`, but with no target to tell of it waits for one, up to max_wait."""
        response = self._acquire(request)
        if not response.bound_lease_ids and all(target < 0 for target in response.target_indices):
            await self._wait(request)
            _add_news(self._pools.room(request.pool), request.client_id, response)
        return response

    def _acquire(self, request: pb.AcquireLeasesRequest) -> pb.AcquireLeasesResponse:
        wanted = _NOTHING
        if request.count:
            self._rivals.check()
            wanted = request_from_proto(request)
        ids, outcomes, tokens = released_from_proto(request.released)
        room, client, now = self._pools.room(request.pool), request.client_id, self._pools.clock()
        room.pool.greet(client, request.known_epoch, now)
        if len(ids):
            room.released += room.pool.release(
                client, ids, now, outcomes=outcomes, output_tokens=tokens
            )
        grant = room.acquire(client, wanted, now)
        response = pb.AcquireLeasesResponse.FromString(_with_ttl(room.pool.config.client_ttl))
        response.first_lease_id = grant.first_id
        targets = np.maximum(grant.targets, -1) if grant.queued_count else grant.targets
        if len(targets) <= _HANDFUL:
            response.target_indices.extend(targets.tolist())
        else:
            response.MergeFromString(write_column(_TARGET_INDICES, targets))
        _add_news(room, client, response)
        return response

    async def _wait(self, request: pb.AcquireLeasesRequest) -> None:
        """Wait until a lease of the client has a target, or max_wait is over."""
        room, client = self._pools.room(request.pool), request.client_id
        if room.closed or not room.pool.waits(client):
            return
        seconds = min(seconds_of(request.max_wait), _LONGEST_WAIT)
        where, bound = f"{client} for a free rank of pool {room.name}", asyncio.Event()
        with (
            metrics.HOLD_SECONDS.time(),
            self._waits.waiting(
                where,
                on=lambda: [view.spec.name for view in room.pool.engines()],
                timeout=seconds,
                explain=lambda: _states_of(room),
            ),
            room.listening(client, bound.set),
        ):
            try:
                async with asyncio.timeout(seconds):
                    await bound.wait()
            except TimeoutError:
                return  # they go on waiting; the client asks again

    def _news_of(self, room: PoolRoom) -> pb.WatchEnginesResponse:
        """Encodes a pool's engines without their load, by id; once per epoch, for all who ask."""
        news = self._news.get(room.name)
        if news is None or news.epoch != room.pool.epoch:
            views = sorted(room.pool.engines(), key=lambda view: view.spec.name)
            engines = [engine_to_proto(view, room.name) for view in views]
            news = pb.WatchEnginesResponse(engines=engines, epoch=room.pool.epoch)
            self._news[room.name] = news
        return news


def _add_news(room: PoolRoom, client: str, response: pb.AcquireLeasesResponse) -> None:
    """Put in the answer which waiting leases of the client have got a target."""
    for lease, target in room.pool.collect(client):
        response.bound_lease_ids.append(lease)
        response.bound_target_indices.append(target)


def _states_of(room: PoolRoom) -> str:
    """Says of each engine of a pool why it may have no free rank."""
    states = []
    for view in room.pool.engines():
        if view.state is not EngineState.ACTIVE:
            state = f"is {view.state}"
        elif view.spec.version == NO_VERSION:
            state = "has no weights"
        elif room.pool.is_closed(view.spec.name):
            state = "settles what it ran before"
        else:
            state = f"holds {sum(view.lease_counts)} leases, serves version {view.spec.version}"
        states.append(f"{view.spec.name} {state}")
    if not states:
        return f"no engine of pool {room.name} has registered"
    rest = f", and {len(states) - NAMED_ENGINES} more" if len(states) > NAMED_ENGINES else ""
    return ", ".join(states[:NAMED_ENGINES]) + rest


@functools.cache
def _with_ttl(seconds: float) -> bytes:
    """An answer with nothing but its TTL, made once: to read it again takes half the time."""
    return pb.AcquireLeasesResponse(ttl=duration_of(seconds)).SerializeToString()


def engine_from_proto(engine: pb.Engine) -> EngineSpec:
    """Raises InvalidFieldError for sizes out of range."""
    if not 0 <= engine.dp_size <= MAX_DP_SIZE:
        raise InvalidFieldError("engine.dp_size", f"must be 0 to {MAX_DP_SIZE}")
    if engine.max_running_count < 0:
        raise InvalidFieldError("engine.max_running_count", "must not be negative")
    weights = engine.weights if engine.HasField("weights") else None
    if weights is not None and weights.version < 0:
        raise InvalidFieldError("engine.weights.version", "must not be negative")
    return EngineSpec(
        name=engine.engine_id,
        address=engine.address,
        instance=engine.incarnation,
        dp_size=engine.dp_size or 1,
        max_running=engine.max_running_count,
        version=NO_VERSION if weights is None else weights.version,
        digest="" if weights is None else weights.digest,
    )


def state_to_proto(view: EngineView) -> pb.EngineState:
    state = _STATES[view.state]
    if state == pb.ENGINE_STATE_ACTIVE and view.spec.version == NO_VERSION:
        return pb.ENGINE_STATE_EMPTY
    return state


def engine_to_proto(view: EngineView, pool: str, *, now: float | None = None) -> pb.Engine:
    """With `now` (the router's clock) the load and the heartbeat too, which change always."""
    spec = view.spec
    engine = pb.Engine(
        engine_id=spec.name,
        address=spec.address,
        role=pb.ROLE_ENGINE,
        pool=pool,
        dp_size=spec.dp_size,
        max_running_count=spec.max_running,
        incarnation=spec.instance,
        state=state_to_proto(view),
        first_target_index=view.first_target,
        slowdown=view.slowdown,
    )
    if spec.version != NO_VERSION:
        weights = sample_pb2.WeightVersion(version=spec.version, digest=spec.digest)
        engine.weights.CopyFrom(weights)
    if now is not None:
        engine.leased_counts.extend(view.lease_counts)
        engine.heartbeat_time.CopyFrom(timestamp_of(time.time() - now + view.last_seen))
    return engine


def request_from_proto(request: pb.AcquireLeasesRequest) -> LeaseRequest:
    """Raises InvalidFieldError naming the column that does not fit."""
    count = request.count
    if not 0 <= count <= MAX_COUNT:
        raise InvalidFieldError("count", f"must be 0 to {MAX_COUNT}")
    groups: list[tuple[str, int]] = []
    if request.group_ids or request.group_sizes:
        names, sizes = request.group_ids[:], request.group_sizes[:]
        if len(sizes) != len(names) or min(sizes) < 0 or sum(sizes) != count:
            raise InvalidFieldError("group_sizes", f"must be one per group and sum to {count}")
        groups = list(zip(names, sizes, strict=True))
    expected = cached = None
    if request.expected_token_counts:
        _check_length("expected_token_counts", request.expected_token_counts, count)
        expected = np.asarray(request.expected_token_counts, dtype=np.float64)
        if np.isinf(expected).any():
            raise InvalidFieldError("expected_token_counts", "must be finite, 0 where unknown")
        expected[~(expected > 0)] = np.nan
    if sessions := request.session_ids:
        _check_length("session_ids", sessions, count)
    if request.cached_token_counts:
        _check_length("cached_token_counts", request.cached_token_counts, count)
        cached = np.asarray(request.cached_token_counts, dtype=np.int64)
        if (cached < 0).any():
            raise InvalidFieldError("cached_token_counts", "must not be negative")
    minimum = request.min_version  # 0 where it is not set
    exact = request.exact_version if request.HasField("exact_version") else None
    if minimum < 0:
        raise InvalidFieldError("min_version", "must not be negative")
    if exact is not None and exact < 0:
        raise InvalidFieldError("exact_version", "must not be negative")
    return LeaseRequest(
        count=count,
        groups=groups,
        expected_tokens=expected,
        sessions=sessions,
        prefix_tokens=cached,
        needs=Needs(minimum, exact),
        may_wait=request.HasField("max_wait"),
        excluded=frozenset(request.excluded_engine_ids or ()),
    )


def claims_from_proto(request: pb.RenewLeasesRequest) -> LeaseClaims:
    """Raises InvalidFieldError naming the column that does not fit."""
    ids = int_column(request.lease_ids)
    for name in ("dp_ranks", "engine_indices"):
        if len(getattr(request, name)) != len(ids):
            raise InvalidFieldError(name, f"must have {len(ids)} entries, one per lease")
    engines, ranks = int_column(request.engine_indices), int_column(request.dp_ranks)
    if len(ranks) and not (ranks.min() >= -1 and ranks.max() < MAX_DP_SIZE):
        raise InvalidFieldError("dp_ranks", f"must be -1 to {MAX_DP_SIZE - 1}")
    bound = ranks >= 0
    if bound.any() and not (
        (engines[bound] >= 0).all() and (engines[bound] < len(request.engine_ids)).all()
    ):
        raise InvalidFieldError("engine_indices", "must index engine_ids")
    unique, first = np.unique(ids, return_index=True)
    return LeaseClaims(
        ids=unique, names=list(request.engine_ids), engines=engines[first], ranks=ranks[first]
    )


def reports_from_proto(request: pb.ReportLoadRequest) -> list[RankReport]:
    """Raises InvalidFieldError for what no engine can have measured."""
    for index, load in enumerate(request.rank_loads):
        for field, value in load.ListFields():
            if value < 0:
                raise InvalidFieldError(f"rank_loads[{index}].{field.name}", "must not be negative")
    for name in ("time_per_token", "age"):
        if seconds_of(getattr(request, name)) < 0:
            raise InvalidFieldError(name, "must not be negative")
    return [
        RankReport(
            running_count=load.running_count,
            waiting_count=load.waiting_count,
            used_tokens=load.used_tokens,
            max_tokens=load.max_tokens,
        )
        for load in request.rank_loads
    ]


def int_column(values: Sequence[int]) -> IntArray:
    """int64[n] of a packed column."""
    return np.fromiter(values, dtype=np.int64, count=len(values))


def released_from_proto(released: pb.ReleasedLeases) -> _Released:
    """Decodes ids, outcomes (OK where the column is empty) and token counts (None) of releases.

    Raises InvalidFieldError naming the column that does not fit.
    """
    if len(released.lease_ids) <= _HANDFUL:
        return _few_released_from_proto(released)
    released.DiscardUnknownFields()  # of a newer client, which need not be packed
    columns = read_columns(released.SerializeToString())
    ids = np.frombuffer(columns.get(1, b""), dtype="<i8")
    outcomes: NDArray[Any] = _ALL_OK[: len(ids)]
    if len(ids) > MAX_COUNT:
        outcomes = np.full(len(ids), _OK, np.uint8)
    tokens: NDArray[Any] | None = None
    if 2 in columns:
        data = columns[2]  # packed varints: of one byte each, unless a newer client has more
        one_byte = len(data) == len(released.outcomes)
        outcomes = np.frombuffer(data, np.uint8) if one_byte else int_column(released.outcomes)
        _check_length("released.outcomes", outcomes, len(ids))
    if 3 in columns:
        tokens = np.frombuffer(columns[3], dtype="<i4")
        _check_length("released.token_counts", tokens, len(ids))
    return ids, outcomes, tokens


def _few_released_from_proto(released: pb.ReleasedLeases) -> _Released:
    """As `released_from_proto`; for a handful an object for each is cheaper."""
    ids, outcomes, tokens = released.lease_ids[:], [_OK] * len(released.lease_ids), None
    if given := released.outcomes:
        _check_length("released.outcomes", given, len(ids))
        outcomes = cast(list[int], given[:])
    if counts := released.token_counts:
        _check_length("released.token_counts", counts, len(ids))
        tokens = counts[:]
    return ids, outcomes, tokens


def read_columns(data: bytes) -> dict[int, bytes]:
    """Splits a serialized message of packed fields alone, by field number.

    The columns of thousands of leases become arrays without an object for each value.
    """
    columns: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        length, at = _read_varint(data, at)
        assert tag & 7 == 2, "only packed fields"
        columns[tag >> 3] = data[at : at + length]
        at += length
    return columns


def write_column(field: int, values: IntArray) -> bytes:
    """Encodes a packed sfixed32 field, to be merged into a message."""
    data = values.astype("<i4").tobytes()
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _check_length(name: str, column: Sized, count: int) -> None:
    if len(column) not in (0, count):
        raise InvalidFieldError(name, f"must be empty or have {count} entries")
