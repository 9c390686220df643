"""Breakers, speeds, reported loads, and what a client does alone."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.balance.routing import (
    QUEUED,
    BreakerConfig,
    EngineSpec,
    EngineState,
    LeaseClaims,
    LeaseRequest,
    Needs,
    Outcome,
    RankReport,
    Refusal,
)
from sluice.balance.routing.health import UNIT, Breaker, BreakerState, SpeedTable
from sluice.balance.routing.tables import ReleasedIds
from sluice.balance.routing.types import LeaseRefusedError
from sluice.router_client import LeaseDemand
from sluice.router_client.lease_book import EngineEntry, FleetView, pick_locally

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


def test_a_slowdown_is_told_anew_only_where_it_has_moved_by_the_hysteresis():
    def told(*factors: float) -> list[float]:
        """Of the third of three engines, the others at their usual speed."""
        table = SpeedTable(0.02, 0.0, smoothing_seconds=1e-9, hysteresis=1.15)
        for _ in range(3):
            table.add_engine()
        seen = []
        for step, factor in enumerate(factors):
            for repeat in range(100):  # a report moves it by a third
                for engine in range(3):
                    latency = 0.02 * (factor if engine == 2 else 1.0)
                    table.report(engine, latency, 1, step * 100.0 + repeat)
            seen.append(table.slowdown[2] / UNIT)
            assert table.slowdown[:2].tolist() == [UNIT, UNIT]
        return seen

    assert told(1.1) == [1.0], "within the hysteresis of 1"
    assert told(1 / 1.1) == [1.0]
    assert told(100.0) == [8.0]
    assert told(0.01) == [0.25]
    one, kept, moved, back = told(2.0, 2.2, 2.5, 1.05)
    assert one == kept, "less than the hysteresis"
    assert (one, moved) == (pytest.approx(2.0, rel=0.15), pytest.approx(2.5, rel=0.15))
    assert moved >= 1.15 * one
    assert back == 1.0


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


def test_what_came_and_went_between_two_snapshots_is_no_work_of_others(make_pool):
    pool = make_pool(engines=1, ranks=1, engine_ttl=1000, client_ttl=1000)
    for second in range(60):
        pool.expire(float(second))
        grant = pool.acquire("c", LeaseRequest(count=60), second + 0.05)
        pool.report_load("e0", [RankReport(running_count=60)], second + 0.1)
        assert pool.tables.targets.load().tolist() == [60]
        pool.release("c", grant.first_id + np.arange(60), second + 0.15)
        pool.report_load("e0", [RankReport(running_count=0)], second + 0.2)
        assert pool.tables.targets.load().tolist() == [0]


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
        with pytest.raises(LeaseRefusedError):
            pool.acquire("c", request, 0.0)
    assert pool.tables.leases.live_count == pool.tables.targets.charges.sum() == 2


def test_excluded_engines_are_kept_off_while_another_is_free(make_pool):
    pool = make_pool(engines=2, max_running=3)
    request = LeaseRequest(count=3, excluded=frozenset({"e0", "gone"}))
    assert pool.acquire("c", request, 0.0).targets.tolist() == [1, 1, 1]
    assert pool.acquire("c", request, 0.0).targets.tolist() == [0, 0, 0]


def test_local_picks_are_even_and_keep_to_versions():
    engines = [EngineEntry(f"e{i}", "", 4, i % 2) for i in range(4)]
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


def test_a_client_whose_process_is_gone_keeps_no_place_and_none_in_the_queue(make_pool):
    pool = make_pool(max_running=2)
    dead = pool.acquire("dead", LeaseRequest(count=5, may_wait=True), 0.0)
    alive = pool.acquire("alive", LeaseRequest(count=1, may_wait=True), 0.0)
    assert list(alive.targets) == [QUEUED] and dead.queued_count == 3
    assert pool.end_client("dead", 1.0) == 5
    assert [lease for lease, _ in pool.collect("alive")] == [alive.first_id]
    assert pool.tables.targets.charges.sum() == 1 == pool.tables.leases.live_count
    assert pool.end_client("dead", 1.0) == 0, "it is forgotten"


def test_a_client_that_was_ended_by_mistake_is_charged_again_for_what_it_holds(make_pool):
    pool = make_pool(max_running=8)
    grant = pool.acquire("c", LeaseRequest(count=2), 0.0)
    ids = np.arange(grant.first_id, grant.first_id + 2)
    assert pool.end_client("c", 1.0) == 2
    here = np.zeros(2, dtype=np.int64)
    pool.renew("c", LeaseClaims(ids=ids, names=["e0"], engines=here, ranks=here), 2.0)
    assert pool.tables.targets.charges.sum() == 2
    pool.release("c", ids, 3.0)
    assert pool.tables.targets.charges.sum() == 0 == pool.tables.leases.live_count


def test_clients_that_hold_nothing_are_neither_counted_nor_missed(make_pool):
    pool = make_pool(client_ttl=10, engine_ttl=1000)
    grant = pool.acquire("c", LeaseRequest(count=2), 0.0)
    pool.heartbeat("idle", 0.0)
    assert pool.tables.leases.holder_count == 1
    pool.release("c", np.arange(grant.first_id, grant.first_id + 2), 1.0)
    assert pool.tables.leases.holder_count == 0
    assert pool.expire(30.0).clients == ()


def test_no_engine_is_behind_a_lease_that_ended(make_pool):
    pool = make_pool(engines=2, ranks=2)
    grant = pool.acquire("c", LeaseRequest(count=1), 0.0)
    ids = np.array([grant.first_id])
    assert pool.located(int(pool.targets_of(ids)[0])) is not None
    pool.release("c", ids, 0.0)
    assert pool.located(int(pool.targets_of(ids)[0])) is None


def test_engines_that_are_gone_are_no_measure_of_speed(make_pool):
    pool = make_pool(engines=3)
    ranks = [RankReport(running_count=1)]
    for second in range(30):
        for number in range(3):
            speed = 0.08 if number else 0.02
            pool.report_load(f"e{number}", ranks, float(second), seconds_per_token=speed)
    assert pool.engines()[0].slowdown < 0.5
    for name in ("e1", "e2"):
        pool.remove(name, 30.0)
    pool.report_load("e0", ranks, 31.0, seconds_per_token=0.02)
    assert pool.engines()[0].slowdown == 1.0


def test_a_lease_whose_answer_is_on_its_way_outlives_renewals_at_once(make_pool):
    """As a client sends them that hears of many engines at once."""
    pool = make_pool(client_ttl=60)
    first = pool.acquire("c", LeaseRequest(count=3), 0.0).first_id
    nothing = LeaseClaims(ids=np.empty(0, dtype=np.int64))
    for second in (1.0, 1.01, 1.02, 5.0):
        assert pool.renew("c", nothing, second).dropped_count == 0
    mine = LeaseClaims(
        ids=np.array([first]), names=["e0"], engines=np.array([0]), ranks=np.array([0])
    )
    assert pool.renew("c", mine, 20.0).dropped_count == 2
    assert pool.renew("c", mine, 40.0).dropped_count == 0
    assert pool.tables.targets.charges.sum() == 1


def test_a_renewal_from_before_its_leases_does_not_take_them_from_a_client_that_returns(make_pool):
    """A call that is tried again says what was held when it was made."""
    pool = make_pool(client_ttl=10, engine_ttl=1000)
    first = pool.acquire("c", LeaseRequest(count=3), 0.0).first_id
    assert pool.expire(11.0).lease_count == 3
    pool.renew("c", LeaseClaims(ids=np.empty(0, dtype=np.int64)), 12.0)
    mine = _claims(first, first + 1, first + 2)
    assert pool.renew("c", mine, 12.5).adopted_count == 3
    assert pool.tables.targets.charges.sum() == 3


def test_what_a_client_that_returns_gives_back_is_not_charged_by_a_late_renewal(make_pool):
    pool = make_pool(client_ttl=10, engine_ttl=1000)
    first = pool.acquire("c", LeaseRequest(count=2), 0.0).first_id
    pool.expire(11.0)
    mine = _claims(first, first + 1)
    assert pool.renew("c", mine, 12.0).adopted_count == 2
    assert pool.release("c", np.array([first]), 13.0) == 1
    assert pool.renew("c", mine, 13.1).adopted_count == 0
    for second in (16.0, 19.0, 22.5):
        assert pool.renew("c", _claims(first + 1), second).adopted_count == 0
    late = _claims(first, first + 1)
    assert pool.release("c", np.array([first + 1]), 60.0) == 1
    assert pool.renew("c", late, 60.1).adopted_count == 0, "it is back for long"
    assert pool.tables.targets.charges.sum() == 0


def test_what_was_given_back_is_remembered_for_a_ttl_however_often_time_is_told():
    released = ReleasedIds(keep_seconds=60.0)
    released.turn(100.0)
    released.add([7])
    for second in range(100, 220):
        released.turn(float(second))
        assert 7 in released
    released.turn(220.0)
    assert 7 not in released


def test_a_late_renewal_does_not_charge_the_first_lease_of_all_again(make_pool):
    pool = make_pool()
    first = pool.acquire("c", LeaseRequest(count=1), 0.0).first_id
    assert pool.release("c", np.array([first]), 1.0) == 1
    assert pool.renew("c", _claims(first), 1.1).adopted_count == 0
    assert pool.tables.targets.charges.sum() == 0


def test_a_claim_of_a_rank_that_an_engine_has_not_is_charged_to_nobody(make_pool):
    pool = make_pool(engines=2, ranks=2)
    claims = LeaseClaims(
        ids=np.array([-1, -2]), names=["e0"], engines=np.array([0, 0]), ranks=np.array([1, 2])
    )
    renewal = pool.renew("c", claims, 1.0)
    assert (renewal.adopted_count, renewal.unknown.tolist()) == (1, [-2])
    assert pool.tables.targets.charges.tolist() == [0, 1, 0, 0]


def test_a_lease_that_was_listed_again_was_not_unlisted_before(make_pool):
    """Renewals that overtake one another: its own time to arrive begins anew."""
    pool = make_pool(client_ttl=60)
    first = pool.acquire("c", LeaseRequest(count=1), 0.0).first_id
    nothing = LeaseClaims(ids=np.empty(0, dtype=np.int64))
    for claims, second in ((nothing, 20.0), (_claims(first), 21.0), (nothing, 40.0)):
        assert pool.renew("c", claims, second).dropped_count == 0
    assert pool.renew("c", nothing, 60.0).dropped_count == 1


def test_a_client_is_back_once_it_has_renewed_for_a_ttl(make_pool):
    """From then on what it gave back is not taken for held, whatever a late renewal says."""
    pool = make_pool(client_ttl=10, engine_ttl=1000)
    pool.acquire("c", LeaseRequest(count=1), 0.0)
    pool.expire(11.0)
    for second in (12.0, 15.0, 18.0, 21.0, 23.0):
        pool.renew("c", LeaseClaims(ids=np.empty(0, dtype=np.int64)), second)
    lease = pool.acquire("c", LeaseRequest(count=1), 24.0).first_id
    pool.release("c", np.array([lease]), 25.0)
    for second in (30.0, 39.0, 48.0, 57.0):
        pool.renew("c", LeaseClaims(ids=np.empty(0, dtype=np.int64)), second)
        pool.expire(second)
    assert pool.renew("c", _claims(lease), 58.0).adopted_count == 0


def test_an_engine_that_starts_over_takes_no_reports_from_the_others(make_pool):
    pool = make_pool(engines=2)
    for second in range(1, 100):
        pool.report_load("e1", [RankReport(running_count=6)], float(second))
    pool.register(EngineSpec(name="e0", instance="another"), 100.0)
    assert pool.tables.targets.load().tolist() == [0, 6]
    pool.report_load("e1", [RankReport(running_count=0)], 99.0)
    assert pool.tables.targets.load().tolist() == [0, 6], "it is not the first report of e1"


def _claims(*ids: int) -> LeaseClaims:
    zeros = np.zeros(len(ids), dtype=np.int64)
    return LeaseClaims(ids=np.array(ids), names=["e0"], engines=zeros, ranks=zeros)


def test_a_router_whose_epochs_fell_is_believed_by_those_who_watch_it():
    known = FleetView(random.Random(0))
    for epoch, name, is_now in ((100, "old", False), (5, "new", True), (6, "newer", False)):
        engine = pb.Engine(engine_id=name, dp_size=1, state=pb.ENGINE_STATE_ACTIVE)
        engine.weights.version = 1
        known.learn(epoch, [engine], is_now=is_now)
        assert known.epoch == epoch
        places = known.pick([], [LeaseDemand(count=1)])
        assert places is not None and places[0][0] == name
    known.learn(4, [], is_now=False)
    assert known.epoch == 6, "an answer that was late"


def test_new_leases_count_in_full_beside_old_ones_that_did_nothing(make_pool):
    pool = make_pool(engines=2, engine_ttl=1000, client_ttl=1000)
    old = pool.acquire("c", LeaseRequest(count=40), 0.0)
    for second in range(1, 60):
        pool.expire(float(second))
        for name in ("e0", "e1"):
            pool.report_load(name, [RankReport(running_count=0)], second + 0.1)
    assert pool.tables.targets.load().max() <= 1
    pool.release("c", np.arange(old.first_id, old.first_id + 40), 60.0)
    pool.acquire("c", LeaseRequest(count=10), 60.0)
    assert pool.tables.targets.load().tolist() == [5, 5]


def test_a_pool_takes_so_many_leases_and_no_more(make_pool):
    pool = make_pool(max_leases=5)
    pool.acquire("c", LeaseRequest(count=3), 0.0)
    with pytest.raises(LeaseRefusedError) as caught:
        pool.acquire("d", LeaseRequest(count=3), 0.0)
    assert caught.value.reason is Refusal.TOO_MANY_LEASES
    pool.acquire("d", LeaseRequest(count=2), 0.0)


def test_nobody_is_told_of_a_target_that_is_gone_again(make_pool):
    pool = make_pool(max_running=1)
    first = pool.acquire("c", LeaseRequest(count=2, may_wait=True), 0.0).first_id
    pool.release("c", np.array([first]), 0.0)  # the other one is bound
    pool.register(EngineSpec(name="e0", instance="another", max_running=1), 0.0)
    assert pool.collect("c") == []


def test_local_picks_are_even_over_ranks_not_engines():
    engines = [EngineEntry("small", "", 1, 0), EngineEntry("large", "", 7, 0)]
    held: Counter[tuple[str, int]] = Counter()
    rng = random.Random(0)
    for _ in range(80):
        found = pick_locally(engines, Counter(), Needs(), rng)  # each by another client
        assert found is not None
        held[found[0].name, found[1]] += 1
    assert held["small", 0] <= 20


def test_an_engine_that_comes_back_gets_a_trial_and_a_new_process_is_not_drained(make_pool):
    pool = make_pool(engines=1, engine_ttl=10)
    row = pool.tables.targets.find("e0")
    for _ in range(5):
        pool.tables.targets.record(row, Outcome.CONNECT_ERROR, 0.0)
    assert pool.engines()[0].state is EngineState.BROKEN
    pool.expire(11.0)
    assert pool.engines()[0].state is EngineState.LOST
    assert pool.register(EngineSpec(name="e0"), 12.0).state is EngineState.ACTIVE
    assert pool.tables.targets.fleet(Needs()).free_count == 1
    pool.drain("e0", True, 12.0)
    assert pool.register(EngineSpec(name="e0"), 13.0).state is EngineState.DRAINING
    another = EngineSpec(name="e0", instance="another")
    assert pool.register(another, 14.0).state is EngineState.ACTIVE


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_engine_with_another_number_of_ranks_is_another_engine(make_pool, ranks: int):
    pool = make_pool(engines=2, ranks=2)
    former = pool.acquire("c", LeaseRequest(count=8), 0.0)
    pool.register(EngineSpec(name="e0", dp_size=ranks), 1.0)
    of_e1 = former.targets >= 2
    ids = former.first_id + np.arange(8)
    assert pool.release("c", ids[~of_e1], 1.0) == 0, "their process is gone"
    pool.acquire("c", LeaseRequest(count=4 * (ranks + 2) - 4), 2.0)
    views = {view.spec.name: view for view in pool.engines()}
    assert views["e0"].lease_counts == (4,) * ranks
    assert views["e1"].lease_counts == (4, 4)
