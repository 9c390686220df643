"""Log-probs, losses, gradients and steps of the client's calls against transformers and peft."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from tests.tinker.base import EQUALS_ID, reversed_pair
from tests.tinker.conftest import Gateway, datum
from tests.tinker.oracle import Oracle, largest_difference, published

LINEAR = types.AdamParams(learning_rate=50.0, beta1=0.0, beta2=0.0, eps=1e4)  # a step of -lr/eps g
LOSSES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    ("dro", {}),
    ("dro", {"beta": 0.7}),
]


def folder_of(gateway: Gateway, client: tinker.TrainingClient) -> Path:
    """Where the store has the weights of now, as peft reads them."""
    client.save_weights_for_sampler(f"look-{random.random()}").result()
    return max(gateway.weights.iterdir(), key=lambda path: int(path.name))


def rows(oracle: Oracle, name: str, count: int = 6) -> list[types.Datum]:
    """Sequences of several lengths, off policy by enough for every clip to cut some tokens."""
    rng, data = random.Random(7), []
    for _ in range(count):
        tokens = [rng.randrange(10) for _ in range(rng.randrange(1, 9))] + [EQUALS_ID]
        tokens += reversed_pair(rng)
        numbers = len(tokens) - 1
        signed = [rng.uniform(-2, 2) * (rng.random() < 0.8) for _ in range(numbers)]
        if name == "cross_entropy":
            data.append(datum(tokens, weights=signed))
            continue
        bare = datum(tokens, weights=signed)
        near = oracle.logprobs(bare).detach().float()
        near += torch.tensor([rng.uniform(-1.5, 1.5) for _ in range(numbers)])
        data.append(datum(tokens, logprobs=near, advantages=signed))
    return data


@pytest.mark.parametrize(("name", "config"), LOSSES)
def test_losses_and_gradients_are_those_of_the_documentation(
    gateway: Gateway, name: str, config: dict[str, float]
) -> None:
    client = gateway.begin(seed=3)
    warm = [datum(reversed_pair(random.Random(i))) for i in range(4)]  # B is zero before
    client.forward_backward(warm, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    start = folder_of(gateway, client)
    oracle, before = Oracle(gateway.model, start), published(start)
    data = rows(oracle, name)

    asked = client.forward(data, name, config or None).result()
    for each, output in zip(data, asked.loss_fn_outputs, strict=True):
        expected = oracle.logprobs(each).detach()
        assert (output["logprobs"].to_torch().double() - expected).abs().max() < 5e-5
    answers = [  # two calls add up as one
        client.forward_backward(data[:2], name, config or None),
        client.forward_backward(data[2:], name, config or None),
    ]
    stepped = client.optim_step(LINEAR).result()
    loss = oracle.loss(data, name, **config)
    loss.backward()
    norm = oracle.step(LINEAR)

    total = sum(answer.result().metrics["loss:sum"] for answer in answers)
    assert total == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert asked.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert stepped.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    found = published(folder_of(gateway, client))
    assert largest_difference(found, oracle.tensors(), before) < 2e-3


def test_every_number_of_adam_counts_in_every_step(gateway: Gateway) -> None:
    client = gateway.begin()
    start = folder_of(gateway, client)
    oracle, before = Oracle(gateway.model, start), published(start)
    steps = [
        types.AdamParams(learning_rate=2e-3),
        types.AdamParams(learning_rate=1e-3, beta1=0.5, beta2=0.6, eps=1e-3),
        types.AdamParams(learning_rate=3e-3, weight_decay=0.3),
        types.AdamParams(learning_rate=2e-3, grad_clip_norm=0.05, eps=1e-2),
        types.AdamParams(learning_rate=0.0),
        types.AdamParams(learning_rate=1e-3, beta1=0.0, beta2=0.999, eps=1e-8),
    ]
    for number, params in enumerate(steps):
        data = [datum(reversed_pair(random.Random(10 * number + i))) for i in range(4)]
        data = [datum([*d.model_input.to_ints(), 11], weights=[1.0] * 5) for d in data]
        client.forward_backward(data, "cross_entropy")
        found = client.optim_step(params).result()
        oracle.loss(data, "cross_entropy").backward()
        assert found.metrics["grad_norm"] == pytest.approx(oracle.step(params), rel=1e-3)
    found_tensors = published(folder_of(gateway, client))
    assert largest_difference(found_tensors, oracle.tensors(), before) < 5e-3


def test_a_loss_of_ones_own_has_its_gradient(gateway: Gateway) -> None:
    client = gateway.begin()
    start = folder_of(gateway, client)
    oracle, before = Oracle(gateway.model, start), published(start)
    data = [datum(reversed_pair(random.Random(i))) for i in range(3)]

    def spread(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
        loss = torch.cat(logprobs).var() + sum((each**2).sum() for each in logprobs)
        return loss, {"spread": float(loss)}

    answer = client.forward_backward_custom(data, spread).result()
    client.optim_step(LINEAR).result()
    loss, _ = spread(data, [oracle.logprobs(each) for each in data])
    loss.backward()
    oracle.step(LINEAR)
    assert answer.metrics["spread"] == pytest.approx(loss.item(), rel=1e-5)
    found = published(folder_of(gateway, client))
    changed = {n for n, t in oracle.tensors().items() if (t - before[n].double()).abs().max() > 0}
    one = {name: found[name] for name in changed}  # of a B that is zero, A has no gradient
    kept = {name: before[name] for name in changed}
    assert largest_difference(one, {n: oracle.tensors()[n] for n in changed}, kept) < 2e-3


def test_adapters_begin_by_seed_and_have_layers_as_asked(gateway: Gateway) -> None:
    def begun(**options: object) -> dict[str, torch.Tensor]:
        return published(folder_of(gateway, gateway.begin(**options)))

    first, again, other = begun(seed=5), begun(seed=5), begun(seed=6)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())
    mlp = begun(train_attn=False)
    assert {name.split(".")[-3] for name in mlp} == {"gate_proj", "up_proj", "down_proj"}
    attention = begun(train_mlp=False)
    assert {name.split(".")[-3] for name in attention} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_step_whose_gradient_is_no_number_is_told(gateway: Gateway) -> None:
    client = gateway.begin()
    huge = [datum(reversed_pair(random.Random(0)), weights=[1e30] * 5)]
    client.forward_backward(huge, "cross_entropy").result()
    client.forward_backward(huge, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="no step was taken"):
        client.optim_step(types.AdamParams(beta2=0.0)).result()
    client.forward_backward([datum(reversed_pair(random.Random(0)))], "cross_entropy")
    after = client.optim_step(types.AdamParams()).result()
    assert math.isfinite(after.metrics["grad_norm"])
