"""Leases on their way: those that wait for a target, and those to be given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sluice.api.router.v1 import router_service_pb2 as pb
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
