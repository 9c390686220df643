"""Sampling, log-probs of prompts and stops of the client's calls against transformers and peft."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from tinker import types

from tests.tinker.base import END_ID, EQUALS_ID, reversed_pair
from tests.tinker.conftest import Gateway, datum
from tests.tinker.oracle import Oracle
from tests.tinker.test_training import folder_of

DRAWS = 1024
PROMPT = [3, 7, EQUALS_ID]


def ints(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


@pytest.fixture(scope="module")
def trained(gateway: Gateway):
    """A sampling client of an adapter that is not the base, and the same by peft."""
    client = gateway.begin()
    data = [datum([3, 7, EQUALS_ID, 9, 8, END_ID], weights=[0.0, 0, 1, 1, 1])]
    for _ in range(6):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=4e-3)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    return sampler, Oracle(gateway.model, folder_of(gateway, client))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.5])
def test_tokens_come_as_often_as_their_distribution_says(trained, temperature: float) -> None:
    sampler, oracle = trained
    params = types.SamplingParams(max_tokens=1, temperature=temperature, seed=1)
    drawn = [each.result() for each in [sampler.sample(ints(PROMPT), DRAWS, params)] * 1]
    more = types.SamplingParams(max_tokens=1, temperature=temperature, seed=10_000)
    drawn.append(sampler.sample(ints(PROMPT), DRAWS, more).result())
    expected = (oracle.logits(PROMPT)[-1].detach() / temperature).log_softmax(-1)
    counts: Counter[int] = Counter()
    for answer in drawn:
        for sequence in answer.sequences:
            (token,), (logprob,) = sequence.tokens, sequence.logprobs
            counts[token] += 1
            assert logprob == pytest.approx(expected[token].item(), abs=1e-4)
    total = counts.total()
    assert total == 2 * DRAWS
    for token, probability in enumerate(expected.exp().tolist()):
        spread = math.sqrt(total * probability * (1 - probability))
        assert abs(counts[token] - total * probability) < 5 * spread + 1, token


def test_what_cuts_the_distribution_cuts_it(trained) -> None:
    sampler, oracle = trained
    logits = oracle.logits(PROMPT)[-1].detach()
    order = logits.argsort(descending=True).tolist()

    def tokens(**params: float) -> set[int]:
        given = types.SamplingParams(max_tokens=1, temperature=2.5, seed=3, **params)
        answer = sampler.sample(ints(PROMPT), 512, given).result()
        return {each.tokens[0] for each in answer.sequences}

    assert tokens(top_k=3) == set(order[:3])
    mass = (logits / 2.5).softmax(-1)[order].cumsum(0)
    kept = int((mass < 0.6).sum()) + 1
    assert tokens(top_p=0.6) == set(order[:kept])
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
    assert sampler.sample(ints(PROMPT), 1, greedy).result().sequences[0].tokens == [order[0]]


def test_prompts_are_scored(trained) -> None:
    sampler, oracle = trained
    tokens = [*PROMPT, 7, 3, END_ID]
    logprobs = oracle.logits(tokens[:-1]).log_softmax(-1).detach()
    expected = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    found = sampler.compute_logprobs(ints(tokens)).result()
    assert found[0] is None
    assert found[1:] == pytest.approx(expected, abs=5e-5)
    last = sampler.compute_logprobs(ints(tokens), prompt_logprobs_last_n=2).result()
    assert last[:4] == [None] * 4
    assert last[4:] == pytest.approx(expected[3:], abs=5e-5)
    one = types.SamplingParams(max_tokens=1)
    answer = sampler.sample(ints(tokens), 1, one, topk_prompt_logprobs=3).result()
    assert answer.topk_prompt_logprobs[0] is None
    for place, named in enumerate(answer.topk_prompt_logprobs[1:]):
        top = logprobs[place].topk(3)
        assert [token for token, _ in named] == top.indices.tolist()
        assert [value for _, value in named] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_log_probs_of_samples_are_those_of_training(gateway: Gateway) -> None:
    client = gateway.begin()
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8)
    for sequence in sampler.sample(ints(PROMPT), 8, params).result().sequences:
        tokens = [*PROMPT, *sequence.tokens]
        output = client.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]
        trained = output["logprobs"].tolist()[len(PROMPT) - 1 :]
        assert sequence.logprobs == pytest.approx(trained, abs=2e-5)


def test_likeliest_tokens_of_samples(trained) -> None:
    sampler, oracle = trained
    params = types.SamplingParams(max_tokens=3, seed=4)
    answer = sampler.sample(ints(PROMPT), 2, params, topk_sample_logprobs=2).result()
    for sequence in answer.sequences:
        whole = [*PROMPT, *sequence.tokens]
        logprobs = oracle.logits(whole[:-1]).log_softmax(-1).detach()[len(PROMPT) - 1 :]
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
        for row, named in zip(logprobs, sequence.topk_logprobs, strict=True):
            assert [token for token, _ in named] == row.topk(2).indices.tolist()


def test_samples_end_where_they_are_told_to(trained) -> None:
    sampler, _ = trained
    base = types.SamplingParams(max_tokens=12, temperature=2.5, seed=11)
    free = sampler.sample(ints(PROMPT), 16, base).result().sequences
    by_text = types.SamplingParams(**{**vars_of(base), "stop": ["9", "41"]})
    for whole, cut in zip(
        free, sampler.sample(ints(PROMPT), 16, by_text).result().sequences, strict=True
    ):
        text = "".join(str(token) if token < 10 else "." for token in whole.tokens)
        ends = [text.find(stop) + len(stop) for stop in ("9", "41") if stop in text]
        assert cut.tokens == whole.tokens[: min(ends, default=len(whole.tokens))]
        assert cut.logprobs == pytest.approx(whole.logprobs[: len(cut.tokens)], abs=1e-4)
        assert cut.stop_reason == ("stop" if ends else whole.stop_reason)
    by_token = types.SamplingParams(**{**vars_of(base), "stop": [8]})
    for whole, cut in zip(
        free, sampler.sample(ints(PROMPT), 16, by_token).result().sequences, strict=True
    ):
        ends = [place + 1 for place, token in enumerate(whole.tokens) if token == 8]
        assert cut.tokens == whole.tokens[: min(ends, default=len(whole.tokens))]


def vars_of(params: types.SamplingParams) -> dict[str, object]:
    return {k: v for k, v in params.model_dump().items() if v is not None}


def test_a_seed_draws_the_same_again_and_none_draws_anew(trained) -> None:
    sampler, _ = trained
    seeded = types.SamplingParams(max_tokens=8, seed=2**62)
    first, again = (sampler.sample(ints(PROMPT), 4, seeded).result().sequences for _ in range(2))
    assert [each.tokens for each in first] == [each.tokens for each in again]
    free = types.SamplingParams(max_tokens=8, temperature=2.5)
    drawn = {
        tuple(sampler.sample(ints(PROMPT), 1, free).result().sequences[0].tokens) for _ in "abcd"
    }
    assert len(drawn) > 1


def test_a_sampler_keeps_its_weights_while_training_goes_on(gateway: Gateway) -> None:
    client, prompt = gateway.begin(), ints([*PROMPT, 7, 3])
    before = client.save_weights_and_get_sampling_client().result()
    named = client.save_weights_for_sampler("kept").result().path
    first = before.compute_logprobs(prompt).result()
    for step in range(6):  # versions of a line go, but for those with a name
        client.forward_backward([datum(reversed_pair(random.Random(step)))], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=5e-3))
        newer = client.save_weights_and_get_sampling_client().result()
    assert newer.compute_logprobs(prompt).result()[1:] != pytest.approx(first[1:], abs=1e-3)
    assert before.compute_logprobs(prompt).result() == first
    again = gateway.service().create_sampling_client(model_path=named).result()
    assert again.compute_logprobs(prompt).result() == first
    base = gateway.service().create_sampling_client(base_model=str(gateway.model)).result()
    expected = Oracle(gateway.model, None).logits([*PROMPT, 7]).log_softmax(-1).detach()
    assert base.compute_logprobs(prompt).result()[4] == pytest.approx(
        expected[3][3].item(), abs=5e-5
    )
