"""Breakers, speeds, reported loads, and what a client does alone."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from sluice.balance.routing import (
    BreakerConfig,
    EngineState,
    LeaseRequest,
    Needs,
    Outcome,
    RankReport,
)
from sluice.balance.routing.breaker import Breaker, BreakerState
from sluice.balance.routing.fallback import KnownEngine, pick_locally
from sluice.balance.routing.speed import UNIT, SpeedTable
from sluice.balance.routing.types import RefusedError

FAILURES = [Outcome.CONNECT_ERROR, Outcome.SERVER_ERROR, Outcome.TIMEOUT]
HARMLESS = [Outcome.UNKNOWN, Outcome.CLIENT_ERROR, Outcome.ABORTED, Outcome.OK]


@pytest.mark.parametrize("outcome", FAILURES)
def test_failures_of_an_engine_open_its_breaker(outcome):
    breaker = Breaker(BreakerConfig(failures=3, window_seconds=10))
    assert [breaker.record(outcome, now) for now in (0.0, 1.0, 2.0)] == [False, False, True]
    assert breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("outcome", HARMLESS)
def test_what_a_caller_did_wrong_never_does(outcome):
    breaker = Breaker(BreakerConfig(failures=1))
    for step in range(1000):
        breaker.record(outcome, step / 100)
    assert breaker.state is BreakerState.CLOSED


def test_failures_far_apart_or_among_many_successes_do_not():
    rare = Breaker(BreakerConfig(failures=3, window_seconds=10))
    for step in range(20):
        rare.record(Outcome.TIMEOUT, step * 6.0)
    assert rare.state is BreakerState.CLOSED
    busy = Breaker(BreakerConfig(failures=3, window_seconds=10))
    for step in range(30):
        busy.record(Outcome.TIMEOUT if step % 5 == 0 else Outcome.OK, step / 10)
    assert busy.state is BreakerState.CLOSED


def test_a_trial_decides_after_a_while_or_a_new_registration():
    breaker = Breaker(BreakerConfig(failures=1, open_seconds=30))
    breaker.record(Outcome.TIMEOUT, 0.0)
    assert not breaker.record(Outcome.OK, 1.0), "sent before it opened"
    assert not breaker.probe(29.0) and breaker.probe(30.0)
    assert breaker.record(Outcome.TIMEOUT, 31.0) and breaker.state is BreakerState.OPEN
    breaker.registered_again()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.record(Outcome.CLIENT_ERROR, 32.0), "it answered"
    assert breaker.state is BreakerState.CLOSED


def test_a_half_open_engine_gets_one_lease_at_a_time(make_pool):
    pool = make_pool(engines=2, ranks=2, breaker=BreakerConfig(failures=1, open_seconds=5))
    grant = pool.acquire("c", LeaseRequest(count=4), 0.0)
    bad = int(np.flatnonzero(grant.targets == 0)[0])
    pool.release("c", np.array([grant.first_id + bad]), 0.0, outcomes=np.array([Outcome.TIMEOUT]))
    assert pool.engines()[0].state is EngineState.BROKEN
    pool.expire(6.0)
    for _ in range(2):
        trial = pool.acquire("c", LeaseRequest(count=30), 6.0)
        on_trial = np.flatnonzero(trial.targets < 2)
        assert len(on_trial) == 1
        nothing_more = pool.acquire("c", LeaseRequest(count=30), 6.0)
        assert (nothing_more.targets >= 2).all()
        pool.release("c", trial.first_id + on_trial, 6.0)  # its outcome is not known
    trial = pool.acquire("c", LeaseRequest(count=30), 6.0)
    on_trial = trial.first_id + np.flatnonzero(trial.targets < 2)
    pool.release("c", on_trial, 6.0, outcomes=np.array([Outcome.OK]))
    after = pool.acquire("c", LeaseRequest(count=30), 6.0)
    assert (after.targets < 2).sum() > 1


def test_slowness_is_seen_through_noise_and_lag_and_not_where_there_is_none():
    rng, table = np.random.default_rng(0), SpeedTable(0.02, 0.0002)
    for _ in range(8):
        table.add_engine()
    worst = 0
    for second in range(120):
        for engine in range(8):
            running = int(rng.integers(1, 64))  # unequal load must not look like slowness
            factor = 1 / 0.6 if engine == 5 and second >= 60 else 1.0
            noise = np.exp(0.1 * rng.standard_normal())
            table.report(engine, (0.02 + 0.0002 * running) * factor * noise, running, second)
        worst = max(worst, int(table.slowdown[np.arange(8) != 5].max()))
        if second == 59:
            assert (table.slowdown == UNIT).all()
    assert worst <= 1.2 * UNIT
    assert 1.4 * UNIT <= table.slowdown[5] <= 1.95 * UNIT
    table.forget(5)
    assert table.slowdown[5] == UNIT


@pytest.mark.parametrize("latency", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_latency_is_ignored(latency):
    table = SpeedTable(0.02, 0.0002)
    table.add_engine()
    table.report(0, latency, 1, 0.0)
    assert table.slowdown.tolist() == [UNIT]


def test_reports_never_take_back_younger_charges(make_pool):
    pool = make_pool(engines=2, ranks=1)
    pool.expire(0.0)
    pool.expire(10.0)
    pool.acquire("c", LeaseRequest(count=40), 20.0)
    for second in range(200):  # the engines say they are idle, as they were 15 s ago
        pool.report_load("e0", [RankReport(running_count=0)], 20.0 + second / 100, age=15.0)
    assert pool.tables.targets.load().tolist() == [20, 20]


def test_reports_show_work_of_others_slowly_and_charges_that_do_nothing(make_pool):
    pool = make_pool(engines=2, ranks=1, engine_ttl=1000, client_ttl=1000)
    pool.acquire("c", LeaseRequest(count=20), 0.0)
    loads = []
    for second in range(1, 60):
        pool.expire(float(second))
        pool.report_load("e0", [RankReport(running_count=110)], second + 0.1)
        pool.report_load("e1", [RankReport(running_count=0)], second + 0.1)
        loads.append(pool.tables.targets.load().tolist())
    assert loads[0][0] < 35, "slowly"
    assert 100 <= loads[-1][0] <= 110 and loads[-1][1] <= 1
    grant = pool.acquire("c", LeaseRequest(count=50), 60.0)
    assert (grant.targets == 1).all()
    assert pool.tables.targets.load()[1] >= 50, "younger charges count in full"


def test_a_refusal_charges_nothing(make_pool):
    pool = make_pool(max_running=2, max_leases_per_client=3)
    pool.acquire("c", LeaseRequest(count=2), 0.0)
    for request in (LeaseRequest(count=1), LeaseRequest(count=9, may_wait=True)):
        with pytest.raises(RefusedError):
            pool.acquire("c", request, 0.0)
    assert pool.tables.leases.live_count == pool.tables.targets.charges.sum() == 2


def test_excluded_engines_are_kept_off_while_another_is_free(make_pool):
    pool = make_pool(engines=2, max_running=3)
    request = LeaseRequest(count=3, excluded=frozenset({"e0", "gone"}))
    assert pool.acquire("c", request, 0.0).targets.tolist() == [1, 1, 1]
    assert pool.acquire("c", request, 0.0).targets.tolist() == [0, 0, 0]


def test_local_picks_are_even_and_keep_to_versions():
    engines = [KnownEngine(f"e{i}", "", 4, i % 2) for i in range(4)]
    held: Counter[tuple[str, int]] = Counter()
    rng = random.Random(0)
    for _ in range(1600):
        found = pick_locally(engines, held, Needs(), rng)
        assert found is not None
        held[found[0].name, found[1]] += 1
    assert len(held) == 16 and max(held.values()) - min(held.values()) <= 8
    exact = pick_locally(engines, held, Needs(exact=1), rng)
    assert exact is not None and exact[0].version == 1
    assert pick_locally(engines, held, Needs(minimum=2), rng) is None


def test_clients_expire_by_their_own_last_sign_of_life(make_pool):
    pool = make_pool(client_ttl=10, engine_ttl=1000)
    for second in range(30):
        pool.acquire(f"c{second}", LeaseRequest(count=1), float(second))
    pool.heartbeat("c3", 30.0)
    expired = pool.expire(30.0)
    assert expired.lease_count == 20 and "c3" not in expired.clients and "c20" in expired.clients
    assert pool.tables.targets.charges.sum() == 10
