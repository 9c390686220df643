"""Steps of a reward model, against a loop of plain transformers and torch in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody has it
from transformers import AutoModelForSequenceClassification

from examples.models.tiny_qwen3 import build_tiny_qwen3
from examples.models.value_head import build_value_head
from sluice.client import TrainerClient
from sluice.config import parse_config
from sluice.loop.config import RewardModelRunConfig
from sluice.loop.training import measure_rows, train_step
from sluice.samples.sample import Sample
from sluice.weights.store import WeightStore
from tests.service.trainer.epochs import OPTIM, Oracle, store
from tests.service.trainer.harness import RunningTrainer

STEPS, PAIRS = 3, 5
TRAINER = {"head": "reward", "optim": OPTIM}
CENTERED = {"centering": 0.3}


class Pair(NamedTuple):
    """Whole texts, and by how much the first is to be ahead; None where it is not said."""

    chosen: np.ndarray
    rejected: np.ndarray
    margin: float | None


def build_classifier(directory: Path) -> Path:
    """A tiny sequence classifier with a random head."""
    return build_value_head(build_tiny_qwen3(directory / "body", 0), directory / "head", 1)


def batches(margins: bool) -> Iterator[list[Pair]]:
    """Those of all steps: random ones of unequal lengths that begin alike, one of a token."""
    for step in range(STEPS):
        random, pairs = np.random.default_rng(step), []
        for _ in range(PAIRS):
            prompt = random.integers(0, 12, size=int(random.integers(1, 6)))
            answers = [random.integers(0, 12, size=int(random.integers(1, 9))) for _ in range(2)]
            margin = float(random.normal()) if margins and random.random() < 0.7 else None
            pairs.append(Pair(*(np.concatenate([prompt, each]) for each in answers), margin))
        yield [*pairs, Pair(np.array([3]), np.array([4, 5]), None)]


def samples_of(name: str, pairs: Sequence[Pair]) -> list[Sample]:
    """What trainers are given: whatever token stands behind a text, and it alone is trained."""
    random, samples = np.random.default_rng(99), []
    for number, pair in enumerate(pairs):
        for episode, tokens in enumerate((pair.chosen, pair.rejected)):
            columns = {"loss_mask": np.ones(1, np.bool_), "reward": 1.0 - episode}
            margin = {} if pair.margin is None else {"margin": pair.margin}
            samples.append(
                Sample(
                    sample_id=f"{name}-{number}/{episode}",
                    group_id=f"{name}-{number}",
                    token_ids=np.append(tokens, random.integers(0, 12)).astype(np.int32),
                    prompt_length=len(tokens),
                    columns={**columns, **margin, "episode": float(episode)},
                )
            )
    return samples


def load(directory: Path) -> Any:
    """In float64; transformers says so if it does not find every tensor, and use it."""
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float64, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert model.config.num_labels == 1
    return model


class RewardOracle(Oracle):
    """Bradley-Terry by autograd through the rewards of both texts."""

    def __init__(self, model: Any, settings: Mapping[str, float]) -> None:
        super().__init__(model)
        self.settings = settings
        self.told: list[dict[str, float]] = []

    def reward(self, tokens: np.ndarray) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.from_numpy(tokens.astype(np.int64))[None]).logits
        return found[0, 0]

    def loss(self, pairs: Sequence[Pair]) -> torch.Tensor:  # type: ignore[override]
        losses, told = [], []
        for pair in pairs:
            good, bad = self.reward(pair.chosen), self.reward(pair.rejected)
            loss = -F.logsigmoid(good - bad - (pair.margin or 0.0))
            loss = loss + self.settings.get("centering", 0.0) * (good + bad) ** 2
            losses.append(loss)
            told.append([each.item() for each in (loss, good > bad, good, bad, good - bad)])
        names = ("preference_loss", "accuracy", "reward_chosen", "reward_rejected", "reward_margin")
        means = np.mean(told, 0).tolist()
        self.told.append(dict(zip(names, means, strict=True)))
        return torch.stack(losses).mean()


async def check_reward_model(
    client: TrainerClient,
    running: RunningTrainer,
    model: Path,
    settings: Mapping[str, float] = CENTERED,
    *,
    margins: bool = True,
) -> None:
    """A trainer that starts from the classifier `model`, with TRAINER, comes to the weights of the
    plain loop; what it publishes is a classifier that gives its rewards."""
    document = {"run_dir": "unused", "trainer": "a:1", "tokenizer": str(model)}
    document |= {"rows": {"file": "unused.jsonl"}, "preference": dict(settings)}
    config = parse_config(RewardModelRunConfig, document)
    oracle = RewardOracle(load(model), settings)
    oracle.train(list(batches(margins)))  # type: ignore[arg-type]
    for step, pairs in enumerate(batches(margins)):
        samples = samples_of(f"step-{step}", pairs)
        group = store(running, samples)
        assert group.blob is not None
        before = await measure_rows(
            client, config.algorithm, group.blob, len(samples), name=f"look-{step}"
        )
        report = await train_step(
            client, config.algorithm, [group], optimizer_step=step, name=f"step-{step}"
        )
        for key, wanted in oracle.told[step].items():
            assert report.metrics[key] == pytest.approx(wanted, rel=1e-4, abs=1e-5), (step, key)
            assert before[key] == report.metrics[key]
        assert report.metrics["grad_norm"] == pytest.approx(oracle.norms[step], rel=1e-3)
    version = (await client.publish_weights()).weights.version
    weights = WeightStore(running.store / "critics" / "trainer" / "weights")
    directory = weights.get(version).directory
    assert directory is not None
    published, start = load(directory), load(model)
    assert type(published) is type(start)
    found, wanted_, first = (each.state_dict() for each in (published, oracle.model, start))
    gap = max(float((found[key] - wanted_[key]).abs().max()) for key in wanted_)
    moved = max(float((first[key] - wanted_[key]).abs().max()) for key in wanted_)
    assert gap < 2e-6 < 1e-2 < moved
    await _check_rewards(client, running, published)


async def _check_rewards(client: TrainerClient, running: RunningTrainer, published: Any) -> None:
    """The trainer's own rewards are those of what it published, by plain transformers."""
    pairs = next(batches(margins=False))
    samples = samples_of("rewards", pairs)
    group, oracle = store(running, samples), RewardOracle(published, {})
    assert group.blob is not None
    batch = (await client.upload_batch("rewards", len(samples), blobs=[group.blob])).batch
    await client.compute_values(batch)
    values = await client.get_columns(batch, ["values"])
    for sample in samples:
        (value,) = values[sample.sample_id]["values"]
        with torch.no_grad():
            assert value == pytest.approx(oracle.reward(sample.token_ids[:-1]).item(), abs=1e-5)
    await client.delete_batch(batch)


__all__ = ["CENTERED", "TRAINER", "build_classifier", "check_reward_model"]
