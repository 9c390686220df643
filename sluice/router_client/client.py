"""Leases from the router: asks, keeps, gives back, and picks engines while it cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.balance.routing.types import HEARTBEATS_PER_TTL, Refusal
from sluice.router_client.lease_book import (
    FleetView,
    Lease,
    LeaseBook,
    LeaseDemand,
    PendingReleases,
    Ticket,
    join,
    renewal,
)
from sluice.router_client.lease_stream import Asked, LeaseStream, StreamRefusedError
from sluice.runtime.deadlines import Deadlines
from sluice.runtime.errors import RemoteError, typed_errors
from sluice.runtime.idempotency import cancel_all, has_failed
from sluice.runtime.recovery import Backoff, is_passing
from sluice.runtime.wire import duration_of, seconds_of

logger = logging.getLogger(__name__)

DOWN_SECONDS = 1.0  # leases picked locally before the router is tried again
RETRY_SECONDS = 0.5
_SCATTER = 0.25  # share of a pause by which it may be longer
POLL_SECONDS = 20.0  # one call that waits for a free rank
FLUSH_SECONDS = 0.01  # until leases given back are sent on their own
ACQUIRE_SECONDS = 600.0
_CALL_SECONDS = 5.0
_WATCH_SECONDS = 3600.0  # one stream of engines; then another
_RENEWALS_TO_DROP = 3  # two that lack a lease end it; the first may be too soon after another
_ASKED_AT_ONCE = 4096  # waiting leases, of a router that has forgotten them


class RouterLink:
    """Tells a router that refuses, and says when to return, from one that is gone."""

    def __init__(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        self.stub = pb_grpc.RouterServiceStub(channel)
        self._stream = LeaseStream(self.stub)
        self._has_stream = True
        self._rng = rng
        self._down_until = 0.0
        self._pause = 0.0  # what the last refusal asked for
        self.wants_renewal = False  # before it gives leases: it is not the router known so far
        self.refuses = False  # it was reached, and cannot give what the last call asked for

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self._down_until

    def answered(self) -> None:
        """Note that the router is there."""
        self._down_until = 0.0

    async def pause(self) -> None:
        """Waits until a call that failed is worth another try.

        The pauses do not grow: many calls share the link, and fail together.
        """
        seconds = max(self._pause, RETRY_SECONDS)
        await asyncio.sleep(Backoff(seconds, seconds, _SCATTER).seconds(1, self._rng))

    def ask(
        self, request: pb.AcquireLeasesRequest, seconds: float, hear: Callable[[Asked], None]
    ) -> Asked | None:
        """Ask, and return the answer to come, for `acquire` should it be an error.

        None while no router is reached, and of one that has no stream. `hear` is called with it.
        """
        if self.is_down or not self._has_stream:
            return None
        return self._stream.ask(request, seconds, hear)

    def wake(self) -> None:
        """Tell that something will be asked in the next turn of the loop."""
        self._stream.wake()

    async def acquire(
        self, request: pb.AcquireLeasesRequest, seconds: float, asked: Asked | None = None
    ) -> pb.AcquireLeasesResponse | None:
        """Returns the answer; None when the same call may succeed later. Raises RemoteError.

        asked: what `ask` has returned for it.
        """
        self.refuses = False
        try:
            answer = await self._call(request, seconds, asked)
        except RemoteError as error:
            if not self._may_pass(error):
                raise
            return None
        self.answered()
        return answer

    async def close(self) -> None:
        """End the stream of requests; what has no answer fails."""
        await self._stream.close()

    async def _call(
        self, request: pb.AcquireLeasesRequest, seconds: float, asked: Asked | None
    ) -> pb.AcquireLeasesResponse:
        """Ask on the stream; where that is refused it is said of each request on its own."""
        if asked is None and self._has_stream:
            asked = self._stream.ask(request, seconds)
        if asked is not None:
            try:
                return await asked
            except StreamRefusedError as refused:
                self._has_stream = refused.error.code is not grpc.StatusCode.UNIMPLEMENTED
        with typed_errors():
            answer: pb.AcquireLeasesResponse
            answer = await self.stub.AcquireLeases(request, timeout=seconds)
            return answer

    def _may_pass(self, error: RemoteError) -> bool:
        """Whether trying again helps; notes what a router asks for, or that none is reached."""
        self._pause = error.retry_seconds
        self.wants_renewal = error.reason == Refusal.RENEW_FIRST
        self.refuses = bool(error.reason) and not self.wants_renewal
        if not is_passing(error):
            return error.retry_seconds > 0  # a refusal of now
        if not error.reason:  # grpc's own: no router answered
            if not self.is_down:
                logger.warning("router: %s; picking engines locally", error.message)
            self._down_until = time.monotonic() + DOWN_SECONDS
        return True


@dataclass(eq=False, slots=True)
class _Ask:
    """What one caller asks for.

    taken: of one who waits for that, done once a router has the request or engines are picked.
    """

    wanted: LeaseDemand
    tickets: list[Ticket]
    taken: asyncio.Future[None] | None = None

    @property
    def futures(self) -> list[asyncio.Future[Any]]:
        """What the caller waits for, one after the other."""
        taken = () if self.taken is None else (self.taken,)
        return [*taken, *(ticket.future for ticket in self.tickets)]

    def take(self) -> None:
        if self.taken is not None and not self.taken.done():
            self.taken.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Tell the caller, whichever of the futures it waits for."""
        for future in self.futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # that it may be looked at in one of them alone

    def give_up(self) -> None:
        for future in self.futures:
            future.cancel()


class _Shown:
    """What goes wrong in the block is a bug, which is the callers' to show: all of them get it."""

    def __init__(self, asks: Iterable[_Ask]) -> None:
        self._asks = asks

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if error is not None:
            for ask in self._asks:
                ask.fail(error)
        return isinstance(error, Exception)


class LeaseClient:
    """Leases from a router, as a context manager or by `start` and `close`.

    The caller closes the channel.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        pool: str = "",
        client_id: str = "",
        seed: int | None = None,
    ) -> None:
        self.client_id = client_id or str(uuid.uuid4())
        self._request_prefix, self._request_numbers = uuid.uuid4().hex, itertools.count()
        rng = random.Random(seed)
        self._link = RouterLink(channel, rng)
        self._pool = pool
        self._fleet = FleetView(rng)
        self._book = LeaseBook(
            self._fleet, lambda lease_id, outcome: self._give_back({lease_id: -1}, outcome)
        )
        self._releases = PendingReleases()
        self._ttl, self._ttl_epoch = 30.0, 0  # and the epoch of the router whose it is
        self._tasks: set[asyncio.Task[None]] = set()
        self._asks: dict[object, list[_Ask]] = {}  # of this turn of the loop, by kind
        self._loop: asyncio.AbstractEventLoop
        self._submits: dict[asyncio.Future[Any], list[_Ask]] = {}
        self._deadlines = Deadlines[_Ask](lambda ask: ask.fail(TimeoutError()))
        self._has_releases = asyncio.Event()
        self._renew_now = asyncio.Event()
        self._renewing = asyncio.Lock()
        self._unadopted = False  # the router may not know all leases held
        self._owed = 0  # renewals that tell the router of leases it gave and nobody heard of

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to keep leases alive and to watch engines."""
        self._loop = asyncio.get_running_loop()  # which is a system call
        self._run(self._renew_always(), "renew leases")
        self._run(self._collect_always(), "collect leases")
        self._run(self._release_always(), "give back leases")
        self._run(self._watch_always(), "watch engines")

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run until it ends or the client is closed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give everything back and stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for ask in itertools.chain(*self._asks.values(), *self._submits.values()):
            ask.give_up()
        if self._submits:  # what a router gives in this moment goes back, too
            await asyncio.wait(self._submits, timeout=_CALL_SECONDS)
            await self._link.close()  # what is not answered by now goes back, too
            await cancel_all(list(self._submits))
        self._deadlines.close()
        self._book.close()
        await self._send_releases()
        await self._link.close()

    async def request(self, wanted: LeaseDemand) -> list[asyncio.Future[Lease]]:
        """Returns one future per lease, in order; each is done when its lease has a target.

        Cancelling a future gives its lease up.
        """
        ask = self._ask_for(wanted)
        ask.taken = self._loop.create_future()
        futures = [ticket.future for ticket in ask.tickets]
        try:
            await ask.taken
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            self.release([f.result() for f in futures if not f.cancelled() and not f.exception()])
            raise
        return futures

    async def acquire(self, wanted: LeaseDemand, timeout: float = ACQUIRE_SECONDS) -> list[Lease]:  # noqa: ASYNC109
        """Returns all leases once the last one has a target. Cancelling gives all of them up.

        Raises TimeoutError after `timeout` seconds.
        """
        ask = self._ask_for(wanted)
        self._deadlines.add(ask, timeout)
        try:
            return [await ticket.future for ticket in ask.tickets]
        except (TimeoutError, asyncio.CancelledError):
            futures = [ticket.future for ticket in ask.tickets]
            for future in futures:
                future.cancel()
            self.release([f.result() for f in futures if not f.cancelled() and not f.exception()])
            raise
        finally:
            self._deadlines.remove(ask)

    def release(
        self,
        leases: Sequence[Lease],
        outcome: pb.Outcome = pb.OUTCOME_OK,
        token_counts: Sequence[int] = (),
    ) -> None:
        """Give leases back, telling how their requests ended; does not wait.

        token_counts: sampled tokens of each, from which siblings' lengths are expected. A lease
        given back twice is ignored.
        """
        if outcome == pb.OUTCOME_CONNECT_ERROR:
            for lease in leases:
                self._fleet.shun(lease.engine_id)
        held, counts = self._book.leases, itertools.chain(token_counts, itertools.repeat(-1))
        given = {
            lease.lease_id: tokens
            for lease, tokens in zip(leases, counts, strict=False)
            if held.pop(lease.lease_id, None) is not None
        }
        if given:
            self._give_back(given, outcome)

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """End sessions on the router; where it is down they idle out."""
        request = pb.EndSessionRequest(session_ids=session_ids, pool=self._pool)
        try:
            with typed_errors():
                await self._link.stub.EndSession(request, timeout=_CALL_SECONDS)
        except RemoteError as error:
            logger.warning("router: sessions not ended: %s", error)

    # Asking

    def _ask_for(self, wanted: LeaseDemand) -> _Ask:
        """Ask, with all who ask for leases of the same kind in this turn of the loop."""
        future = self._loop.create_future
        ask = _Ask(wanted, [Ticket(single, future()) for single in wanted.singles()])
        kind = wanted.kind
        same = self._asks.get(kind)
        if same is None:
            same = self._asks[kind] = []
            self._loop.call_soon(self._submit_kind, kind)
            self._link.wake()  # after that, in the same turn
        same.append(ask)
        return ask

    def _submit_kind(self, kind: object) -> None:
        """Called in the next turn of the loop, when all who ask together have joined."""
        same = self._asks.pop(kind)
        start = count = 0
        for index, ask in enumerate(same):
            if index > start and count + ask.wanted.count > _ASKED_AT_ONCE:
                self._submit_all(same[start:index])
                start, count = index, 0
            count += ask.wanted.count
        self._submit_all(same[start:])

    def _start(self, work: Coroutine[Any, Any, None], asks: list[_Ask]) -> None:
        """Run what asks a router, to its end though the callers leave: they give back then."""
        task = asyncio.create_task(work, name="ask for leases")
        self._submits[task] = asks
        task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[None]) -> None:
        asks = self._submits.pop(task)
        for ask in asks:
            if task.cancelled():
                ask.give_up()
            elif error := task.exception():  # a bug, which is the callers' to show
                ask.fail(error)

    def _submit_all(self, asks: list[_Ask]) -> None:
        """Ask for all at once; a task is made only for what is not answered at the first try."""
        tickets = [ticket for ask in asks for ticket in ask.tickets]
        if all(ticket.future.done() for ticket in tickets):
            return  # the callers have left
        # The same each time: it counts once.
        request_id = f"{self._request_prefix}-{next(self._request_numbers)}"
        with _Shown(asks):
            request = self._request(join([ask.wanted for ask in asks]), request_id)
            hear = partial(self._hear, asks, tickets, request)
            asked = self._link.ask(request, _CALL_SECONDS, hear)
            if asked is None:
                self._start(self._insist(asks, tickets, request), asks)
            else:
                self._submits[asked] = asks

    def _hear(
        self,
        asks: list[_Ask],
        tickets: Sequence[Ticket],
        request: pb.AcquireLeasesRequest,
        asked: Asked,
    ) -> None:
        """Take the answer to a request, when it is first told of it."""
        if self._submits.pop(asked, None) is None:
            return
        if not has_failed(asked):
            with _Shown(asks):
                self._link.answered()
                self._take(asked.result(), tickets)
                for ask in asks:
                    ask.take()
            return
        self._owed = _RENEWALS_TO_DROP
        if all(ticket.future.done() for ticket in tickets):
            self._put_back(request)
        else:
            self._start(self._insist(asks, tickets, request, asked), asks)

    async def _insist(
        self,
        asks: list[_Ask],
        tickets: Sequence[Ticket],
        request: pb.AcquireLeasesRequest,
        asked: Asked | None = None,
    ) -> None:
        """Ask until a router takes the request; where it is refused, for each caller alone.

        For one of them may be what is wrong, or there may be room for some.
        """
        try:
            is_taken = await self._submit(request, tickets, asked, is_joined=len(asks) > 1)
        except RemoteError as error:
            if len(asks) == 1:
                asks[0].fail(error)
                return
            is_taken = False
        for ask in asks:
            if is_taken:
                ask.take()
            else:
                self._submit_all([ask])

    async def _submit(
        self,
        request: pb.AcquireLeasesRequest,
        tickets: Sequence[Ticket],
        asked: Asked | None = None,
        *,
        is_joined: bool = False,
    ) -> bool:
        """Ask the router until it takes the request; pick locally while it is down.

        asked: where that has begun. is_joined: return False where it has refused it.
        """
        try:
            while not all(ticket.future.done() for ticket in tickets):
                if asked is not None or not self._link.is_down:
                    if await self._send(request, tickets, asked):
                        return True
                    asked = None
                    if is_joined and self._link.refuses:
                        return False
                if not (self._link.is_down and self._book.pick(tickets)):
                    await self._link.pause()
            return True
        finally:
            self._put_back(request)

    async def _send(
        self, request: pb.AcquireLeasesRequest, tickets: Sequence[Ticket], asked: Asked | None
    ) -> bool:
        """Send a request; whether the router took it."""
        response = None
        try:
            response = await self._link.acquire(request, _CALL_SECONDS, asked)
            if response is None and self._link.wants_renewal and await self._renew_first():
                response = await self._link.acquire(request, _CALL_SECONDS)
        finally:
            if response is None:  # what it gave would be kept from others until two renewals
                self._owed = _RENEWALS_TO_DROP  # have not named it
        if response is None:
            return False
        request.released.Clear()  # they have arrived
        self._take(response, tickets)
        return True

    def _request(self, wanted: LeaseDemand, request_id: str = "") -> pb.AcquireLeasesRequest:
        request = wanted.to_proto()
        request.client_id, request.request_id = self.client_id, request_id
        if self._pool:
            request.pool = self._pool
        request.known_epoch = self._fleet.epoch
        self._releases.move_to(request)
        request.max_wait.SetInParent()  # 0 s: what has to wait gets a ticket, at once
        return request

    def _take(self, response: pb.AcquireLeasesResponse, tickets: Sequence[Ticket] = ()) -> None:
        """Resolve what got a target, keep the rest as tickets."""
        if response.epoch != self._ttl_epoch:  # no two routers share one
            self._ttl_epoch = response.epoch
            if (ttl := seconds_of(response.ttl)) != self._ttl:
                self._ttl = ttl
                self._renew_now.set()  # the next heartbeat may be due sooner
        self._book.take(response, tickets)

    # Giving back

    def _give_back(self, tokens: Mapping[int, int], outcome: pb.Outcome) -> None:
        """tokens: as `PendingReleases.add_all` has them."""
        self._releases.add_all(tokens, outcome)
        self._has_releases.set()

    def _put_back(self, request: pb.AcquireLeasesRequest) -> None:
        """Keep what a failed call was to give back for the next one."""
        if request.released.lease_ids:
            self._releases.take_back(request)
            self._has_releases.set()

    async def _release_always(self) -> None:
        """Send what no other call takes along."""
        while True:
            await self._has_releases.wait()
            self._has_releases.clear()
            await asyncio.sleep(FLUSH_SECONDS)
            if not await self._send_releases():  # it is set again
                await self._link.pause()

    async def _send_releases(self) -> bool:
        """Give leases back; False where they still have to be."""
        return not self._releases.ids or await self._ask(_CALL_SECONDS)

    async def _ask(self, seconds: float, wait: float = 0.0) -> bool:
        """Give back what there is and take the news of waiting leases; whether a router answered.

        It holds the call for `wait` seconds, as long as it has no news.
        """
        request, response = self._request(LeaseDemand(count=0)), None
        request.max_wait.CopyFrom(duration_of(wait))
        try:
            response = await self._link.acquire(request, seconds)
        except RemoteError as error:
            logger.warning("router: leases neither given back nor asked for: %s", error)
        finally:
            if response is None:
                self._put_back(request)
        if response is not None:
            self._take(response)
        return response is not None

    # Keeping

    async def _collect_always(self) -> None:
        """While leases wait, hold a call open that returns when one has a target."""
        while True:
            await self._book.has_waiting.wait()
            if not self._book.waiting:
                self._book.has_waiting.clear()
                continue
            if await self._ask(POLL_SECONDS + _CALL_SECONDS, POLL_SECONDS):
                continue
            if self._link.is_down:
                self._book.pick_waiting()
            await self._link.pause()

    async def _renew_always(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl / HEARTBEATS_PER_TTL):
                    await self._renew_now.wait()
            self._renew_now.clear()
            if not (self._book.leases or self._book.waiting or self._owed or self._unadopted):
                continue
            if await self._renew():
                self._owed = max(self._owed - 1, 0)

    async def _renew_first(self) -> bool:
        """Tell a router that is not the one known so far what is held; whether it has heard."""
        async with self._renewing:  # one call for all who were refused
            return not self._link.wants_renewal or await self._renew()

    async def _renew(self) -> bool:
        """Tell the router what is held and what waits; whether it has heard."""
        waiting = list(self._book.waiting)
        request = renewal(self._book.leases.values(), waiting)
        request.client_id, request.pool = self.client_id, self._pool
        request.known_epoch = self._fleet.epoch
        try:
            with typed_errors():
                response = await self._link.stub.RenewLeases(request, timeout=_CALL_SECONDS)
        except RemoteError as error:
            logger.warning("router: leases not renewed: %s", error)
            return False
        self._link.answered()
        self._link.wants_renewal = False
        self._ttl = seconds_of(response.ttl) or self._ttl
        if response.bound_lease_ids:
            self._fleet.learn(response.epoch, response.engines)
            self._book.bind(response.epoch, response.bound_lease_ids, response.bound_target_indices)
        void = set(response.void_lease_ids)
        self._unadopted = bool(void - set(waiting))  # their engine may be about to register
        self._ask_again(void.intersection(waiting))
        return True

    def _ask_again(self, void: Iterable[int]) -> None:
        """Ask again for waiting leases that a restarted router has forgotten."""
        kinds: dict[object, list[tuple[int, Ticket]]] = {}
        for lease_id in sorted(void):
            ticket = self._book.waiting.pop(lease_id, None)
            if ticket is not None and not ticket.future.done():
                kinds.setdefault(ticket.wanted.kind, []).append((lease_id, ticket))
        for tickets in kinds.values():
            for start in range(0, len(tickets), _ASKED_AT_ONCE):
                some = dict(tickets[start : start + _ASKED_AT_ONCE])
                wanted = join([ticket.wanted for ticket in some.values()])
                ask = _Ask(wanted, list(some.values()))
                self._start(self._submit_again(ask, list(some)), [ask])

    async def _submit_again(self, ask: _Ask, lease_ids: Sequence[int]) -> None:
        try:
            request_id = f"{self._request_prefix}-{next(self._request_numbers)}"
            await self._submit(self._request(ask.wanted, request_id), ask.tickets)
        except RemoteError as error:
            logger.warning("router: waiting leases not asked for again: %s", error)
            for lease_id, ticket in zip(lease_ids, ask.tickets, strict=True):
                if not ticket.future.done():  # the next renewal hears again that it is void
                    self._book.waiting[lease_id] = ticket

    async def _watch_always(self) -> None:
        """Follow the engines of the pool, for the time when the router is down."""
        while True:
            try:
                self._unadopted = True  # the router may be another one
                request = pb.WatchEnginesRequest(
                    pool=self._pool, client_id=self.client_id, known_epoch=self._fleet.epoch
                )
                with typed_errors():
                    watch = self._link.stub.WatchEngines(request, timeout=_WATCH_SECONDS)
                    async for response in watch:
                        self._fleet.learn(response.epoch, response.engines, is_now=True)
                        self._link.answered()
                        if self._unadopted:
                            self._renew_now.set()
            except RemoteError as error:
                logger.debug("router: %s", error)
            await asyncio.sleep(DOWN_SECONDS)
