"""Several epochs over one batch, against a loop of plain torch in float64."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.client import TrainerClient
from sluice.loop.config import AlgorithmConfig, CriticConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.training import Critic, train_step
from sluice.samples.arrow import encode_group
from sluice.samples.blobs import BlobStore
from sluice.samples.sample import Sample
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE
from tests.service.trainer.harness import ACTIVE, RunningTrainer, make_group, running_trainer, until

RATE, DECAY, STEPS, EPSILON, NORM = 0.01, 0.2, 40, 1e-3, 0.1  # of AdamW, down to 0 at STEPS
CLIP = 0.02
SIZES = (4, 2, 5, 3, 4)
DIFFERENCE = AdvantageSpec(name="grpo", scale_by_std=False)  # reward - mean of the group


def clipped(old: str) -> LossSpec:
    return LossSpec(name="ppo_clip", clip_low=CLIP, old_logprobs=old)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    optim = {
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "schedule": "linear",
        "decay_steps": STEPS,
        "epsilon": EPSILON,
        "max_grad_norm": NORM,
    }
    with running_trainer(tmp_path_factory.mktemp("epochs"), model, optim=optim) as running:
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


def store(running: RunningTrainer, samples: Sequence[Sample]) -> LedgerGroup:
    return LedgerGroup(
        position=0,
        group_id=samples[0].group_id,
        issue_step=0,
        state="generated",
        blob=BlobStore(running.store).put(encode_group(samples)),
        sample_count=len(samples),
    )


def make(name: str) -> list[list[Sample]]:
    """Groups of several sizes whose rewards differ; of one nothing is learned."""
    groups = [make_group(f"{name}-{i}", size=size, seed=i) for i, size in enumerate(SIZES)]
    groups[3] = make_group(f"{name}-3", size=SIZES[3], seed=3, rewards=[0.5] * SIZES[3])
    return groups


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


@dataclass
class Oracle:
    """Clipped policy gradients with AdamW, in float64."""

    model: Any
    old: dict[str, torch.Tensor] = field(default_factory=dict)
    ratios: list[torch.Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def logprobs(self, sample: Sample) -> torch.Tensor:
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = self.model(tokens[None]).logits[0, sample.prompt_length - 1 : -1]
        found: torch.Tensor = logits.log_softmax(-1).gather(1, tokens[sample.prompt_length :, None])
        return found[:, 0]

    def loss(self, groups: Sequence[Sequence[Sample]]) -> torch.Tensor:
        losses = []
        for group in groups:
            mean = sum(float(sample.columns["reward"]) for sample in group) / len(group)
            for sample in group:
                advantage = float(sample.columns["reward"]) - mean
                ratio = (self.logprobs(sample) - self.old[sample.sample_id]).exp()
                if abs(advantage) > 1e-9:
                    self.ratios.append(ratio.detach())
                surrogate = ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
                losses.append(-torch.minimum(ratio * advantage, surrogate))
        return torch.cat(losses).mean()

    def train(self, batches: Sequence[Sequence[Sequence[Sample]]]) -> None:
        parameters = [
            {"params": [each], "weight_decay": DECAY if each.ndim > 1 else 0.0}
            for each in self.model.parameters()
        ]
        adam = torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=EPSILON)
        for step, batch in enumerate(batches):
            for group in adam.param_groups:
                group["lr"] = RATE * (1 - step / STEPS)
            adam.zero_grad()
            self.loss(batch).backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
            self.norms.append(float(norm))
            adam.step()


def drawn(groups: list[Any], name: str, seed: int, epochs: int) -> list[list[Any]]:
    """Two mini-batches an epoch: the first as they come, the others by lot."""
    batches = []
    for epoch in range(epochs):
        order = list(groups)
        if epoch > 0:
            random.Random(f"{seed}/{name}/{epoch}").shuffle(order)
        batches += [order[:2], order[2:]]
    return batches


@pytest.mark.parametrize("old", ["old", "rollout"])
async def test_epochs_are_those_of_a_plain_loop(
    fresh: TrainerClient, running: RunningTrainer, model: Path, old: str
) -> None:
    """With ratios to what was known before the first of them."""
    name, seed, groups = f"plain-{old}", 5, make(f"plain-{old}")
    oracle = Oracle(load(model))
    for sample in (sample for group in groups for sample in group):
        with torch.no_grad():
            given = torch.from_numpy(np.asarray(sample.columns["rollout_logprobs"])).double()
            oracle.old[sample.sample_id] = given if old == "rollout" else oracle.logprobs(sample)
    oracle.train(drawn(groups, name, seed, epochs=3))
    report = await train_step(
        fresh,
        AlgorithmConfig(advantage=DIFFERENCE, loss=clipped(old), mini_batches=2, epochs=3),
        [store(running, group) for group in groups],
        optimizer_step=0,
        name=name,
        seed=seed,
    )
    assert report.optimizer_step == (await fresh.get()).step == 6
    assert not report.skipped_reasons
    version = (await fresh.publish_weights()).weights.version
    found = load(WeightStore(running.store / "weights").get(version).directory).state_dict()
    wanted, before = oracle.model.state_dict(), load(model).state_dict()
    assert found.keys() == wanted.keys() == before.keys()
    gap = max(float((found[key] - wanted[key]).abs().max()) for key in wanted)
    moved = max(float((before[key] - wanted[key]).abs().max()) for key in wanted)
    assert gap < 2e-6 < 1e-2 < moved
    metrics, ratios = report.metrics, torch.cat(oracle.ratios)
    assert metrics["tokens"] == 3 * sum(s.response_length for group in groups for s in group)
    assert metrics["ratio"] == pytest.approx(float(ratios.mean()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(np.mean(oracle.norms), rel=1e-3)
    assert max(oracle.norms) > NORM, "or nothing would be cut"
    assert metrics["learning_rate"] == pytest.approx(RATE * (1 - 5 / STEPS))


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
