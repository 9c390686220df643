"""One step of a run over several epochs, against a loop of plain torch in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.client import TrainerClient
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.training import train_step
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample
from sluice.weights.store import WeightStore
from tests.service.trainer.harness import RunningTrainer, make_group

RATE, DECAY, STEPS, EPSILON, NORM = 0.01, 0.2, 40, 1e-3, 0.1  # of AdamW, down to 0 at STEPS
OPTIM = {
    "learning_rate": RATE,
    "weight_decay": DECAY,
    "schedule": "linear",
    "decay_steps": STEPS,
    "epsilon": EPSILON,
    "max_grad_norm": NORM,
}
CLIP = 0.02
SIZES = (4, 2, 5, 3, 4)
DIFFERENCE = AdvantageSpec(name="grpo", scale_by_std=False)  # reward - mean of the group


def clipped(old: str) -> LossSpec:
    return LossSpec(name="ppo_clip", clip_low=CLIP, old_logprobs=old)


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


def drawn(groups: list[Any], lot: str, epochs: int, count: int) -> list[list[Any]]:
    """An epoch's mini-batches: the first as they come, the others by lot."""
    batches = []
    cuts = [len(groups) * cut // count for cut in range(count + 1)]
    for epoch in range(epochs):
        order = list(groups)
        if epoch > 0:
            random.Random(f"{lot}/{epoch}").shuffle(order)
        batches += [order[begin:end] for begin, end in itertools.pairwise(cuts)]
    return batches


async def check_epochs(
    client: TrainerClient,
    running: RunningTrainer,
    model: Path,
    name: str,
    *,
    old: str = "old",
    mini_batches: int = 2,
    epochs: int = 3,
) -> None:
    """A trainer that starts from `model`, with OPTIM, comes to the weights of the plain loop.

    With as many mini-batches as groups one of them has nothing to learn.
    """
    seed, groups = 5, make(name)
    oracle = Oracle(load(model))
    for sample in (sample for group in groups for sample in group):
        with torch.no_grad():
            given = torch.from_numpy(np.asarray(sample.columns["rollout_logprobs"])).double()
            oracle.old[sample.sample_id] = given if old == "rollout" else oracle.logprobs(sample)
    batches = drawn(groups, f"{seed}/{name}", epochs, mini_batches)
    shares = [{group[0].group_id for group in batch} for batch in batches]
    assert shares[mini_batches : 2 * mini_batches] != shares[:mini_batches], "or lots are nothing"
    oracle.train(batches)
    report = await train_step(
        client,
        AlgorithmConfig(
            advantage=DIFFERENCE, loss=clipped(old), mini_batches=mini_batches, epochs=epochs
        ),
        [store(running, group) for group in groups],
        optimizer_step=0,
        name=name,
        seed=seed,
    )
    steps = epochs * mini_batches
    assert report.optimizer_step == (await client.get()).step == steps
    assert not report.skipped_reasons
    version = (await client.publish_weights()).weights.version
    directory = WeightStore(running.store / "weights").get(version).directory
    assert directory is not None
    found, wanted, before = (
        made.state_dict() for made in (load(directory), oracle.model, load(model))
    )
    assert found.keys() == wanted.keys() == before.keys()
    gap = max(float((found[key] - wanted[key]).abs().max()) for key in wanted)
    moved = max(float((before[key] - wanted[key]).abs().max()) for key in wanted)
    assert gap < 2e-6 < 1e-2 < moved
    metrics, ratios = report.metrics, torch.cat(oracle.ratios)
    assert metrics["tokens"] == epochs * sum(s.response_length for group in groups for s in group)
    assert metrics["ratio"] == pytest.approx(float(ratios.mean()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(np.mean(oracle.norms), rel=1e-3)
    assert max(oracle.norms) > NORM, "or nothing would be cut"
    assert metrics["learning_rate"] == pytest.approx(RATE * (1 - (steps - 1) / STEPS))
