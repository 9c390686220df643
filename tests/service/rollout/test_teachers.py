"""A teacher's engines score what the policy's sampled, into the same blob."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.client import EngineClient, RemoteError
from sluice.samples.vocabulary import vocabulary_digest
from tests.service.rollout.harness import (
    ENGINE,
    Episodes,
    Models,
    Store,
    copy_rows,
    rollout_request,
    running_episodes,
    running_rollout,
    wait_for_engines,
)

DENSE = {"reward": "position_match"}


@pytest.fixture
async def taught(store: Store, models: Models):
    """The policy is the first model, the teacher the second, as its directory has it."""
    async with AsyncExitStack() as stack:
        episodes = await stack.enter_async_context(running_episodes(store, models.first))
        router = episodes.router.server.address
        engine = {**ENGINE, "model": str(models.second)}
        await stack.enter_async_context(
            running_rollout(
                store,
                roles=["engine"],
                engine_id="teacher-0",
                pool="teacher",
                router=router,
                engine=engine,
            )
        )
        await wait_for_engines(router, 2)
        yield episodes


def logprobs_of(model: AutoModelForCausalLM, tokens: list[int], prompt_length: int) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    places = range(prompt_length, len(tokens))
    return np.array([logprobs[place - 1, tokens[place]].item() for place in places])


async def test_rows_hold_what_the_teacher_s_model_makes_of_the_policy_s_tokens(
    taught: Episodes, models: Models, store: Store
) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.second, dtype=torch.float32).eval()
    policy = AutoModelForCausalLM.from_pretrained(models.first, dtype=torch.float32).eval()
    request = rollout_request(copy_rows(3), settings=DENSE)
    for group in list(request.groups)[:2]:
        group.teacher_pool = "teacher"
    finished = await taught.finished(request)
    for name, group in finished.items():
        for sample in store.samples(group):
            tokens = sample.token_ids.tolist()
            if name == "g2":
                assert "teacher_logprobs" not in sample.columns
                continue
            theirs = sample.columns["teacher_logprobs"]
            expected = logprobs_of(model, tokens, sample.prompt_length)
            np.testing.assert_allclose(theirs, expected, atol=1e-5)
            own = logprobs_of(policy, tokens, sample.prompt_length)
            assert np.abs(expected - own).max() > 1e-3, "the two models do not differ"
        kinds = set(group.trace.kinds)
        assert (11 in kinds) == (name != "g2"), "its time stands in the trace"


async def test_rows_hold_what_the_teacher_finds_likeliest(
    taught: Episodes, models: Models, store: Store
) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.second, dtype=torch.float32).eval()
    request = rollout_request(copy_rows(2), settings=DENSE)
    for group in request.groups:
        group.teacher_pool = "teacher"
    request.groups[1].teacher_top_count = 3
    finished = await taught.finished(request)
    for sample in store.samples(finished["g0"]):
        assert not [name for name in sample.columns if name.startswith("teacher_top")]
    for sample in store.samples(finished["g1"]):
        with torch.no_grad():
            logits = model(torch.tensor(sample.token_ids[None].tolist())).logits[0].double()
        likeliest = torch.log_softmax(logits, -1)[sample.prompt_length - 1 : -1].topk(3)
        found = sample.columns["teacher_top_logprobs/3"]
        np.testing.assert_allclose(found, likeliest.values, atol=1e-5)
        np.testing.assert_array_equal(sample.columns["teacher_top_ids/3"], likeliest.indices)


@pytest.mark.parametrize(("count", "pool"), [(-1, "teacher"), (1025, "teacher"), (3, "")])
async def test_a_count_that_nobody_can_name_is_refused(
    taught: Episodes, count: int, pool: str
) -> None:
    request = rollout_request(copy_rows(1), settings=DENSE)
    request.groups[0].teacher_pool, request.groups[0].teacher_top_count = pool, count
    with pytest.raises(RemoteError, match="teacher_top_count"):
        await taught.finished(request)


async def test_more_tokens_than_the_teacher_has_fail_the_group(taught: Episodes) -> None:
    request = rollout_request(copy_rows(1), settings=DENSE)
    request.groups[0].teacher_pool, request.groups[0].teacher_top_count = "teacher", 1024
    (event,) = [event async for event in taught.client.rollout(request)]
    assert "did not name 1024 tokens" in event.failed.error.message


async def test_a_pool_of_nobody_costs_the_group_its_time_and_no_other(
    taught: Episodes,
) -> None:
    request = rollout_request(copy_rows(2), settings=DENSE)
    request.groups[0].teacher_pool = "nobody"
    stream = taught.client.stub.Rollout(request)
    assert (await stream.read()).finished.group_id == "g1"
    assert await taught.client.cancel(request.request_id) == ["g0"]
    alone = rollout_request(copy_rows(1), settings=DENSE)
    alone.groups[0].teacher_pool = "nobody"
    alone.group_timeout.FromMilliseconds(1500)
    (failed,) = (await taught.failed(alone)).values()
    assert "took longer than 1.5 s" in failed.error.message


async def test_an_engine_says_what_its_token_ids_mean(taught: Episodes, models: Models) -> None:
    for engine in await wait_for_engines(taught.router.server.address, 2):
        async with EngineClient(engine.address) as client:
            assert (await client.get()).vocabulary == vocabulary_digest(models.second)
