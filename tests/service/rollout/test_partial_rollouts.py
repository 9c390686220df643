"""Samples that are cut off by a weight update go on where they were, under the new weights."""

import asyncio

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient
from tests.service.rollout.harness import (
    Models,
    Store,
    copy_rows,
    named,
    rollout_request,
    running_episodes,
)

BUDGET = 50
ENGINE = {"max_running": 4, "max_model_length": 64, "threads": 1}  # so that most have to wait


async def decoded_at_least(engine: EngineClient, tokens: int) -> None:
    async with asyncio.timeout(30):
        while (await engine.get()).decoded_token_count < tokens:
            await asyncio.sleep(0.005)


async def test_an_aborting_commit_costs_no_token(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first, engine=ENGINE) as episodes:
        request = rollout_request(copy_rows(16), max_new_tokens=BUDGET, sample_count=4)
        request.versions.min_version = store.first.version
        running = asyncio.create_task(episodes.finished(request))
        await decoded_at_least(episodes.engine, 30)
        stub = episodes.engine.stub  # held, so that nothing ends while the weights are prepared
        await stub.Pause(engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_IN_PLACE))
        await episodes.engine.prepare_weights(named(store.second))
        await episodes.engine.commit_weights(named(store.second), engine_pb.PAUSE_MODE_ABORT)
        await stub.Resume(engine_pb.ResumeRequest())
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
