"""The leases of a client, without a router."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.router_client.lease_book import (
    FleetView,
    Lease,
    LeaseBook,
    LeaseDemand,
    Ticket,
    join,
)


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


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=4), max_size=12))
def test_targets_mean_what_they_did_in_their_own_epoch(
    layouts: list[list[tuple[int, int]]],
) -> None:
    """However engines come, go and grow between epochs, or change their weights only."""
    view = FleetView(random.Random(1))
    expected: dict[int, dict[int, tuple[str, str, int]]] = {}
    for epoch, layout in enumerate((each for each in layouts for _ in range(2)), 1):
        engines, first = [], 0
        for name, ranks in layout:
            engines.append(
                pb.Engine(
                    engine_id=f"e{name}",
                    address=f"host-{name}:{ranks}",
                    first_target_index=first,
                    dp_size=ranks,
                    weights={"version": epoch},
                    state=pb.ENGINE_STATE_ACTIVE,
                )
            )
            first += ranks
        view.learn(epoch, engines)
        expected[epoch] = {
            engine.first_target_index + rank: (engine.engine_id, engine.address, rank)
            for engine in engines
            for rank in range(engine.dp_size)
        }
    for epoch in list(expected)[-16:]:
        targets = range(max(expected[epoch], default=0) + 2)
        assert [view.places(epoch).get(target) for target in targets] == [
            expected[epoch].get(target) for target in targets
        ]


def test_single_demands_keep_what_is_of_their_lease():
    wanted = LeaseDemand(
        count=4,
        min_version=2,
        groups=[("a", 3), ("b", 1)],
        expected_tokens=[5.0, 5.0, 7.0, 5.0],
        cached_tokens=[0, 0, 0, 3],
    )
    singles = wanted.singles()
    assert join(singles) == wanted
    assert [single.count for single in singles] == [1] * 4
    assert singles[0] is singles[1]  # most siblings are alike
    assert LeaseDemand(count=2).singles() == [LeaseDemand(count=1)] * 2
