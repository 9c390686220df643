"""What SGLang draws, beside the reference engine in float32."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, FinishReason, PauseMode
from services.rollout.engine.reference.engine import ReferenceEngine
from tests.contract.engine.cases import Model, complete, gather, request_of
from tests.contract.engine.test_life import started, tokens
from tests.patience import PATIENCE
from tests.sglang.conftest import Start

PROMPTS = [[5], [1, 2, 3], list(range(90)), [7] * 19]


async def scores(engine: Engine, prompt: list[int], response: tuple[int, ...]) -> list[float]:
    return await engine.score([*prompt, *response], len(prompt))


@pytest.mark.fast
async def test_logprobs_are_those_of_the_reference_engine(
    models: tuple[Model, Model], attach: Start
) -> None:
    engine = await attach()
    reference = ReferenceEngine(EngineConfig(model=str(models[0].directory), threads=1))
    await reference.start()
    try:
        requests = [
            request_of(str(i), prompt, 4, max_new_tokens=24, top_k=10 * i)
            for i, prompt in enumerate(PROMPTS)
        ]
        answers = await asyncio.gather(*[complete(engine, request) for request in requests])
        worst = 0.0
        for prompt, samples in zip(PROMPTS, answers, strict=True):
            for sample in samples:
                expected = await scores(reference, prompt, sample.token_ids)
                rescored = await scores(engine, prompt, sample.token_ids)
                assert sample.logprobs == pytest.approx(expected, abs=1e-3)
                assert rescored == pytest.approx(expected, abs=1e-3)
                pairs = zip(sample.logprobs, expected, strict=True)
                worst = max(worst, *(abs(one - other) for one, other in pairs))
        assert worst < 1e-3
        print(f"worst difference {worst:.1e}")
    finally:
        await reference.close()


@pytest.mark.fast
async def test_greedy_tokens_are_those_of_the_reference_engine(
    models: tuple[Model, Model], attach: Start
) -> None:
    engine = await attach()
    reference = ReferenceEngine(EngineConfig(model=str(models[0].directory), threads=1))
    await reference.start()
    try:
        for number, prompt in enumerate(PROMPTS):
            request = request_of(str(number), prompt, temperature=0, max_new_tokens=20)
            (found,), (expected,) = await asyncio.gather(
                complete(engine, request), complete(reference, request)
            )
            assert found.token_ids == expected.token_ids
    finally:
        await reference.close()


@pytest.mark.fast
async def test_abort_keeps_partial_tokens_and_leaves_others_alone(
    models: tuple[Model, Model], attach: Start
) -> None:
    engine = await attach()
    kept = asyncio.create_task(complete(engine, request_of("kept", [3], max_new_tokens=900)))
    gone = await started(engine, "gone", 12, 900)
    assert await engine.abort(["gone"]) == ["gone"]
    parts = await asyncio.wait_for(gone, PATIENCE)
    (other,) = await asyncio.wait_for(kept, PATIENCE)
    assert len(other.token_ids) == 900
    for deltas in parts:
        assert deltas[-1].finish_reason is FinishReason.ABORTED
        drawn = tokens(deltas)
        assert 1 <= len(drawn) < 900
        logprobs = sum((delta.logprobs for delta in deltas), ())
        assert logprobs == pytest.approx(models[0].logprobs([1, 2], drawn), abs=1e-3)


async def test_an_abort_in_a_pause_ends_with_what_has_come(attach: Start) -> None:
    engine = await attach()
    request = request_of("a", [1, 2], 2, max_new_tokens=3000, stream=True)
    task = asyncio.create_task(gather(engine, request))
    async with asyncio.timeout(PATIENCE):
        while engine.status().decode_tokens_total < 20:
            await asyncio.sleep(0.01)
        await engine.pause(PauseMode.IN_PLACE)
        assert await engine.abort(["a"]) == ["a"]
        parts = await task
        await engine.resume()
        assert all(sum(len(delta.token_ids) for delta in deltas) for deltas in parts)
        assert engine.status().rank_loads[0].running_count == 0
        (after,) = await complete(engine, request_of("b", [4]))
    assert len(after.token_ids) == 8


async def test_a_prompt_of_many_samples_is_read_once(attach: Start) -> None:
    engine = await attach()
    before = engine.status().prefill_tokens_total
    prompt = [(7 * place) % 97 for place in range(640)]
    samples = await complete(engine, request_of("a", prompt, 16))
    read = engine.status().prefill_tokens_total - before
    assert len(samples) == 16
    assert read <= 16  # the last token of the prompt each, what came before is in the cache


async def test_a_client_that_goes_away_leaves_nothing_running(attach: Start) -> None:
    engine = await attach()
    for number in range(3):
        request = request_of(f"a{number}", [1], 4, max_new_tokens=3000, stream=True)
        async with aclosing(engine.generate(request)) as deltas:
            await anext(deltas)
    loads = await engine._replica.handle.client.get("/v1/loads")
    async with asyncio.timeout(PATIENCE):
        while loads["loads"][0]["num_running_reqs"]:
            await asyncio.sleep(0.1)
            await complete(engine, request_of("b", [1], max_new_tokens=1))
            loads = await engine._replica.handle.client.get("/v1/loads")
    (load,) = engine.status().rank_loads
    assert (load.running_count, load.waiting_count, load.used_tokens) == (0, 0, 0)


@pytest.mark.fast
async def test_the_likeliest_tokens_are_those_of_transformers(
    models: tuple[Model, Model], attach: Start
) -> None:
    """As a teacher names them: of prompts of many lengths, few tokens and all of them."""
    engine, module = await attach(), models[0].module
    for prompt, count in zip(PROMPTS, (1, 5, 97, 20), strict=True):
        response = tuple((7 * index + len(prompt)) % 97 for index in range(12))
        found = await engine.score_top([*prompt, *response], len(prompt), count)
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        table = logits.double().log_softmax(-1)
        picked = table.gather(1, torch.tensor(response)[:, None])[:, 0]
        assert found.logprobs == pytest.approx(picked.tolist(), abs=1e-3)
        assert len(found.top) == len(response)
        for named, row in zip(found.top, table, strict=True):
            ids, values = [token for token, _ in named], [value for _, value in named]
            assert len({*ids}) == len(ids) == count
            assert values == pytest.approx(row[ids].tolist(), abs=1e-3)  # each is its token's
            assert values == pytest.approx(row.topk(count).values.tolist(), abs=1e-3)
            assert values != pytest.approx(row.flip(0)[ids].tolist(), abs=1e-3)
