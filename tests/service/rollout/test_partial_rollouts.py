"""Samples that are cut off by a weight update go on where they were, under the new weights."""

import asyncio

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient
from tests.patience import PATIENCE
from tests.service.rollout.harness import (
    Models,
    Store,
    copy_rows,
    hold_after,
    named,
    rollout_request,
    running_episodes,
)

BUDGET = 50
ENGINE = {"max_running": 4, "max_model_length": 64, "threads": 1}  # so that most have to wait


async def until_held(engine: EngineClient) -> None:
    async with asyncio.timeout(PATIENCE):
        while not (await engine.get()).paused:
            await asyncio.sleep(0.005)


async def test_an_aborting_commit_costs_no_token(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first, engine=ENGINE) as episodes:
        request = rollout_request(copy_rows(16), max_new_tokens=BUDGET, sample_count=4)
        request.versions.min_version = store.first.version
        # held, so that nothing ends while the weights are prepared
        hold_after(episodes.worker, 30)
        running = asyncio.create_task(episodes.finished(request))
        await until_held(episodes.engine)
        await episodes.engine.prepare_weights(named(store.second))
        await episodes.engine.commit_weights(named(store.second), engine_pb.PAUSE_MODE_ABORT)
        await episodes.engine.stub.Resume(engine_pb.ResumeRequest())
        finished = await running
        samples = [s for event in finished.values() for s in store.samples(event)]
        sampled = (await episodes.engine.get()).decoded_token_count
    continued = [sample for sample in samples if len(sample.spans) == 2]
    assert continued, "something ran when the weights came"
    for sample in continued:
        first, second = sample.spans
        assert (first.version, second.version) == (store.first.version, store.second.version)
        assert (first.digest, second.digest) == (store.first.digest, store.second.digest)
        assert first.first_token == 0
        assert second.first_token == first.last_token + 1
        assert second.last_token == sample.response_length - 1
        assert sample.response_length <= BUDGET
        assert len(sample.columns["rollout_logprobs"]) == sample.response_length
    assert sampled == sum(sample.response_length for sample in samples), "nothing drawn twice"
