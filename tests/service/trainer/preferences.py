"""Steps of a run on preferences, against a loop of plain transformers and torch in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody has it

from sluice.client import TrainerClient
from sluice.config import parse_config
from sluice.loop.config import DpoConfig
from sluice.loop.training import measure_rows, train_step
from sluice.samples.sample import Sample
from sluice.weights.store import WeightStore
from tests.service.trainer.epochs import OPTIM, Oracle, load, store
from tests.service.trainer.harness import RunningTrainer

STEPS, PAIRS = 3, 5
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"beta": 0.5},
    "smoothed": {"beta": 0.3, "label_smoothing": 0.1, "margin": 0.4, "sft_weight": 0.7},
    "ipo": {"form": "ipo", "beta": 0.2, "average": True},
    "simpo": {"beta": 2.0, "margin": 1.0, "reference": False, "average": True},
}


class Answers(NamedTuple):
    """The samples of a pair: an answer has several where a template tells its turns apart."""

    chosen: list[Sample]
    rejected: list[Sample]


def make_pairs(name: str, seed: int) -> list[Answers]:
    """Random ones of unequal lengths, in part masked; of the last one chosen are two samples."""
    random, pairs = np.random.default_rng(seed), []
    for number in range(PAIRS):
        prompt = random.integers(0, 11, size=int(random.integers(2, 6)))
        answers: list[list[Sample]] = []
        for episode, count in enumerate((2 if number == PAIRS - 1 else 1, 1)):
            samples = []
            for part in range(count):
                response = random.integers(0, 12, size=int(random.integers(1, 9)))
                mask = random.random(len(response)) < 0.8
                mask[-1] = True
                samples.append(
                    Sample(
                        sample_id=f"{name}-{number}/{sum(map(len, answers)) + part}",
                        group_id=f"{name}-{number}",
                        token_ids=np.concatenate([prompt, response]).astype(np.int32),
                        prompt_length=len(prompt),
                        columns={
                            "loss_mask": mask,
                            "reward": 1.0 - episode,
                            "episode": float(episode),
                        },
                    )
                )
            answers.append(samples)
        pairs.append(Answers(*answers))
    return pairs


class PreferenceOracle(Oracle):
    """DPO and its kin by autograd through the log-probs of both answers."""

    def __init__(self, model: Any, reference: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.settings, self.reference = settings, Oracle(reference)
        self.told: list[dict[str, float]] = []

    def _answer(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of log-probs, that less the reference's), by tokens where they are averaged."""
        masks = [torch.from_numpy(np.asarray(sample.columns["loss_mask"])) for sample in samples]
        own = [self.logprobs(sample)[mask] for sample, mask in zip(samples, masks, strict=True)]
        total = torch.cat(own).sum()
        gain = total
        if self.settings.get("reference", True):
            with torch.no_grad():
                others = list(map(self.reference.logprobs, samples))
            gain = total - sum(o[m].sum() for o, m in zip(others, masks, strict=True))
        return total, gain / sum(map(len, own)) if self.settings.get("average") else gain

    def loss(self, groups: Sequence[Answers]) -> torch.Tensor:  # type: ignore[override]
        losses, told = [], []
        beta = self.settings["beta"]
        for chosen, rejected in groups:
            (logp, good), (other, bad) = self._answer(chosen), self._answer(rejected)
            z = beta * (good - bad) - self.settings.get("margin", 0.0)
            wrong = self.settings.get("label_smoothing", 0.0)
            loss = -(1 - wrong) * F.logsigmoid(z) - wrong * F.logsigmoid(-z)
            if self.settings.get("form") == "ipo":
                loss = (good - bad - 1 / (2 * beta)) ** 2
            length = sum(int(np.sum(sample.columns["loss_mask"])) for sample in chosen)
            loss = loss - self.settings.get("sft_weight", 0.0) * logp / length
            losses.append(loss)
            row = {
                "preference_loss": loss,
                "accuracy": (good > bad).double(),
                "reward_chosen": beta * good,
                "reward_rejected": beta * bad,
                "reward_margin": beta * (good - bad),
                "logprob_chosen": logp,
                "logprob_rejected": other,
            }
            told.append({key: value.item() for key, value in row.items()})
        self.told.append({key: float(np.mean([row[key] for row in told])) for key in told[0]})
        return torch.stack(losses).mean()


def batches(name: str) -> Iterator[list[Answers]]:
    """Those of all steps."""
    for step in range(STEPS):
        yield make_pairs(f"{name}-{step}", seed=step)


async def check_preferences(
    client: TrainerClient, running: RunningTrainer, model: Path, kind: str = "plain"
) -> None:
    """A trainer that starts from `model`, with OPTIM, comes to the weights of the plain loop."""
    config = parse_config(
        DpoConfig,
        {
            "run_dir": "unused",
            "trainer": "a:1",
            "tokenizer": str(model),
            "rows": {"file": "unused.jsonl"},
            "preference": SETTINGS[kind],
        },
    )
    oracle = PreferenceOracle(load(model), load(model), SETTINGS[kind])
    oracle.train(list(batches(kind)))  # type: ignore[arg-type]
    for step, pairs in enumerate(batches(kind)):
        samples = [sample for pair in pairs for answer in pair for sample in answer]
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
    assert len({row["accuracy"] for row in oracle.told}) > 1, "or all is said by a constant"
    version = (await client.publish_weights()).weights.version
    directory = WeightStore(running.store / "weights").get(version).directory
    assert directory is not None
    found, wanted_, start = (
        made.state_dict() for made in (load(directory), oracle.model, load(model))
    )
    gap = max(float((found[key] - wanted_[key]).abs().max()) for key in wanted_)
    moved = max(float((start[key] - wanted_[key]).abs().max()) for key in wanted_)
    assert gap < 2e-6 < 1e-2 < moved


__all__ = ["OPTIM", "SETTINGS", "check_preferences"]
