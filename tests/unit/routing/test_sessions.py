"""Conversations stay on the rank that has their cache, unless that costs more than it saves."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.balance.routing import EngineSpec, LeaseRequest, Outcome, RankReport


def turn(pool, key: str, now: float = 0.0, prefix: int = 10_000, **fields) -> tuple[int, int]:
    """(lease, target) of a session's next turn."""
    request = LeaseRequest(count=1, sessions=[key], prefix_tokens=np.array([prefix]), **fields)
    grant = pool.acquire("c", request, now)
    return grant.first_id, int(grant.targets[0])


def end(pool, *leases: int, now: float = 0.0) -> None:
    pool.release("c", np.array(leases), now)


def test_a_session_returns_to_its_rank_while_others_come_and_go(make_pool):
    pool = make_pool(engines=2, ranks=4)
    lease, home = turn(pool, "s", prefix=0)
    for step in range(20):
        end(pool, lease)
        pool.acquire("other", LeaseRequest(count=8), float(step))
        lease, target = turn(pool, "s")
        assert target == home


def test_new_sessions_go_where_the_fewest_are_even_if_those_are_between_turns(make_pool):
    pool = make_pool(engines=2, ranks=4)
    for number in range(24):
        lease, _ = turn(pool, f"s{number}", prefix=0)
        end(pool, lease)  # nothing is loaded now
    assert pool.tables.sessions.active.tolist() == [3] * 8


def test_ended_sessions_count_no_more_and_idle_ones_end(make_pool):
    pool = make_pool(engines=1, ranks=2, session_ttl=100)
    first, _ = turn(pool, "a", now=0.0)
    second, _ = turn(pool, "b", now=0.0)
    end(pool, first, now=10.0)
    assert pool.end_sessions(["b", "nobody"]) == 1
    assert pool.tables.sessions.active.sum() == 1
    pool.heartbeat("c", 109.0)
    assert pool.expire(109.0).session_count == 0
    assert pool.expire(111.0).session_count == 1
    end(pool, second, now=112.0)  # of a session that ended while it ran
    assert len(pool.tables.sessions) == 0


def test_a_session_with_a_running_turn_does_not_idle_out(make_pool):
    pool = make_pool(session_ttl=10, client_ttl=1000, engine_ttl=1000)
    turn(pool, "a", now=0.0)
    assert pool.expire(500.0).session_count == 0


@pytest.mark.parametrize("event", ["drain", "remove", "restart", "version"])
def test_a_session_moves_when_its_engine_cannot_serve_it(make_pool, event):
    pool = make_pool(engines=2, ranks=1)
    lease, home = turn(pool, "s")
    end(pool, lease)
    if event == "drain":
        pool.drain(f"e{home}", True, 1.0)
    elif event == "remove":
        pool.remove(f"e{home}", 1.0)
    elif event == "version":
        pool.register(EngineSpec(name=f"e{home}", version=-1), 1.0)
    else:  # the cache is gone: it is placed like a new session, off the busier engine
        pool.register(EngineSpec(name=f"e{home}", instance="b"), 1.0)
        pool.acquire("x", LeaseRequest(count=1, sessions=["t"]), 1.0)
        busy = int(pool.tables.sessions.active.argmax())
        assert turn(pool, "s")[1] == 1 - busy
        return
    assert turn(pool, "s")[1] == 1 - home


def slow_down(pool, name: str, factor: float) -> None:
    """Let engines report until `name` counts as that much slower than the others."""
    for second in range(60):
        for engine in pool.engines():
            own = factor if engine.spec.name == name else 1.0
            pool.report_load(
                engine.spec.name,
                [RankReport(running_count=1)] * engine.spec.dp_size,
                float(second),
                seconds_per_token=0.02 * own,
            )


@pytest.mark.parametrize(
    ("settings", "stays", "leaves"),
    [({}, 40_000, 20_000), ({"prefill_rate": 2000}, 4000, 2000)],  # a tenth of the default
)
def test_a_session_leaves_only_when_the_slow_down_exceeds_its_prefill(
    make_pool, settings, stays, leaves
):
    pool = make_pool(engines=3, ranks=1, **settings)
    lease, home = turn(pool, "s")
    end(pool, lease)
    slow_down(pool, f"e{home}", 4.0)
    # 100 tokens at 60 ms more each gain 6 s; `stays` tokens of prompt cost 2 s, times the margin 4.
    expected = {"expected_tokens": np.array([100.0])}
    lease, target = turn(pool, "s", now=60.0, prefix=stays, **expected)
    assert target == home
    end(pool, lease, now=60.0)
    assert turn(pool, "s", now=60.0, prefix=leaves, **expected)[1] != home


def test_one_request_of_several_leases_in_one_session_is_not_split(make_pool):
    pool = make_pool(engines=2, ranks=4)
    grant = pool.acquire("c", LeaseRequest(count=5, sessions=["s"] * 5), 0.0)
    assert len(set(grant.targets.tolist())) == 1
    pool.release("c", np.arange(grant.first_id, grant.first_id + 5), 0.0)
    assert pool.tables.targets.charges.sum() == 0


def test_a_session_does_not_go_round_the_trial_of_an_engine_that_failed(make_pool):
    """Nothing is said of a cache, so that staying costs nothing."""
    pool = make_pool(engines=2, ranks=2, engine_ttl=1000)
    request = LeaseRequest(count=1, sessions=["s"])
    home = int(pool.acquire("c", request, 0.0).targets[0])
    engine = f"e{home // 2}"
    pool.acquire("other", LeaseRequest(count=20), 0.0)
    row = pool.tables.targets.find(engine)
    for _ in range(5):
        pool.tables.targets.record(row, Outcome.TIMEOUT, 0.0)
    pool.expire(31.0)  # one trial is due
    trial = pool.acquire("c", LeaseRequest(count=20), 31.0)
    assert sum(target // 2 == home // 2 for target in trial.targets.tolist()) == 1
    assert int(pool.acquire("c", request, 31.0).targets[0]) // 2 != home // 2


def test_a_new_process_has_no_sessions_of_the_old_one(make_pool):
    pool = make_pool(engines=2)
    for number in range(10):
        turn(pool, f"s{number}", prefix=0)
    pool.register(EngineSpec(name="e0", instance="another"), 0.0)
    assert pool.tables.sessions.active.tolist() == [0, 5]
