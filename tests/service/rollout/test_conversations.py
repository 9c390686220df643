"""The turns of an episode go to the engine that has its cache; others spread over all of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import numpy as np
import pytest

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import trace_pb2
from sluice.client import EngineClient, RolloutClient
from tests.patience import PATIENCE
from tests.service.rollout import talk
from tests.service.rollout.harness import (
    ENGINE,
    SERVER,
    Episodes,
    Models,
    Store,
    copy_rows,
    load_weights,
    rollout_request,
    running_rollout,
    running_router,
    wait_for_engines,
)

ENGINES = 3


@pytest.fixture
async def episodes(store: Store, models: Models) -> AsyncIterator[Episodes]:
    """One worker over several engines."""
    async with AsyncExitStack() as stack:
        # so short a cache is not worth staying for, were an engine ever so little slower
        pool = {"break_margin": 1e9}
        router = await stack.enter_async_context(running_router(default_pool=pool))
        common = {"router": router.server.address, "server": SERVER, "tokenizer": models.first}
        for number in range(ENGINES):
            values = {"roles": ["engine"], "engine_id": f"e{number}", "engine": ENGINE, **common}
            process = await stack.enter_async_context(running_rollout(store, **values))
            engine = await stack.enter_async_context(EngineClient(process.server.address))
            await load_weights(engine, store.first)
        environments = {"talk": talk.PATH}
        worker = await stack.enter_async_context(
            running_rollout(
                store, roles=["episodes"], episodes={"environments": environments}, **common
            )
        )
        client = await stack.enter_async_context(RolloutClient(worker.server.address))
        await wait_for_engines(router.server.address, ENGINES)
        yield Episodes(store, router, engine, client, worker)


def engines_by_episode(finished: pb.FinishedGroup) -> dict[int, list[str]]:
    """Where each turn of each episode was sampled."""
    trace = finished.trace
    found: dict[int, list[str]] = defaultdict(list)
    for kind, episode, place in zip(trace.kinds, trace.episodes, trace.places, strict=True):
        if kind == trace_pb2.SPAN_KIND_LEASE:
            found[episode].append(trace.place_names[place])
    return found


async def test_every_turn_of_an_episode_goes_to_one_engine_and_no_session_is_left(
    episodes: Episodes,
) -> None:
    request = rollout_request(copy_rows(3), environment="talk", sample_count=6, max_new_tokens=48)
    groups = await episodes.finished(request)
    turns = [where for group in groups.values() for where in engines_by_episode(group).values()]
    assert len(turns) == 18
    assert sum(len(where) for where in turns) > 2 * len(turns)
    assert all(len(set(where)) == 1 for where in turns)
    assert len({where[0] for where in turns}) == ENGINES
    pool = episodes.router.pools.room("").pool
    async with asyncio.timeout(PATIENCE):
        while pool.tables.sessions or pool.tables.targets.charges.any():
            await asyncio.sleep(0.01)


async def test_the_router_hears_how_long_answers_to_a_prompt_were(episodes: Episodes) -> None:
    rows = copy_rows(3)
    first = await episodes.finished(rollout_request(rows))
    await episodes.finished(rollout_request({f"again{i}": row for i, row in enumerate(rows)}))
    groups = episodes.router.pools.room("").pool.tables.groups
    now = episodes.router.pools.clock()
    before, _ = groups.slots(["g0", "g1", "g2"], now)
    after, _ = groups.slots(["again0", "again1", "again2"], now)
    lengths = [first[f"g{i}"].response_lengths for i in range(3)]
    assert np.isnan(groups.prior[before]).all()
    assert groups.prior[after] == pytest.approx([sum(each) / len(each) for each in lengths])
