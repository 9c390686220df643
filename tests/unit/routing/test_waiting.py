"""What is bound first when credits are short."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.balance.routing import QUEUED, EngineSpec, LeaseRequest, Needs, RankReport, Refusal
from sluice.balance.routing.types import LeaseRefusedError
from sluice.balance.routing.waiting import MOST_NEEDS


def ask(pool, groups, expected=None, now=0.0, **fields):
    """Leases for groups [(name, size)]; returns ids by group, and who is bound."""
    count = sum(size for _, size in groups)
    request = LeaseRequest(
        count=count,
        groups=groups,
        expected_tokens=None if expected is None else np.array(expected, dtype=float),
        may_wait=True,
        **fields,
    )
    grant = pool.acquire("c", request, now)
    ids, start = {}, grant.first_id
    for name, size in groups:
        ids[name] = list(range(start, start + size))
        start += size
    bound = [grant.first_id + i for i in np.flatnonzero(grant.targets != QUEUED)]
    return ids, bound


def give_back(pool, lease, tokens=-1, now=0.0):
    """Returns the leases that were bound by it, in order."""
    pool.release("c", np.array([lease]), now, output_tokens=np.array([tokens]))
    return [bound for bound, _ in pool.collect("c")]


def test_one_probe_of_each_group_goes_first(make_pool):
    pool = make_pool(max_running=3)
    ids, bound = ask(pool, [("a", 3), ("b", 3), ("c", 3)])
    assert sorted(bound) == [ids["a"][0], ids["b"][0], ids["c"][0]]


def test_then_the_group_whose_probe_was_longest(make_pool):
    pool = make_pool(max_running=3)
    ids, _ = ask(pool, [("a", 3), ("b", 3), ("c", 3)])
    order = give_back(pool, ids["a"][0], tokens=100, now=2.0)
    order += give_back(pool, ids["b"][0], tokens=900, now=18.0)
    order += give_back(pool, ids["c"][0], tokens=500, now=18.0)
    for _ in range(3):
        order += give_back(pool, order[len(order) - 3], now=19.0)
    names = {lease: name for name, leases in ids.items() for lease in leases}
    # While b and c run on they count as long; then b, with 900 tokens, c with 500, a with 100.
    assert [names[lease] for lease in order] == ["b", "c", "b", "c", "a", "a"]


def test_history_replaces_the_probe(make_pool):
    pool = make_pool(max_running=2)
    groups = [("a", 2), ("b", 2), ("c", 2)]
    ids, bound = ask(pool, groups, expected=[100, 100, 900, 900, 500, 500])
    assert sorted(bound) == ids["b"]
    assert give_back(pool, ids["b"][0]) == [ids["c"][0]]
    assert give_back(pool, ids["b"][1]) == [ids["c"][1]]


def test_siblings_correct_a_wrong_history(make_pool):
    pool = make_pool(max_running=2)
    ids, bound = ask(pool, [("a", 4), ("b", 2)], expected=[900] * 4 + [500] * 2)
    assert sorted(bound) == ids["a"][:2]
    give_back(pool, ids["a"][0], tokens=10, now=1.0)
    assert give_back(pool, ids["a"][1], tokens=10, now=1.0) == [ids["b"][0]]


def test_nothing_waits_forever_behind_longer_ones(make_pool):
    pool = make_pool(max_running=1)
    running = ask(pool, [("r", 1)], expected=[100])[1][0]
    short, _ = ask(pool, [("short", 1)], expected=[50], now=0.0)
    for hour in range(1, 50):
        ask(pool, [(f"long{hour}", 1)], expected=[30_000], now=hour * 100.0)
        (running,) = give_back(pool, running, now=hour * 100.0 + 1)
        if running == short["short"][0]:
            break
    assert running == short["short"][0]
    assert hour * 100 < 30_000 * 0.02 + 300  # it has waited about as long as those run


def test_a_waiting_lease_can_be_given_back(make_pool):
    pool = make_pool(max_running=1)
    ids, bound = ask(pool, [("a", 3)])
    assert give_back(pool, ids["a"][1]) == []
    assert give_back(pool, bound[0]) == [ids["a"][2]]
    assert give_back(pool, ids["a"][2]) == []
    assert pool.tables.leases.live_count == 0


def test_needs_wait_apart(make_pool):
    pool = make_pool(max_running=1)
    first, _ = ask(pool, [("a", 1)])
    future, _ = ask(pool, [("b", 1)], needs=Needs(minimum=1))
    later, _ = ask(pool, [("d", 1)])
    assert give_back(pool, first["a"][0]) == later["d"]  # not held up by b
    give_back(pool, later["d"][0])
    pool.register(EngineSpec(name="e0", max_running=1, version=1), 1.0)
    assert [lease for lease, _ in pool.collect("c")] == future["b"]


def test_a_queue_that_is_full_refuses_and_charges_nothing(make_pool):
    pool = make_pool(max_running=1, max_queued=2)
    ask(pool, [("a", 3)])
    with pytest.raises(LeaseRefusedError) as caught:
        ask(pool, [("b", 1)])
    assert caught.value.reason is Refusal.QUEUE_FULL
    assert pool.tables.leases.live_count == 3


def test_without_late_binding_nothing_waits(make_pool):
    pool = make_pool(max_running=1, late_binding=False)
    assert len(ask(pool, [("a", 9)])[1]) == 9


def test_the_cache_limits_credits_too(make_pool):
    pool = make_pool(max_running=100)
    ask(pool, [("a", 4)])
    pool.expire(1.0)
    rank = RankReport(running_count=4, used_tokens=4000, max_tokens=10_000)
    pool.report_load("e0", [rank], 1.0)
    assert len(ask(pool, [("b", 20)])[1]) == 5  # 95 % of 10,000 at 1,000 each
    pool.report_load("e0", [RankReport(running_count=9)], 1.5)
    assert len(pool.collect("c")) == 15


@pytest.mark.parametrize("field", ["used_tokens", "max_tokens"])
def test_a_report_of_the_largest_number_is_taken(make_pool, field):
    pool = make_pool(max_running=3)
    fields = {"running_count": 2, "used_tokens": 1, "max_tokens": 9, field: 2**63 - 1}
    pool.report_load("e0", [RankReport(**fields)], 1.0)
    pool.report_load("e0", [RankReport(running_count=0)], 1e6)  # long after
    assert len(ask(pool, [("a", 9)])[1]) == 3


def test_a_report_of_no_engines_size_closes_one_no_longer_than_one_of_a_full_engine(make_pool):
    pool = make_pool(max_running=100)
    for second in range(1, 12):
        pool.expire(float(second))
        lie = RankReport(running_count=2**31 - 1, waiting_count=2**31 - 1)
        pool.report_load("e0", [lie if second == 1 else RankReport(running_count=0)], second + 0.1)
    assert len(ask(pool, [("a", 9)])[1]) == 9


def test_a_slow_engine_gets_short_ones_and_only_when_the_queue_is_long(make_pool):
    pool = make_pool(engines=4, max_running=4)
    for second in range(30):
        for number in range(4):
            slow = 0.04 if number == 3 else 0.02
            ranks = [RankReport(running_count=1)]
            pool.report_load(f"e{number}", ranks, float(second), seconds_per_token=slow)
    for number in range(4):  # what ran then has ended
        pool.report_load(f"e{number}", [RankReport(running_count=0)], 999.0)
    groups = [(f"g{number}", 1) for number in range(13)]
    expected = [1000.0 + number for number in range(13)]
    ids, bound = ask(pool, groups, expected=expected, now=1000.0)
    assert pool.tables.targets.charges.tolist() == [4, 4, 4, 0]
    assert len(bound) == 12, "one waits rather than run at half the speed"
    give_back(pool, *ids["g0"], now=1000.0)
    groups = [(f"h{number}", 1) for number in range(60)]
    expected = [1000.0 * (1 + number) for number in range(60)]
    ids, bound = ask(pool, groups, expected=expected, now=1000.0)
    slow_ones = {lease for lease in bound if pool.tables.leases.target_of(lease) == 3}
    assert slow_ones == {ids[f"h{number}"][0] for number in range(4)}, "the shortest"


def test_leases_given_back_while_they_wait_leave_room_and_no_trace(make_pool):
    pool = make_pool(max_running=1, max_queued=100)
    for version in range(10, 40):  # of versions that come and go unserved
        ids, _ = ask(pool, [("a", 50), ("b", 50)], needs=Needs(exact=version))
        pool.release("c", np.array(ids["a"] + ids["b"]), 0.0)
        assert pool.waiting.count == 0
    kept, bound = ask(pool, [("d", 3)])
    pool.expire(1.0)
    assert len(pool.waiting._lanes) == 1
    assert sum(lane.count for lane in pool.waiting._lanes.values()) == 2
    assert give_back(pool, bound[0], now=1.0) == [kept["d"][1]]


def test_leases_given_back_one_by_one_bind_the_same_as_among_others(make_pool):
    rng = np.random.default_rng(11)
    one, beside = (make_pool(engines=3, ranks=2, max_running=2) for _ in range(2))
    bound: list[int] = []
    for number in range(40):
        history = [float(rng.integers(50, 900))] * 5 if number % 2 else None
        fields = {"sessions": ["s", "", "", "t", ""]} if number % 5 == 0 else {}
        asked = [
            ask(pool, [(f"g{number}", 5)], history, float(number), **fields)
            for pool in (one, beside)
        ]
        assert asked[0] == asked[1]
        bound += asked[0][1]
    for step in range(150):
        lease, now = bound.pop(int(rng.integers(len(bound)))), 50.0 + step
        outcomes = np.array([1 if rng.random() < 0.9 else rng.integers(0, 7), 2])
        tokens = np.array([rng.integers(-1, 900), 9])
        ids = np.array([lease, -7])  # of no lease
        one.release("c", ids[:1], now, outcomes=outcomes[:1], output_tokens=tokens[:1])
        beside.release("c", ids, now, outcomes=outcomes, output_tokens=tokens)
        news = one.collect("c")
        assert news == beside.collect("c")
        bound += [lease for lease, _ in news]
    assert one.waiting.count == beside.waiting.count < 60
    assert one.tables.targets.charges.tolist() == beside.tables.targets.charges.tolist()


def test_a_queue_that_is_never_empty_does_not_grow(make_pool):
    pool = make_pool(max_running=1)
    _, (running,) = ask(pool, [("a", 2)])
    for number in range(5000):
        ask(pool, [(f"g{number}", 1)], expected=[100.0], now=float(number))
        (running,) = give_back(pool, running, tokens=100, now=float(number))
    (lane,) = pool.waiting._lanes.values()
    assert lane.count <= 2
    assert len(lane._heap) + len(lane._shortest) < 2500


@pytest.mark.parametrize("policy", ["step_time", "min_count", "power_of_two", "round_robin"])
def test_a_lease_alone_goes_where_it_would_go_the_long_way(make_pool, policy):
    rng = np.random.default_rng(3)
    short, long = (make_pool(engines=4, ranks=2, max_running=4, policy=policy) for _ in range(2))
    held: list[int] = []
    for step in range(300):
        now = float(step)
        if held and rng.random() < 0.45:
            ids = np.array([held.pop(int(rng.integers(len(held))))])
            tokens = np.array([rng.integers(1, 900)])
            for pool in (short, long):
                pool.release("c", ids, now, output_tokens=tokens)
            assert short.collect("c") == long.collect("c")
            continue
        groups = [[(f"g{rng.integers(20)}", 1)], [("", 1)], []][rng.integers(3)]
        expected = [None, np.array([np.nan]), np.array([500.0])][rng.integers(3)]
        fields = {"groups": groups, "expected_tokens": expected, "may_wait": bool(step % 2)}
        request = LeaseRequest(count=1, **fields)
        other = LeaseRequest(count=1, excluded=frozenset({"nobody"}), **fields)
        grants = []
        for pool, asked in ((short, request), (long, other)):
            try:
                grant = pool.acquire("c", asked, now)
                grants.append((grant.first_id, grant.targets.tolist(), grant.queued_count))
            except LeaseRefusedError as error:
                grants.append((error.reason, [], 0))
        assert grants[0] == grants[1]
        if grants[0][1]:
            held.append(int(grants[0][0]))
    assert short.tables.targets.charges.tolist() == long.tables.targets.charges.tolist()
    assert short.tables.groups.live.tolist() == long.tables.groups.live.tolist()
    np.testing.assert_array_equal(short.tables.groups._state, long.tables.groups._state)


def test_one_client_waits_for_so_many_versions_and_no_other_pays_for_it(make_pool):
    pool = make_pool(max_running=1)

    def wait(client: str, version: int) -> int:
        request = LeaseRequest(count=1, needs=Needs(minimum=version), may_wait=True)
        return pool.acquire(client, request, 0.0).first_id

    held = [wait("many", version) for version in range(1, MOST_NEEDS + 1)]
    with pytest.raises(LeaseRefusedError) as caught:
        wait("many", MOST_NEEDS + 1)
    assert caught.value.reason is Refusal.QUEUE_FULL
    wait("many", 1)  # where others wait already
    wait("other", MOST_NEEDS + 1)
    assert pool.release("many", np.array(held), 0.0) == MOST_NEEDS
    pool.expire(0.0)
    wait("many", MOST_NEEDS + 2)


def test_what_is_kept_of_the_versions_asked_for_does_not_grow(make_pool):
    pool = make_pool()
    pool.register(EngineSpec(name="e0", version=10_000), 0.0)
    for version in range(1000):
        needs = Needs(minimum=version)
        assert pool.acquire("c", LeaseRequest(count=1, needs=needs), 0.0).targets[0] == 0
    targets = pool.tables.targets
    assert max(len(targets._fleets), len(targets._limits), len(targets._prompt)) <= 64


def test_who_is_refused_leaves_nothing_and_takes_nothing_away(make_pool):
    pool = make_pool(max_running=2)

    def wanted(group: str, session: str) -> LeaseRequest:
        return LeaseRequest(count=1, groups=[(group, 1)], sessions=[session])

    first = pool.acquire("c", wanted("g", "s"), 0.0).first_id
    pool.release("c", np.array([first]), 1.0, output_tokens=np.array([77]))
    pool.acquire("c", LeaseRequest(count=2), 1.0)
    for number in range(100):
        with pytest.raises(LeaseRefusedError):
            pool.acquire("c", wanted(f"g{number}", f"s{number}"), 1.0)
    request = LeaseRequest(count=2, groups=[("g", 1), ("h", 1)], sessions=["s", "t"])
    with pytest.raises(LeaseRefusedError):
        pool.acquire("c", request, 1.0)
    groups, sessions = pool.tables.groups, pool.tables.sessions
    assert (len(groups), len(sessions)) == (1, 1)
    assert groups.expected_of(groups.slot("g", 1.0)) == 77
    assert sessions.target(sessions.open("s", 1.0)) == 0
