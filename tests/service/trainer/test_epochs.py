"""Several epochs over one batch, against a loop of plain torch in float64."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.client import TrainerClient
from sluice.loop.config import AlgorithmConfig, CriticConfig
from sluice.loop.training import Critic, train_step
from tests.patience import PATIENCE
from tests.service.trainer.epochs import (
    DIFFERENCE,
    OPTIM,
    SIZES,
    Oracle,
    check_epochs,
    clipped,
    load,
    make,
    store,
)
from tests.service.trainer.harness import ACTIVE, RunningTrainer, running_trainer, until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    with running_trainer(tmp_path_factory.mktemp("epochs"), model, optim=OPTIM) as running:
        yield running


@pytest.fixture
async def fresh(running: RunningTrainer) -> AsyncIterator[TrainerClient]:
    """A client of the trainer, which is as it was at its start."""
    async with running.client() as client:
        now = await until(client, lambda now: now.state == ACTIVE)
        if not now.checkpoint:
            await client.save_checkpoint("fresh")
        await client.load_checkpoint("checkpoints/fresh")
        yield client
        assert not (await client.get()).batches


@pytest.mark.parametrize("old", ["old", "rollout"])
async def test_epochs_are_those_of_a_plain_loop(
    fresh: TrainerClient, running: RunningTrainer, model: Path, old: str
) -> None:
    """With ratios to what was known before the first of them."""
    await check_epochs(fresh, running, model, f"plain-{old}", old=old)


async def test_a_mini_batch_that_teaches_nothing_is_a_step_as_any_other(
    fresh: TrainerClient, running: RunningTrainer, model: Path
) -> None:
    await check_epochs(fresh, running, model, "each", mini_batches=len(SIZES), epochs=2)


async def test_the_clip_has_its_work_from_the_second_epoch_on(
    fresh: TrainerClient, running: RunningTrainer
) -> None:
    """At the temperature of the loss, as are the log-probs of the reference."""
    groups = [store(running, group) for group in make("clip")]
    loss = clipped("old").model_copy(update={"temperature": 0.7, "kl_coefficient": 0.01})
    once = AlgorithmConfig(advantage=DIFFERENCE, loss=loss)
    reports = []
    for algorithm in (once, once.model_copy(update={"epochs": 2})):
        await fresh.load_checkpoint("checkpoints/fresh")
        reports.append(await train_step(fresh, algorithm, groups, optimizer_step=0, name="clip"))
    first, both = (report.metrics for report in reports)
    assert first["ratio"] == pytest.approx(1, abs=1e-6)
    assert (first["clipped_low"], first["clipped_high"]) == (0, 0)
    assert both["clipped_low"] + both["clipped_high"] > 0.05
    assert both["kl_old_k3"] > 100 * max(first["kl_old_k3"], 1e-9)
    assert both["kl_reference"] > 1e-9 > abs(first["kl_reference"])


@pytest.mark.parametrize("mini_batches", [1, 2])
async def test_the_mismatch_with_engines_is_that_of_before_the_first_step(
    fresh: TrainerClient, running: RunningTrainer, model: Path, mini_batches: int
) -> None:
    """Whose log-probs are the policy's but for some noise, which is all that it tells."""
    name, noise, plain = f"gap-{mini_batches}", np.random.default_rng(3), Oracle(load(model))
    groups, gaps = make(name), []
    del groups[3]  # nothing is learned of it, nor measured
    for group in groups:
        for index, sample in enumerate(group):
            with torch.no_grad():
                exact = plain.logprobs(sample).numpy()
            told = (exact + noise.normal(0, 1e-3, len(exact))).astype(np.float32)
            group[index] = replace(sample, columns={**sample.columns, "rollout_logprobs": told})
            gaps.append(exact - told)
    report = await train_step(
        fresh,
        AlgorithmConfig(
            advantage=DIFFERENCE, loss=clipped("rollout"), mini_batches=mini_batches, epochs=3
        ),
        [store(running, group) for group in groups],
        optimizer_step=0,
        name=name,
    )
    first = np.concatenate(gaps[: sum(map(len, groups[: len(groups) // mini_batches]))])
    wanted = pytest.approx(np.abs(first).mean(), rel=0.01)
    assert report.metrics["rollout_mismatch"] == wanted
    assert report.metrics["rollout_mismatch_k3"] == pytest.approx((first**2 / 2).mean(), rel=0.05)
    assert await asyncio.to_thread(gauge, running, "rollout_mismatch_logprob") == wanted


def gauge(running: RunningTrainer, name: str) -> float:
    """As Prometheus reads it."""
    told = json.loads((running.store.parent / "address.json").read_text())
    request = urllib.request.Request(
        f"http://{told['metrics_address']}/metrics", headers={"Authorization": "Bearer a secret"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        text = answer.read().decode()
    (line,) = (each for each in text.splitlines() if each.startswith(f"sluice_trainer_{name} "))
    return float(line.split()[1])


async def test_one_epoch_is_the_step_of_before_to_the_bit(
    fresh: TrainerClient, running: RunningTrainer
) -> None:
    """Of each half of the groups, as they come, one optimizer step."""
    groups, loss = make("once"), clipped("old")
    samples = [sample for group in groups for sample in group]
    batch = (await fresh.upload_batch("once", len(samples), samples=samples)).batch
    await fresh.compute_logprobs(batch)
    await fresh.compute_advantages(batch, DIFFERENCE)
    for step, half in enumerate((groups[:2], groups[2:])):
        ids = [sample.sample_id for group in half for sample in group]
        await fresh.forward_backward(
            batch, loss, expected_step=step, part_id=str(step), sample_ids=ids
        )
        await fresh.step_optimizer(step, [str(step)])
    await fresh.delete_batch(batch)
    expected = (await fresh.publish_weights()).weights.digest
    await fresh.load_checkpoint("checkpoints/fresh")
    algorithm = AlgorithmConfig(advantage=DIFFERENCE, loss=loss, mini_batches=2, epochs=1)
    stored = [store(running, group) for group in groups]
    await train_step(fresh, algorithm, stored, optimizer_step=0, name="once", seed=1)
    assert (await fresh.publish_weights()).weights.digest == expected


async def test_a_critic_has_the_epochs_of_the_policy(
    fresh: TrainerClient, running: RunningTrainer, model: Path, tmp_path: Path
) -> None:
    """Its clip is around the values of before the first: a new head says 0."""
    groups = [store(running, group) for group in make("critic")]
    settings = {"store": str(running.store), "name": "critic", "head": "value"}
    loss = LossSpec(name="value", value_clip=1e-3)
    gae = AlgorithmConfig(advantage=AdvantageSpec(name="gae"), loss=clipped("old"))
    with running_trainer(tmp_path / "critic", model, **settings) as other:
        critic = Critic(other.address, CriticConfig(loss=loss), other.security, PATIENCE)
        try:
            await critic.begin()
            saved = (await critic.client.save_checkpoint("critic")).checkpoint
            steps, metrics = [], []
            for algorithm in (
                gae,
                gae.model_copy(update={"epochs": 2}),
                gae.model_copy(update={"epochs": 3, "mini_batches": 2}),
            ):
                await critic.load(saved, 0)
                await fresh.load_checkpoint("checkpoints/fresh")
                report = await train_step(
                    fresh, algorithm, groups, optimizer_step=0, name="c", critic=critic
                )
                steps.append((report.optimizer_step, critic.optimizer_step))
                metrics.append(report.metrics)
            alone = await train_step(
                fresh,
                gae.model_copy(update={"epochs": 2}),
                groups,
                optimizer_step=report.optimizer_step,
                name="alone",
                critic=critic,
                critic_alone=True,
            )
            now = await critic.client.get()
            assert now.step == critic.optimizer_step
            assert not now.batches
        finally:
            await critic.close()
    assert steps == [(1, 1), (2, 2), (6, 6)]
    assert (alone.optimizer_step, critic.optimizer_step) == (6, 8)
    assert alone.metrics.keys() >= {"reward_mean", "critic_loss"}
    assert metrics[0]["critic_clipped_value"] == 0 < metrics[1]["critic_clipped_value"]
