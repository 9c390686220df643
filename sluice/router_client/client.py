"""Leases of one pool, for one process.

Leases are asked for in batches, given back with the next call, and kept alive by one heartbeat
however many there are. Leases beyond the credits of the engines wait in the router. While the
router cannot be reached, targets are picked from the engines last heard of (power of two
choices); the router learns of those leases when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import grpc
from grpc_status import rpc_status

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2_grpc as pb_grpc
from sluice.router_client.known import KnownEngines, Place
from sluice.router_client.tickets import Returned, Ticket
from sluice.router_client.types import Lease, Wanted

logger = logging.getLogger(__name__)

POLL_SECONDS = 20.0  # one call that waits for a free rank
FLUSH_SECONDS = 0.01  # until leases given back are sent on their own
DOWN_SECONDS = 1.0  # leases picked locally before the router is tried again
RETRY_SECONDS = 0.5
ACQUIRE_SECONDS = 600.0
_CALL_SECONDS = 5.0
_WATCH_SECONDS = 3600.0  # one stream of engines; then another
_HEARTBEATS_PER_TTL = 3
_EARLY_LIMIT = 65_536


class LeaseClient:
    """Use as a context manager, or `start` and `close`. The caller closes the channel."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        pool: str = "",
        client_id: str = "",
        seed: int | None = None,
    ) -> None:
        self.client_id = client_id or str(uuid.uuid4())
        self._stub = pb_grpc.RouterServiceStub(channel)
        self._pool = pool
        self._known = KnownEngines(random.Random(seed))
        self._held: dict[int, Lease] = {}
        self._tickets: dict[int, Ticket] = {}
        self._early: OrderedDict[int, Place] = OrderedDict()  # of tickets still on their way
        self._returned = Returned()
        self._ttl = 30.0
        self._down_until = 0.0
        self._local_id = -(random.SystemRandom().getrandbits(38) << 24)
        self._flush: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._has_tickets = asyncio.Event()
        self._renew_now = asyncio.Event()
        self._unadopted = False  # the router does not know all leases held

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to keep leases alive and to watch engines."""
        self._tasks = [
            asyncio.create_task(self._renew_always(), name="renew leases"),
            asyncio.create_task(self._collect_always(), name="collect leases"),
            asyncio.create_task(self._watch_always(), name="watch engines"),
        ]

    async def close(self) -> None:
        """Give everything back and stop."""
        tasks = [*self._tasks, *([self._flush] if self._flush else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ticket in list(self._tickets.values()):
            ticket.future.cancel()
        for lease_id in (*self._held, *self._tickets):
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
        self._held.clear()
        self._tickets.clear()
        await self._send_returned()

    async def request(self, wanted: Wanted) -> list[asyncio.Future[Lease]]:
        """One future per lease, in order; each is done when its lease has a target.

        Cancelling a future gives its lease up.
        """
        loop = asyncio.get_running_loop()
        tickets = [
            Ticket(wanted if wanted.count == 1 else wanted.only(index), loop.create_future())
            for index in range(wanted.count)
        ]
        await self._submit(wanted, tickets)
        return [ticket.future for ticket in tickets]

    async def acquire(self, wanted: Wanted, timeout: float = ACQUIRE_SECONDS) -> list[Lease]:  # noqa: ASYNC109
        """All leases, once the last one has a target. Cancelling gives all of them up.

        Raises TimeoutError after `timeout` seconds.
        """
        futures: list[asyncio.Future[Lease]] = []
        try:
            async with asyncio.timeout(timeout):
                futures = await self.request(wanted)
                return list(await asyncio.gather(*futures))
        except (TimeoutError, asyncio.CancelledError):
            self.release([f.result() for f in futures if f.done() and not f.cancelled()])
            raise

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
        for index, lease in enumerate(leases):
            if self._held.pop(lease.lease_id, None) is not None:
                tokens = token_counts[index] if token_counts else -1
                self._give_back(lease.lease_id, outcome, tokens)

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Tell the router; where it is down the sessions idle out."""
        request = pb.EndSessionRequest(session_ids=session_ids, pool=self._pool)
        try:
            await self._stub.EndSession(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.warning("router: sessions not ended: %s", error.details())

    # Asking

    async def _submit(self, wanted: Wanted, tickets: list[Ticket]) -> None:
        """Ask the router until it takes the request; pick locally while it is down."""
        request_id = str(uuid.uuid4())
        while not all(ticket.future.done() for ticket in tickets):
            if not self._is_down:
                response = await self._call(self._request(wanted, request_id), _CALL_SECONDS)
                if response is not None:
                    self._take(response, tickets)
                    return
            if not (self._is_down and self._pick(tickets)):
                await asyncio.sleep(RETRY_SECONDS)

    @property
    def _is_down(self) -> bool:
        return time.monotonic() < self._down_until

    async def _call(
        self, request: pb.AcquireLeasesRequest, seconds: float
    ) -> pb.AcquireLeasesResponse | None:
        """The answer; None when the same call may succeed later. Raises AioRpcError."""
        try:
            response: pb.AcquireLeasesResponse = await self._stub.AcquireLeases(
                request, timeout=seconds
            )
            return response
        except grpc.aio.AioRpcError as error:
            self._returned.take_back(request)
            if not self._is_passing(error):
                raise
            return None

    def _is_passing(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether trying again helps; notes a router that cannot be reached."""
        answered = rpc_status.from_call(error) is not None  # type: ignore[arg-type]
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return answered
        if error.code() not in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,  # a router that stops ends its calls so
        ):
            return False
        if not answered:
            if not self._is_down:
                logger.warning("router: %s; picking engines locally", error.details())
            self._down_until = time.monotonic() + DOWN_SECONDS
        return True

    def _request(self, wanted: Wanted, request_id: str = "") -> pb.AcquireLeasesRequest:
        returned, self._returned = self._returned, Returned()
        request = pb.AcquireLeasesRequest(
            client_id=self.client_id,
            pool=self._pool,
            count=wanted.count,
            min_version=wanted.min_version,
            exact_version=wanted.exact_version,
            released=returned.to_proto(),
            group_ids=[name for name, _ in wanted.groups],
            group_sizes=[size for _, size in wanted.groups],
            expected_token_counts=wanted.expected_tokens,
            session_ids=wanted.sessions,
            cached_token_counts=wanted.cached_tokens,
            excluded_engine_ids=wanted.excluded_engines,
            known_epoch=self._known.epoch,
            request_id=request_id,
        )
        request.max_wait.SetInParent()  # 0 s: what has to wait gets a ticket, at once
        return request

    def _take(self, response: pb.AcquireLeasesResponse, tickets: Sequence[Ticket] = ()) -> None:
        """Resolve what got a target, keep the rest as tickets."""
        if (ttl := response.ttl.ToNanoseconds() / 1e9) != self._ttl:
            self._ttl = ttl
            self._renew_now.set()  # the next heartbeat may be due sooner
        if response.engines or not self._known.knows(response.epoch):
            self._known.learn(response.epoch, response.engines)
        for offset, target in enumerate(response.target_indices):
            lease_id, ticket = response.first_lease_id + offset, tickets[offset]
            place = self._known.place(response.epoch, target) if target >= 0 else None
            place = place or self._early.pop(lease_id, None)
            if place is None:
                self._keep(lease_id, ticket)
            else:
                self._resolve(lease_id, ticket, place)
        self._bind(response.epoch, response.bound_lease_ids, response.bound_target_indices)

    def _bind(self, epoch: int, lease_ids: Sequence[int], targets: Sequence[int]) -> None:
        for lease_id, target in zip(lease_ids, targets, strict=True):
            place, ticket = self._known.place(epoch, target), self._tickets.pop(lease_id, None)
            if place is None:
                continue  # of an epoch long gone; the next renewal tells again
            if ticket is not None:
                self._resolve(lease_id, ticket, place)
            else:
                self._early[lease_id] = place
                while len(self._early) > _EARLY_LIMIT:
                    self._early.popitem(last=False)

    def _keep(self, lease_id: int, ticket: Ticket) -> None:
        if ticket.future.done():
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
            return
        self._tickets[lease_id] = ticket
        self._has_tickets.set()
        ticket.future.add_done_callback(lambda _: self._given_up(lease_id))

    def _given_up(self, lease_id: int) -> None:
        if self._tickets.pop(lease_id, None) is not None:
            self._give_back(lease_id, pb.OUTCOME_ABORTED)

    def _resolve(self, lease_id: int, ticket: Ticket, place: Place) -> None:
        if ticket.future.done():  # given up in the meantime
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
            return
        lease = Lease(lease_id, *place)
        self._held[lease_id] = lease
        ticket.future.set_result(lease)

    def _pick(self, tickets: Sequence[Ticket]) -> bool:
        """Bind tickets without the router; False when no known engine will do."""
        open_ = [ticket for ticket in tickets if not ticket.future.done()]
        held = ((lease.engine_id, lease.dp_rank) for lease in self._held.values())
        places = self._known.pick(held, [ticket.wanted.needs for ticket in open_])
        for ticket, place in zip(open_, places or (), strict=False):
            self._local_id -= 1
            self._resolve(self._local_id, ticket, place)
        return places is not None

    # Giving back

    def _give_back(self, lease_id: int, outcome: pb.Outcome, tokens: int = -1) -> None:
        self._returned.add(lease_id, outcome, tokens)
        if self._flush is None:
            self._flush = asyncio.create_task(self._flush_soon(), name="give back leases")

    async def _flush_soon(self) -> None:
        await asyncio.sleep(FLUSH_SECONDS)
        self._flush = None
        await self._send_returned()

    async def _send_returned(self) -> None:
        if not self._returned.ids:
            return
        try:
            if response := await self._call(self._request(Wanted(count=0)), _CALL_SECONDS):
                self._take(response)
        except grpc.aio.AioRpcError as error:
            logger.warning("router: leases not given back: %s", error.details())

    # Keeping

    async def _collect_always(self) -> None:
        """While leases wait, hold a call open that returns when one has a target."""
        while True:
            await self._has_tickets.wait()
            if not self._tickets:
                self._has_tickets.clear()
                continue
            request = self._request(Wanted(count=0))
            request.max_wait.FromNanoseconds(int(POLL_SECONDS * 1e9))
            try:
                response = await self._call(request, POLL_SECONDS + _CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                logger.warning("router: waiting leases not asked for: %s", error.details())
                response = None
            if response is not None:
                self._take(response)
                continue
            if self._is_down:
                self._pick_waiting()
            await asyncio.sleep(RETRY_SECONDS)

    def _pick_waiting(self) -> None:
        """The router is gone and with it its queue."""
        waiting = dict(self._tickets)
        if self._pick(list(waiting.values())):
            for lease_id in waiting:
                self._tickets.pop(lease_id, None)

    async def _renew_always(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl / _HEARTBEATS_PER_TTL):
                    await self._renew_now.wait()
            self._renew_now.clear()
            if not self._held and not self._tickets:
                continue
            try:
                await self._renew()
            except grpc.aio.AioRpcError as error:
                logger.warning("router: leases not renewed: %s", error.details())

    async def _renew(self) -> None:
        held, waiting = list(self._held.values()), list(self._tickets)
        engines: dict[str, int] = {}
        request = pb.RenewLeasesRequest(
            client_id=self.client_id,
            pool=self._pool,
            lease_ids=[*(lease.lease_id for lease in held), *waiting],
            dp_ranks=[*(lease.dp_rank for lease in held), *(-1 for _ in waiting)],
            engine_indices=[
                *(engines.setdefault(lease.engine_id, len(engines)) for lease in held),
                *(-1 for _ in waiting),
            ],
        )
        request.engine_ids.extend(engines)
        response = await self._stub.RenewLeases(request, timeout=_CALL_SECONDS)
        self._down_until = 0.0
        self._ttl = response.ttl.ToNanoseconds() / 1e9 or self._ttl
        if response.bound_lease_ids:
            self._known.learn(response.epoch, response.engines)
            self._bind(response.epoch, response.bound_lease_ids, response.bound_target_indices)
        void = set(response.void_lease_ids)
        self._unadopted = bool(void - set(waiting))  # their engine may be about to register
        await self._ask_again(void.intersection(waiting))

    async def _ask_again(self, void: Iterable[int]) -> None:
        """Waiting leases that a restarted router has forgotten."""
        for lease_id in void:
            ticket = self._tickets.pop(lease_id, None)
            if ticket is not None and not ticket.future.done():
                await self._submit(ticket.wanted, [ticket])

    async def _watch_always(self) -> None:
        """Follow the engines of the pool, for the time when the router is down."""
        request = pb.WatchEnginesRequest(pool=self._pool)
        while True:
            try:
                self._unadopted = True  # the router may be another one
                async for response in self._stub.WatchEngines(request, timeout=_WATCH_SECONDS):
                    self._known.learn(response.epoch, response.engines)
                    self._down_until = 0.0
                    if self._unadopted:
                        self._renew_now.set()
            except grpc.aio.AioRpcError as error:
                logger.debug("router: %s", error.details())
            await asyncio.sleep(DOWN_SECONDS)
