"""How evenly leases lie, in numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from sluice.balance.routing import EngineSpec, LeaseRequest, Needs, PoolConfig, RankReport


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_under_batch_load_ranks_differ_by_one_lease_at_most(make_pool, batch):
    pool = make_pool(engines=16, ranks=8)
    clients = [f"c{number}" for number in range(64)]
    for call in range(10_000 // batch):
        request = LeaseRequest(count=batch, groups=[(f"g{call}", batch)])
        pool.acquire(clients[call % 64], request, float(call))
        charges = pool.tables.targets.charges
        assert charges.max() - charges.min() <= 1
    assert charges.sum() == 10_000 // batch * batch


def test_on_an_idle_pool_no_rank_is_preferred(make_pool):
    pool = make_pool(engines=8, ranks=8)
    picks: Counter[int] = Counter()
    for call in range(10_000):
        grant = pool.acquire("c", LeaseRequest(count=1), float(call))
        picks[int(grant.targets[0])] += 1
        pool.release("c", np.array([grant.first_id]), float(call))
    assert len(picks) == 64
    assert max(picks.values()) <= 2 * 10_000 / 64


def test_with_releases_in_random_order_load_stays_level(make_pool):
    pool, rng = make_pool(engines=8, ranks=8), np.random.default_rng(0)
    held: list[tuple[str, int]] = []
    worst = 0
    for call in range(400):
        grant = pool.acquire(f"c{call % 64}", LeaseRequest(count=32), float(call))
        held += [(f"c{call % 64}", grant.first_id + i) for i in range(32)]
        if call >= 20:
            for _ in range(32):
                client, lease = held.pop(int(rng.integers(len(held))))
                pool.release(client, np.array([lease]), float(call))
            charges = pool.tables.targets.charges
            worst = max(worst, int(charges.max() - charges.min()))
    assert worst <= 6


def test_siblings_of_a_group_are_spread_also_across_calls(make_pool):
    pool = make_pool(engines=8, ranks=2)
    pool.acquire("c", LeaseRequest(count=3), 0.0)  # uneven to begin with
    targets = [
        int(pool.acquire("c", LeaseRequest(count=1, groups=[("g", 1)]), 0.0).targets[0])
        for _ in range(13)
    ]
    assert len(set(targets)) == 13


def test_version_bounds_choose_engines(make_pool):
    pool = make_pool(engines=4, ranks=2)
    for number, version in enumerate((1, 2, 2, 3)):
        pool.register(EngineSpec(name=f"e{number}", dp_size=2, version=version), 1.0)

    def engines_of(needs: Needs) -> set[str]:
        grant = pool.acquire("c", LeaseRequest(count=16, needs=needs), 1.0)
        located = [pool.located(target) for target in grant.targets.tolist()]
        return {found[0].spec.name for found in located if found is not None}

    assert engines_of(Needs()) == {"e0", "e1", "e2", "e3"}
    assert engines_of(Needs(minimum=2)) == {"e1", "e2", "e3"}
    assert engines_of(Needs(exact=2)) == {"e1", "e2"}


def test_speeds_count_whatever_an_empty_step_costs(make_pool):
    for base, each in [(0.02, 0.0002), (60.0, 1e-6), (1e-300, 60.0)]:
        pool = make_pool(3, max_running=100, step_base=base, step_per_request=each)
        for second in range(1, 30):
            pool.tables.targets.snapshot(float(second))
            for engine, latency in [("e0", 0.02), ("e1", 0.02), ("e2", 20.0)]:
                report = [RankReport(running_count=1)]
                pool.report_load(engine, report, float(second), seconds_per_token=latency)
        targets = [
            pool.acquire("c", LeaseRequest(count=1, sessions=[f"s{n}"]), 30.0).targets[0]
            for n in range(10)
        ]
        assert set(targets) == {0, 1}, (base, each)


@pytest.mark.parametrize(
    "setting",
    [{"step_base": 61.0}, {"step_per_request": 1e-7}, {"credit_factor": 1001.0}],
)
def test_settings_beyond_what_placing_reckons_with_are_refused(setting):
    with pytest.raises(ValidationError):
        PoolConfig(**setting)
