"""PPO with a critic: two trainers of one store, and columns that travel between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.client import TrainerClient
from sluice.samples.sample import Sample
from sluice.weights.store import WeightStore
from tests.service.trainer.harness import (
    ACTIVE,
    PPO,
    RunningTrainer,
    make_groups,
    running_trainer,
    until,
)
from tests.service.trainer.test_errors import INVALID, PRECONDITION, assert_is, refusal

GAMMA, LAMBDA, CLIP = 0.9, 0.8, 0.05
GAE = AdvantageSpec(name="gae", gamma=GAMMA, gae_lambda=LAMBDA)
VALUE = LossSpec(name="value", value_clip=CLIP)


@pytest.fixture
async def critic(
    trainer: RunningTrainer, model: Path, tmp_path: Path
) -> AsyncIterator[TrainerClient]:
    settings = {"store": str(trainer.store), "name": "critic", "head": "value"}
    async with AsyncExitStack() as stack:
        running = stack.enter_context(running_trainer(tmp_path / "critic", model, **settings))
        client = await stack.enter_async_context(running.client())
        await until(client, lambda now: now.state == ACTIVE)
        yield client


def with_observations(samples: list[Sample]) -> list[Sample]:
    """Every third response token was not the policy's; the last may be among them."""
    return [
        replace(
            sample,
            columns={**sample.columns, "loss_mask": np.arange(sample.response_length) % 3 != 2},
        )
        for sample in samples
    ]


def with_returns(sample: Sample) -> dict[str, np.ndarray | float]:
    zeros = np.zeros(sample.response_length, np.float32)
    return {"returns": zeros, "values": zeros}


def reference(sample: Sample, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) token by token, in float64: the reward comes with the last trained
    token, and an observation is no step."""
    mask = np.asarray(sample.columns["loss_mask"])
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    following = trace = 0.0
    reward = float(sample.columns["reward"])
    for token in reversed(np.flatnonzero(mask)):
        value = float(values[token])
        trace = reward + GAMMA * following - value + GAMMA * LAMBDA * trace
        advantages[token], returns[token] = trace, trace + value
        following, reward = value, 0.0
    return advantages, returns


def reference_loss(new: np.ndarray, old: np.ndarray, returns: np.ndarray) -> np.ndarray:
    clipped = old + np.clip(new - old, -CLIP, CLIP)
    return 0.5 * np.maximum((new - returns) ** 2, (clipped - returns) ** 2)


async def test_two_steps_of_ppo(client: TrainerClient, critic: TrainerClient) -> None:
    samples = with_observations(make_groups("ppo"))
    batches = {}
    for trainer in (client, critic):
        uploaded = await trainer.upload_batch("ppo", len(samples), samples=samples)
        batches[trainer] = uploaded.batch
    errors, seen = [], []
    for step in range(2):
        await critic.compute_values(batches[critic])
        values = await critic.get_columns(batches[critic], ["values"])
        assert await client.put_columns(batches[client], values) == len(samples)
        await client.compute_advantages(batches[client], GAE)
        found = await client.get_columns(batches[client], ["advantages", "returns"])
        for sample in samples:
            old = values[sample.sample_id]["values"]
            advantages, returns = reference(sample, old)
            columns = found[sample.sample_id]
            np.testing.assert_allclose(columns["advantages"], advantages, atol=1e-5)
            np.testing.assert_allclose(columns["returns"], returns, atol=1e-5)
        seen.append(np.concatenate([row["values"] for row in values.values()]))
        targets = {name: {"returns": row["returns"]} for name, row in found.items()}
        await critic.put_columns(batches[critic], targets)
        for trainer, loss in ((client, PPO), (critic, VALUE)):
            now = (await trainer.get()).step
            part = f"part-{step}"
            passed = await trainer.forward_backward(
                batches[trainer], loss, expected_step=now, part_id=part
            )
            assert passed.token_count == sum(int(s.columns["loss_mask"].sum()) for s in samples)  # type: ignore[union-attr]
            assert (await trainer.step_optimizer(now, [part])).outcome == 1
        errors.append(passed.metrics["value_loss"])
    assert not seen[0].any(), "a new head says 0"
    assert np.abs(seen[1]).min() > 0, "the second step sees what the first has learned"
    assert errors[1] < errors[0]


async def test_returns_that_a_client_has_are_kept_by_an_estimator_without_any(
    client: TrainerClient, critic: TrainerClient
) -> None:
    """They were dropped without a word, and the loss of the critic then lacked them."""
    samples = make_groups("own")
    own = {s.sample_id: with_returns(s) for s in samples[:-1]}
    for columns in own.values():
        columns["returns"] += 1.0
    batch = (await critic.upload_batch("own", len(samples), samples=samples)).batch
    await critic.put_columns(batch, own)
    await critic.compute_advantages(batch, AdvantageSpec(name="grpo"))
    found = await critic.get_columns(batch, ["returns"])
    kept = {name: row["returns"] for name, row in found.items() if row}
    assert kept.keys() == own.keys() and all((row == 1).all() for row in kept.values())
    error = await refusal(critic.forward_backward(batch, VALUE, expected_step=0, part_id="all"))
    assert_is(error, PRECONDITION, "COLUMN_MISSING")
    passed = await critic.forward_backward(
        batch, VALUE, expected_step=0, part_id="own", sample_ids=list(own)
    )
    assert passed.loss == pytest.approx(0.5)


async def test_the_clip_is_around_the_values_of_the_batch(
    client: TrainerClient, critic: TrainerClient
) -> None:
    """`values` as they were put, not those of the pass: the loss is the larger of the two."""
    samples = with_observations(make_groups("clip"))
    batch = (await critic.upload_batch("clip", len(samples), samples=samples)).batch
    random = np.random.default_rng(0)

    def draw(sample: Sample) -> np.ndarray:
        return random.normal(0, 0.3, sample.response_length).astype(np.float32)

    put = {s.sample_id: {"values": draw(s), "returns": draw(s)} for s in samples}
    await critic.put_columns(batch, put)
    passed = await critic.forward_backward(batch, VALUE, expected_step=0, part_id="p")
    losses = [
        reference_loss(
            np.zeros(s.response_length),
            put[s.sample_id]["values"].astype(np.float64),
            put[s.sample_id]["returns"].astype(np.float64),
        )[np.asarray(s.columns["loss_mask"])]
        for s in samples
    ]
    assert passed.loss == pytest.approx(np.concatenate(losses).mean(), rel=1e-5)


async def test_each_trainer_does_its_own(
    client: TrainerClient, critic: TrainerClient, trainer: RunningTrainer
) -> None:
    samples = make_groups("own", count=1)
    for each in (client, critic):
        await each.upload_batch("own", len(samples), samples=samples)
    batch = "batches/own"
    assert (await client.get()).head == "policy"
    described = await critic.get()
    assert (described.head, list(described.losses)) == ("value", ["value", "linear_value"])
    assert described.name == "critic"
    error = await refusal(client.compute_values(batch))
    assert_is(error, PRECONDITION, "WRONG_HEAD", head="policy")
    error = await refusal(critic.compute_logprobs(batch))
    assert_is(error, PRECONDITION, "WRONG_HEAD", head="value")
    for each, loss in ((client, LossSpec(name="value")), (critic, PPO)):
        step = (await each.get()).step
        error = await refusal(each.forward_backward(batch, loss, expected_step=step, part_id="p"))
        assert_is(error, INVALID, "INVALID_FIELD", field="loss.name")
    await critic.put_columns(batch, {s.sample_id: with_returns(s) for s in samples})
    options: Any = {"expected_step": step, "part_id": "p", "keep_logprobs": True}
    error = await refusal(critic.forward_backward(batch, VALUE, **options))
    assert_is(error, INVALID, "INVALID_FIELD", field="keep_logprobs")
    error = await refusal(client.compute_advantages(batch, GAE))
    assert_is(error, PRECONDITION, "COLUMN_MISSING", columns="values", sample_id="own-0/0")
    error = await refusal(client.put_columns(batch, {"own-0/9": {"reward": 1.0}}))
    assert_is(error, grpc.StatusCode.NOT_FOUND, "SAMPLE_NOT_FOUND", name="own-0/9")


async def test_a_critic_keeps_apart_what_it_publishes(
    client: TrainerClient, critic: TrainerClient, trainer: RunningTrainer
) -> None:
    """An engine that takes the newest weights of the store must never take a critic's."""
    newest = (await client.publish_weights()).weights.version
    saved = await critic.save_checkpoint("critic-0")
    published = await critic.publish_weights()
    assert (await client.publish_weights()).weights.version == newest + 1
    kept = trainer.store / "critics" / "critic"
    assert WeightStore(kept / "weights").get(published.weights.version).step == 0
    assert (await critic.load_checkpoint(saved.checkpoint)).step == 0
    error = await refusal(client.load_checkpoint(saved.checkpoint))
    assert_is(error, grpc.StatusCode.NOT_FOUND, "CHECKPOINT_NOT_FOUND")
