"""Pools by name, with the callers that wait for their news, and what is shown of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric

from services.router import metrics
from services.router.config import RouterConfig
from sluice.balance.routing import Grant, LeaseRefusedError, LeaseRequest, Pool, Refusal
from sluice.runtime.errors import QueueFullError, ServiceError
from sluice.runtime.metrics import Family, Reading, StateCollector

logger = logging.getLogger(__name__)

DEFAULT_POOL = "policy"
_NANOSECOND_BITS, _ID_BITS = 20, 14  # ids start at the time in ms x 2^14, so that an earlier
_POOL_BITS = 56  # process, which gives fewer than 16,000 a millisecond, is never caught up with
_UNAVAILABLE = frozenset({Refusal.NO_ENGINE, Refusal.NO_ENGINE_WITH_VERSION})


class LeasesRefusedError(QueueFullError):
    """Refuses leases; `reason` says why, RetryInfo when to come back."""

    def __init__(self, refused: LeaseRefusedError, pool: str) -> None:
        super().__init__(f"pool {pool}: {refused}", retry_seconds=refused.retry_seconds, pool=pool)
        self.reason = refused.reason.value
        if refused.reason in _UNAVAILABLE:
            self.code = grpc.StatusCode.UNAVAILABLE


class TooManyPoolsError(ServiceError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_POOLS"


class NameTakenError(ServiceError):
    """A process that started later has the name of this one; metadata has its address."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ENGINE_ID_TAKEN"

    def __init__(self, name: str, address: str) -> None:
        super().__init__(
            f"engine_id {name} is by now that of the process at {address}, which lives: give each "
            "process an engine_id of its own",
            address=address,
        )


class QueueTimeoutError(ServiceError):
    """No rank came free in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "QUEUE_TIMEOUT"


class RouterDrainingError(ServiceError):
    """This router stops; another one, or the same one restarted, will answer."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"


class RouterClock:
    """Seconds in which this process could be heard: time stops while the process is stopped.

    Else a router that is stopped and continued would find all clients silent and all engines lost,
    and give away what they hold. To be asked several times a second; after a gap of `GAP_SECONDS`
    `on_resume` is called with the seconds that are left out, before anything is decided by the
    new time.
    """

    GAP_SECONDS = 4.0  # clients give a call 5 s, and then pick engines without the router

    def __init__(
        self, on_resume: Callable[[float], None], source: Callable[[], float] = time.monotonic
    ) -> None:
        self._source, self._on_resume = source, on_resume
        self._last = source()
        self._left_out = 0.0

    def __call__(self) -> float:
        now = self._source()
        gap, self._last = now - self._last, now
        if gap >= self.GAP_SECONDS:
            self._left_out += gap
            self._on_resume(gap)
        return now - self._left_out


class PoolRoom:
    """Joins a pool with the calls that wait for it. Every change ends in `notify_waiters`."""

    def __init__(self, name: str, pool: Pool, clock: Callable[[], float], number: int) -> None:
        self.name, self.pool, self.clock, self.number = name, pool, clock, number
        self.watchers = 0  # calls that watch it
        self._bound: dict[str, set[Callable[[], None]]] = {}  # to call, by client
        self.changed = asyncio.Event()  # set, and replaced, at the next change of the epoch
        self.watches = 0  # rises when all that watch the pool should begin anew
        self.closed = False
        self._epoch = pool.epoch
        metrics.open_pool(name)
        self.granted = dict.fromkeys(metrics.DECISIONS, 0)  # leases, since it was made
        self.released = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody misses the pool where it is forgotten: it has no engine and no lease."""
        leases = self.pool.tables.leases
        return not (self.pool.engines() or leases.live_count or self.watchers)

    def notify_waiters(self) -> None:
        """Wake the calls that wait for what has just changed."""
        woken = self.pool.waiting.woken
        while woken:  # not a loop over it: who is notified may collect, which takes a client out
            for notify in self._bound.get(woken.pop(), ()):
                notify()
        if self.pool.epoch != self._epoch:
            self._epoch = self.pool.epoch
            self.changed.set()
            self.changed = asyncio.Event()

    def resume(self) -> None:
        """Learn anew what clients hold, after nothing was heard for a while."""
        self.pool.resume(self.clock())
        self.watches += 1  # who begins a watch renews what it holds
        self.notify_waiters()

    def close(self) -> None:
        """End the wait of all calls."""
        self.closed = True
        self.changed.set()
        for listeners in self._bound.values():
            for notify in listeners:
                notify()

    def acquire(self, client: str, request: LeaseRequest, now: float) -> Grant:
        """Lease from the pool, and count what it decides. Raises LeasesRefusedError."""
        try:
            grant = self.pool.acquire(client, request, now)
        except LeaseRefusedError as refused:
            metrics.REFUSALS.labels(self.name, refused.reason.value).inc(request.count)
            raise LeasesRefusedError(refused, self.name) from None
        finally:
            self.notify_waiters()
        granted = self.granted
        granted["session"] += grant.session_count
        granted["placed"] += len(grant.targets) - grant.queued_count - grant.session_count
        granted["queued"] += grant.queued_count
        return grant

    def tells(self, client: str) -> bool:
        """Whether the client is told."""
        return client in self._bound

    def tell(self, client: str, notify: Callable[[], None]) -> None:
        """As `listening`, for as long as there is the pool."""
        self._bound.setdefault(client, set()).add(notify)

    @contextmanager
    def listening(self, client: str, notify: Callable[[], None]) -> Iterator[None]:
        """Calls `notify` when a waiting lease of the client got a target, or the pool closes."""
        self.tell(client, notify)
        listeners = self._bound[client]
        try:
            yield
        finally:
            listeners.discard(notify)
            if not listeners:
                self._bound.pop(client, None)


class Pools:
    """Keeps pools by name; one is made when it is first named.

    Where there are as many as may be, those that nobody uses are forgotten for new ones.
    """

    def __init__(self, config: RouterConfig, clock: Callable[[], float] | None = None) -> None:
        if clock is None:
            clock = RouterClock(on_resume=self.resume)
        self.clock = clock
        self._config = config
        self._rooms: dict[str, PoolRoom] = {}
        self._seeds = np.random.SeedSequence(config.seed)

    def __iter__(self) -> Iterator[PoolRoom]:
        return iter(list(self._rooms.values()))

    def room(self, name: str) -> PoolRoom:
        """Returns the pool `name`, empty means `policy`. Raises TooManyPoolsError."""
        name = name or DEFAULT_POOL
        room = self._rooms.get(name)
        if room is None:
            if len(self._rooms) >= self._config.max_pools:
                self._forget_idle()
            if len(self._rooms) >= self._config.max_pools:
                raise TooManyPoolsError(
                    f"{self._config.max_pools} pools have engines, leases or callers", pool=name
                )
            room = self._rooms[name] = self._create(name)
        return room

    def find(self, engine_id: str) -> PoolRoom | None:
        """Returns the pool an engine is in; None where it is in none."""
        for room in self._rooms.values():
            if room.pool.has_engine(engine_id):
                return room
        return None

    def close(self) -> None:
        """End all waits, as the server stops."""
        for room in self._rooms.values():
            room.close()

    def end_client(self, client: str) -> None:
        """End what a client holds and waits for in all pools: its process is gone."""
        for room in self._rooms.values():
            count = room.pool.end_client(client, self.clock())
            room.notify_waiters()
            if count:
                logger.info("pool %s: client %s is gone, its leases end", room.name, client)
                metrics.EXPIRED_LEASES.labels(room.name).inc(count)

    def resume(self, gap: float) -> None:
        """Settle all pools, after this process could not be heard for `gap` seconds."""
        logger.warning("stopped, or held up, for %.1f s: clients are asked what they hold", gap)
        metrics.STOPS.inc()
        for room in self._rooms.values():
            room.resume()

    def _create(self, name: str) -> PoolRoom:
        taken = {room.number for room in self._rooms.values()}
        number = next(number for number in itertools.count() if number not in taken)
        # Ids of different pools, of forgotten ones and of earlier processes never meet.
        now = time.time_ns() >> _NANOSECOND_BITS << _ID_BITS
        rng = np.random.default_rng(self._seeds.spawn(1)[0])
        pool = Pool(self._config.pool(name), rng, first_lease_id=(number << _POOL_BITS) + now + 1)
        return PoolRoom(name, pool, self.clock, number)

    def _forget_idle(self) -> None:
        for name, room in list(self._rooms.items()):
            if room.is_idle:
                del self._rooms[name]
                metrics.close_pool(name)
                logger.info("pool %s is forgotten: nobody used it", name)

    def expire(self) -> None:
        """End what is overdue in every pool, and log it."""
        for room in self._rooms.values():
            expired = room.pool.expire(self.clock())
            room.notify_waiters()
            for client in expired.clients:
                logger.warning("pool %s: client %s is silent, its leases end", room.name, client)
            for engine in expired.engines:
                logger.warning("pool %s: engine %s is lost", room.name, engine)
            metrics.EXPIRED_LEASES.labels(room.name).inc(expired.lease_count)


class PoolCollector(StateCollector):
    """Reads the state of the pools when it is scraped."""

    def __init__(self, pools: Pools, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        engines = {
            reading: reading.family()
            for reading in (metrics.OUTSTANDING, metrics.SLOWDOWN, metrics.STATE, metrics.LAG)
        }
        pools = {reading: reading.family() for reading in metrics.POOL_READINGS}
        for room in self._pools:
            _read_engines(room, engines)
            name, pool = [room.name], room.pool
            for decision, count in room.granted.items():
                pools[metrics.LEASES].add_metric([*name, decision], count)
            pools[metrics.RELEASES].add_metric(name, room.released)
            pools[metrics.IMBALANCE].add_metric(name, _imbalance(room))
            pools[metrics.QUEUED].add_metric(name, pool.waiting.count)
            pools[metrics.CLIENTS].add_metric(name, pool.tables.leases.holder_count)
            pools[metrics.SESSIONS].add_metric(name, len(pool.tables.sessions))
            pools[metrics.LOCAL].add_metric(name, pool.tables.leases.local_count)
            pools[metrics.SETTLING].add_metric(name, len(pool.tables.targets.closed))
        yield from (*engines.values(), *pools.values())


def _read_engines(room: PoolRoom, families: dict[Reading, Family]) -> None:
    views = room.pool.engines()
    newest = max((view.spec.version for view in views), default=-1)
    for view in views:
        labels = [room.name, view.spec.name]
        version = view.spec.version  # NO_VERSION is below 0
        families[metrics.SLOWDOWN].add_metric(labels, view.slowdown)
        families[metrics.STATE].add_metric([*labels, view.state.value], 1)
        families[metrics.LAG].add_metric(labels, -1 if version < 0 else newest - version)
        for rank, count in enumerate(view.lease_counts):
            families[metrics.OUTSTANDING].add_metric([*labels, str(rank)], count)


def _imbalance(room: PoolRoom) -> float:
    views = [view for view in room.pool.engines() if view.state == "active"]
    counts = [count for view in views for count in view.lease_counts]
    mean = sum(counts) / len(counts) if counts else 0.0
    return max(counts) / mean if mean else 1.0
