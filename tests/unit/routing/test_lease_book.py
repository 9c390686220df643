"""The leases of a client, without a router."""

from __future__ import annotations

import asyncio
import random

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.router_client.lease_book import FleetView, Lease, LeaseBook, LeaseDemand, Ticket


async def test_waiting_leases_bound_without_the_router_are_given_back_to_it() -> None:
    """It may live on, where only a connection broke, and bind them."""
    returned: list[int] = []
    ledger = LeaseBook(FleetView(random.Random(1)), lambda lease_id, _: returned.append(lease_id))
    futures: list[asyncio.Future[Lease]] = [asyncio.Future() for _ in range(2)]
    engine = pb.Engine(
        engine_id="a", dp_size=1, state=pb.ENGINE_STATE_ACTIVE, weights={"version": 1}
    )
    response = pb.AcquireLeasesResponse(
        first_lease_id=7, target_indices=[-1, -1], epoch=1, engines=[engine]
    )
    ledger.take(response, [Ticket(LeaseDemand(count=1), future) for future in futures])
    assert set(ledger.waiting) == {7, 8}
    ledger.pick_waiting()
    await asyncio.sleep(0)  # in which futures that are done call who listens
    assert all(future.result().lease_id < 0 for future in futures)
    assert returned == [7, 8] and not ledger.waiting
    assert len(ledger.leases) == 2
