"""OpenAI's own client, unmodified."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError
from transformers import AutoModelForCausalLM

from services.rollout.engine.interface import Delta, Generation
from services.rollout.openai.generation import Answer
from services.rollout.openai.prompts import Prompt
from services.rollout.process import RolloutProcess
from sluice.client import RemoteError
from sluice.samples.sample import VersionSpan
from tests.service.rollout.harness import Store

IMAGE = {"type": "image_url", "image_url": {"url": "data:;base64,iVBORw0KGgo="}}


def logits_of(model: Path, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities float64[length, V] by transformers."""
    module = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        return module(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).owned_by == "sluice"


async def test_a_chat_answers_with_tokens_logprobs_and_the_weights(
    client: AsyncOpenAI, model: Path, store: Store
) -> None:
    answer = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "12"}],
        n=3,
        max_tokens=6,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    assert answer.prompt_token_ids == [1, 2, 10]
    assert answer.weight_version == store.first.version
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in answer.choices)
    assert len({tuple(choice.token_ids) for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.finish_reason == ("stop" if choice.token_ids[-1] == 11 else "length")
        assert [span["digest"] for span in choice.weight_spans] == [store.first.digest]
        table = logits_of(model, [*answer.prompt_token_ids, *choice.token_ids])
        for place, (token, entry) in enumerate(
            zip(choice.token_ids, choice.logprobs.content, strict=True)
        ):
            expected = table[2 + place]
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
            best = [top.logprob for top in entry.top_logprobs]
            assert best == pytest.approx(expected.topk(2).values.tolist(), abs=1e-4)


async def test_a_stream_says_what_the_answer_says(client: AsyncOpenAI) -> None:
    request = {
        "model": "policy",
        "messages": [{"role": "user", "content": "34"}],
        "max_tokens": 9,
        "n": 2,
        "seed": 5,
        "logprobs": True,
    }
    whole = await client.chat.completions.create(**request)
    texts, reasons, logprobs, usage = {0: "", 1: ""}, {}, {0: [], 1: []}, None
    chunk_count = 0
    async for chunk in await client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        usage, chunk_count = chunk.usage or usage, chunk_count + 1
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            if choice.logprobs:
                logprobs[choice.index] += [entry.logprob for entry in choice.logprobs.content]
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        expected = [entry.logprob for entry in choice.logprobs.content]
        assert logprobs[choice.index] == pytest.approx(expected, abs=1e-5)
    assert usage == whole.usage
    assert chunk_count > 8  # token by token


async def test_a_stream_never_tells_other_log_probabilities_than_the_answer(
    client: AsyncOpenAI, process: RolloutProcess
) -> None:
    """An engine that measures the tempered ones alone is asked again for an answer."""
    engine = process.engine
    assert engine is not None
    generate = engine.generate

    async def tempered_only(generation: Generation) -> AsyncIterator[Delta]:
        async for delta in generate(generation):
            yield delta._replace(logprobs_t1=())

    request = {
        "model": "policy",
        "prompt": "34=",
        "max_tokens": 5,
        "seed": 5,
        "temperature": 0.5,
        "logprobs": 0,
    }
    expected = (await client.completions.create(**request)).choices[0].logprobs.token_logprobs
    engine.generate = tempered_only  # type: ignore[method-assign, assignment]
    found = (await client.completions.create(**request)).choices[0].logprobs.token_logprobs
    assert found == pytest.approx(expected, abs=1e-4)
    with pytest.raises(BadRequestError) as caught:
        await client.completions.create(**request, stream=True)
    assert caught.value.param == "logprobs"


async def test_a_completion_echoes_and_scores_its_prompt(client: AsyncOpenAI, model: Path) -> None:
    prompts = [[1, 2, 10, 3], [4, 10]]
    answer = await client.completions.create(
        model="policy", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        table = logits_of(model, prompt)
        scores = choice.logprobs
        assert scores.token_logprobs[0] is None
        assert len(scores.tokens) == len(prompt) + 1
        for place, token in enumerate(prompt[1:]):
            assert scores.token_logprobs[place + 1] == pytest.approx(
                float(table[place, token]), abs=1e-4
            )
            best = max(scores.top_logprobs[place + 1].values())
            assert best == pytest.approx(float(table[place].max()), abs=1e-4)
        # what is greedy is known by equality
        assert scores.token_logprobs[-1] == max(scores.top_logprobs[-1].values())


async def test_echo_without_new_tokens_only_scores(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="policy", prompt="12=3", max_tokens=0, logprobs=0, echo=True
    )
    (choice,) = answer.choices
    assert choice.text == "12=3"
    assert len(choice.logprobs.token_logprobs) == 4


async def test_a_stop_string_ends_the_text_before_it(client: AsyncOpenAI) -> None:
    request = {"model": "policy", "prompt": "12=", "max_tokens": 40, "seed": 3}
    free = (await client.completions.create(**request)).choices[0].text
    assert len(free) > 4, "the test needs a text"
    stop = free[2:4]
    cut = await client.completions.create(
        **request, stop=[stop], extra_body={"return_token_ids": True}
    )
    assert cut.choices[0].text == free[: free.find(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert len(cut.choices[0].token_ids) < len(free)
    streamed = ""
    async for chunk in await client.completions.create(**request, stop=stop, stream=True):
        streamed += chunk.choices[0].text
    assert streamed == cut.choices[0].text


async def test_an_answer_has_its_least_tokens(client: AsyncOpenAI) -> None:
    every = {"stop_token_ids": list(range(1, 13)), "return_token_ids": True}
    request = {"model": "policy", "prompt": "7=", "max_tokens": 6, "seed": 5}
    for least in (0, 3, 6):
        body = {**every, "min_tokens": least, "ignore_eos": True}
        (answer,) = (await client.completions.create(**request, extra_body=body)).choices
        assert answer.token_ids[:least] == [0] * least
        assert len(answer.token_ids) >= max(least, 1)


async def test_the_seed_makes_an_answer_again(client: AsyncOpenAI) -> None:
    request = {"model": "policy", "prompt": "7=", "max_tokens": 20}
    one, two, other = [
        (await client.completions.create(**request, seed=seed)).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert one == two != other


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"frequency_penalty": 0.5}, "unsupported_parameter", "frequency_penalty"),
        ({"parallel_tool_calls": False}, "unsupported_parameter", "parallel_tool_calls"),
        ({"extra_body": {"tempratur": 1}}, "unknown_parameter", "tempratur"),
        ({"n": 1000}, "invalid_value", "n"),
        ({"max_tokens": 10**6}, "invalid_value", "max_tokens"),
        ({"extra_body": {"min_tokens": -1}}, "invalid_value", "min_tokens"),
        ({"max_tokens": 4, "extra_body": {"min_tokens": 5}}, "invalid_value", "min_tokens"),
        ({"stop": "a", "extra_body": {"min_tokens": 2}}, "invalid_value", None),
        ({"messages": []}, "invalid_value", "messages"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "unsupported_content",
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "invalid_field",
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": "1" * 99}]}, "context_length_exceeded", None),
    ],
)
async def test_what_cannot_be_done_is_named(
    client: AsyncOpenAI, fields: dict, code: str, param: str | None
) -> None:
    request = {"model": "policy", "messages": [{"role": "user", "content": "1"}], **fields}
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(**request)
    assert refused.value.code == code
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"prompt": ""}, "prompt: must not be empty", "prompt"),
        ({"prompt": []}, "prompt: must not be empty", "prompt"),
        ({"prompt": [[1], []]}, "prompt: must not be empty", "prompt"),
        ({"prompt": "1", "max_tokens": 0}, "request: max_tokens 0 needs echo", None),
    ],
)
async def test_what_a_text_completion_lacks_is_named(
    client: AsyncOpenAI, fields: dict, message: str, param: str | None
) -> None:
    with pytest.raises(BadRequestError) as refused:
        await client.completions.create(model="policy", **fields)
    assert refused.value.body["message"] == message
    assert refused.value.param == param


async def test_a_stream_is_refused_by_status_too(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="leaves no room"):
        await client.completions.create(model="policy", prompt="1" * 99, stream=True)


async def test_another_model_does_not_exist(client: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError) as refused:
        await client.completions.create(model="gpt-7", prompt="1")
    assert refused.value.code == "model_not_found"


async def test_fields_without_effect_are_taken(client: AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": [{"type": "text", "text": "1"}]}],
        user="me",
        presence_penalty=0,
        response_format={"type": "text"},
        max_completion_tokens=2,
    )


async def test_tools_reach_the_template(client: AsyncOpenAI) -> None:
    tool = {"type": "function", "function": {"name": "789", "parameters": {}}}
    request = {
        "model": "policy",
        "messages": [{"role": "user", "content": "1"}],
        "tools": [tool],
        "max_tokens": 1,
        "extra_body": {"return_token_ids": True},
    }
    shown = await client.chat.completions.create(**request)
    hidden = await client.chat.completions.create(**request, tool_choice="none")
    assert shown.prompt_token_ids == [1, 10, 7, 8, 9, 10, 0]
    assert hidden.prompt_token_ids == [1, 10]


async def test_an_episode_worker_answers_by_the_engines_the_router_leases(
    leased: AsyncOpenAI, store: Store
) -> None:
    request = {"model": "policy", "prompt": [1, 2, 10], "max_tokens": 8, "seed": 4}
    whole = await leased.completions.create(**request, n=2, logprobs=2)
    assert whole.weight_version == store.first.version
    assert len(whole.choices[0].logprobs.top_logprobs[0]) >= 2
    text = ""
    async for chunk in await leased.completions.create(**request, stream=True):
        text += chunk.choices[0].text
    assert text == whole.choices[0].text
    with pytest.raises(APIStatusError) as refused:
        await leased.completions.create(model="policy", prompt="1" * 99)
    assert refused.value.status_code == 400
    assert refused.value.code == "context_length_exceeded"


async def test_scores_under_other_weights_than_sampled_are_refused(
    process: RolloutProcess, client: AsyncOpenAI, store: Store
) -> None:
    """Weights that change between an answer and its scores would give numbers of two models."""
    assert process.openai is not None
    await client.completions.create(model="policy", prompt="1=", max_tokens=2, logprobs=1)
    gone = VersionSpan(version=99, digest="d", first_token=0, last_token=0)
    delta = Delta(index=0, token_ids=(3,), logprobs=(0.0,), logprobs_t1=(0.0,), spans=(gone,))
    with pytest.raises(RemoteError, match="VERSION_UNAVAILABLE"):
        await process.openai.responder.scored(
            Prompt("1=", (1, 10)), Answer(delta, "3"), top_count=1, echo=False
        )


async def test_a_stop_string_and_names_of_tokens_are_shown_as_asked(client: AsyncOpenAI) -> None:
    request = {"model": "policy", "prompt": "12=", "max_tokens": 6, "seed": 5, "logprobs": 1}
    (whole,) = (await client.completions.create(**request)).choices
    stop = whole.text[1]
    end = whole.text.index(stop)
    for keeps in (False, True):
        body = {"include_stop_str_in_output": keeps, "return_tokens_as_token_ids": keeps}
        answer = await client.completions.create(**request, stop=stop, extra_body=body)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (whole.text[: end + keeps], "stop")
        assert [name.startswith("token_id:") for name in choice.logprobs.tokens] == [keeps] * len(
            choice.logprobs.tokens
        )
