"""Processes that are killed under a training client: its retries go on, and no step counts twice.

What is left is compared to the bit with the same requests of a client that nothing happened to.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import stop_stack, wait_until
from tests.tinker.base import EQUALS_ID, reversed_pair
from tests.tinker.conftest import Gateway, datum, start_gateway
from tests.tinker.oracle import published
from tests.tinker.test_training import folder_of

STEPS = 8
ADAM = types.AdamParams(learning_rate=3e-3)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Gateway]:
    gateway = start_gateway(tmp_path_factory.mktemp("killed"), model, checkpoint_steps=3)
    yield gateway
    stop_stack(gateway.stack)


def train(client: tinker.TrainingClient, at: Callable[[int], None] = lambda step: None) -> None:
    """Two passes and a step at a time; `at` is told between them, while they are under way."""
    for step in range(STEPS):
        rows = [datum(reversed_pair(random.Random(100 * step + i))) for i in range(8)]
        first = client.forward_backward(rows[:5], "cross_entropy")
        second = client.forward_backward(rows[5:], "cross_entropy")
        at(step)
        stepped = client.optim_step(ADAM)
        assert first.result().metrics["loss:sum"] > 0
        assert second.result().metrics["loss:sum"] > 0
        assert stepped.result().metrics["step"] == step + 1


@pytest.fixture(scope="module")
def undisturbed(killed: Gateway) -> dict[str, torch.Tensor]:
    client = killed.begin(seed=9)
    train(client)
    return published(folder_of(killed, client))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["tinker", "trainer", "rank"])
@pytest.mark.parametrize("at", [(1,), (2, 4, 5)], ids=["before a checkpoint", "again and again"])
def test_training_goes_on(
    killed: Gateway, undisturbed: dict[str, torch.Tensor], name: str, at: tuple[int, ...]
) -> None:
    client = killed.begin(seed=9)

    def strike(step: int) -> None:
        if step not in at:
            return
        pids = killed.stack.rank_pids() if name == "rank" else [killed.stack.pid(name)]
        kill(pids[0])
        wait_until(lambda: not psutil.pid_exists(pids[0]), what=f"the end of {name}")

    train(client, strike)
    found = published(folder_of(killed, client))
    assert all(torch.equal(tensor, undisturbed[key]) for key, tensor in found.items())


def test_sampling_goes_on_when_engine_and_gateway_are_killed(killed: Gateway) -> None:
    client = killed.begin(seed=9)
    train(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([1, 2, EQUALS_ID])
    params = types.SamplingParams(max_tokens=6, temperature=1.5, seed=5)
    before = [each.tokens for each in sampler.sample(prompt, 4, params).result().sequences]
    for name in ("rollout", "tinker", "router"):
        answers = [sampler.sample(prompt, 4, params) for _ in range(20)]
        kill(killed.stack.pid(name))
        for answer in answers:
            assert [each.tokens for each in answer.result().sequences] == before


def test_weights_are_published_and_sampled_while_the_engine_is_away(killed: Gateway) -> None:
    client = killed.begin(seed=9)
    for others in ([], ["tinker"]):  # a gateway that has yet to ask an engine for anything
        for name in ("rollout", *others):
            kill(killed.stack.pid(name))
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=2)
        prompt = types.ModelInput.from_ints([1, 2, EQUALS_ID])
        assert sampler.sample(prompt, 1, params).result().sequences
