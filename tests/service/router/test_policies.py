"""Every rule can be chosen for a pool and does what its name says; engines report their load."""

from __future__ import annotations

from collections import Counter

import pytest
from google.protobuf import duration_pb2

from services.router.config import RouterConfig
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.config import ConfigError, parse_config
from tests.patience import PATIENCE

ENGINES, RANKS = 4, 2


async def engines_of(router, count: int, **fields: object) -> list[int]:
    """Engine number of each of `count` leases, given one by one."""
    answers = [await router.acquire("c", 1, **fields) for _ in range(count)]
    return [answer.target_indices[0] // RANKS for answer in answers]


async def start(start_router, policy: str):
    router = await start_router(policy=policy)
    for number in range(ENGINES):
        await router.register(f"e{number}", dp_size=RANKS)
    return router


@pytest.mark.parametrize("policy", ["step_time", "min_count"])
async def test_least_load_keeps_engines_level(start_router, policy):
    router = await start(start_router, policy)
    assert set(Counter(await engines_of(router, 32)).values()) == {8}


async def test_round_robin_takes_turns(start_router):
    router = await start(start_router, "round_robin")
    assert await engines_of(router, 12) == [0, 1, 2, 3] * 3


async def test_random_is_neither_level_nor_in_turn(start_router):
    router = await start(start_router, "random")
    chosen = Counter(await engines_of(router, 64))
    assert set(chosen) == {0, 1, 2, 3} and len(set(chosen.values())) > 1


async def test_power_of_two_stays_between(start_router):
    router = await start(start_router, "power_of_two")
    chosen = Counter(await engines_of(router, 256))
    assert set(chosen) == {0, 1, 2, 3} and max(chosen.values()) - min(chosen.values()) <= 5


async def test_cache_aware_returns_to_the_engine_of_the_prompt(start_router):
    router = await start(start_router, "cache_aware")
    for group in ("g", "h"):
        fields = {"group_ids": [group], "group_sizes": [1]}
        assert len(set(await engines_of(router, 16, **fields))) == 1


def test_a_rule_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="policy"):
        parse_config(RouterConfig, {"default_pool": {"policy": "smallest_tree"}})


def slow_report(engine_id: str, milliseconds: int) -> pb.ReportLoadRequest:
    return pb.ReportLoadRequest(
        engine_id=engine_id,
        rank_loads=[engine_pb.RankLoad(running_count=1)] * RANKS,
        time_per_token=duration_pb2.Duration(nanos=milliseconds * 1_000_000),
    )


async def test_an_engine_that_reports_slow_steps_gets_less(start_router):
    router = await start(start_router, "step_time")
    for number in range(ENGINES):
        milliseconds = 60 if number == 1 else 20
        answer = await router.stub.ReportLoad(
            slow_report(f"e{number}", milliseconds), timeout=PATIENCE
        )
        assert answer.known
    listed = await router.stub.ListEngines(pb.ListEnginesRequest(), timeout=PATIENCE)
    slow = {engine.engine_id: engine.slowdown for engine in listed.engines}
    assert slow["e1"] > 2 and {slow[name] for name in ("e0", "e2", "e3")} == {1.0}
    chosen = Counter(await engines_of(router, 60))
    assert chosen[1] == 0 and set(chosen) == {0, 2, 3}


async def test_a_router_that_has_forgotten_an_engine_says_so(router):
    answer = await router.stub.ReportLoad(slow_report("gone", 20), timeout=PATIENCE)
    assert not answer.known
