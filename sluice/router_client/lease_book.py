"""Leases on their way: those that wait for a target, and those to be given back."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.router_client.engine_view import KnownEngines, Place
from sluice.router_client.types import Lease, Wanted


@dataclass(eq=False)
class Ticket:
    """A lease without a target yet, and what to ask for again should the router forget it."""

    wanted: Wanted
    future: asyncio.Future[Lease]


@dataclass
class Returned:
    """Leases to give back with the next call."""

    ids: list[int] = field(default_factory=list)
    outcomes: list[pb.Outcome] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, lease_id: int, outcome: pb.Outcome, tokens: int) -> None:
        self.ids.append(lease_id)
        self.outcomes.append(outcome)
        self.tokens.append(tokens)

    def to_proto(self) -> pb.ReleasedLeases:
        """Columns that say nothing are left out."""
        said = any(tokens >= 0 for tokens in self.tokens)
        return pb.ReleasedLeases(
            lease_ids=self.ids,
            outcomes=() if self.outcomes.count(pb.OUTCOME_OK) == len(self.ids) else self.outcomes,
            token_counts=self.tokens if said else (),
        )

    def take_back(self, request: pb.AcquireLeasesRequest) -> None:
        """The call failed: what it gave back goes with the next one."""
        ids = request.released.lease_ids
        self.ids += ids
        self.outcomes += request.released.outcomes or [pb.OUTCOME_OK] * len(ids)
        self.tokens += request.released.token_counts or [-1] * len(ids)


def renewal(held: Iterable[Lease], waiting: Sequence[int]) -> pb.RenewLeasesRequest:
    """All that a client holds and waits for, in columns."""
    held = list(held)
    engines: dict[str, int] = {}
    request = pb.RenewLeasesRequest(
        lease_ids=[*(lease.lease_id for lease in held), *waiting],
        dp_ranks=[*(lease.dp_rank for lease in held), *(-1 for _ in waiting)],
        engine_indices=[
            *(engines.setdefault(lease.engine_id, len(engines)) for lease in held),
            *(-1 for _ in waiting),
        ],
    )
    request.engine_ids.extend(engines)
    return request


_EARLY_LIMIT = 65_536


class LeaseBook:
    """Every lease is held, waits, or has been given to `give_back`."""

    def __init__(self, known: KnownEngines, give_back: Callable[[int, pb.Outcome], None]) -> None:
        self.held: dict[int, Lease] = {}
        self.waiting: dict[int, Ticket] = {}
        self.has_waiting = asyncio.Event()
        self._known, self._give_back = known, give_back
        self._early: OrderedDict[int, Place] = OrderedDict()  # of tickets still on their way
        self._local_id = -(random.SystemRandom().getrandbits(38) << 24)

    def take(self, response: pb.AcquireLeasesResponse, tickets: Sequence[Ticket]) -> None:
        """Resolve what got a target, keep the rest; tickets are of the new leases, in order."""
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
        self.bind(response.epoch, response.bound_lease_ids, response.bound_target_indices)

    def bind(self, epoch: int, lease_ids: Sequence[int], targets: Sequence[int]) -> None:
        """Resolve leases that had waited."""
        for lease_id, target in zip(lease_ids, targets, strict=True):
            place = self._known.place(epoch, target)
            if place is None:
                continue  # of an epoch long gone; the next renewal tells again
            ticket = self.waiting.pop(lease_id, None)
            if ticket is not None:
                self._resolve(lease_id, ticket, place)
            else:
                self._early[lease_id] = place
                while len(self._early) > _EARLY_LIMIT:
                    self._early.popitem(last=False)

    def pick(self, tickets: Sequence[Ticket]) -> bool:
        """Bind tickets without the router; False when no known engine will do."""
        open_ = [ticket for ticket in tickets if not ticket.future.done()]
        held = ((lease.engine_id, lease.dp_rank) for lease in self.held.values())
        places = self._known.pick(held, [ticket.wanted for ticket in open_])
        for ticket, place in zip(open_, places or (), strict=False):
            self._local_id -= 1
            self._resolve(self._local_id, ticket, place)
        return places is not None

    def pick_waiting(self) -> None:
        """Bind what waits without the router, and give its own leases back.

        It may only have been out of reach, and its queue go on.
        """
        self.pick(list(self.waiting.values()))

    def close(self) -> None:
        """Give everything back."""
        for ticket in self.waiting.values():
            ticket.future.cancel()
        for lease_id in (*self.held, *self.waiting):
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
        self.held.clear()
        self.waiting.clear()

    def _keep(self, lease_id: int, ticket: Ticket) -> None:
        if ticket.future.done():
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
            return
        self.waiting[lease_id] = ticket
        self.has_waiting.set()
        ticket.future.add_done_callback(lambda _: self._wait_no_more(lease_id))

    def _wait_no_more(self, lease_id: int) -> None:
        """Its ticket was given up or bound without the router, which still has it queued."""
        if self.waiting.pop(lease_id, None) is not None:
            self._give_back(lease_id, pb.OUTCOME_ABORTED)

    def _resolve(self, lease_id: int, ticket: Ticket, place: Place) -> None:
        if ticket.future.done():  # given up in the meantime
            self._give_back(lease_id, pb.OUTCOME_ABORTED)
            return
        lease = Lease(lease_id, *place)
        self.held[lease_id] = lease
        ticket.future.set_result(lease)
