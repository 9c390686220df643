"""Biases of routers that a step has moved reach an engine, in a delta too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.backend import Row
from sluice.client import EngineClient
from sluice.samples.sample import Sample
from tests.contract.training_backend.cases import Model
from tests.models.families import CASES, build
from tests.models.test_expert_load import count_by_row
from tests.service.trainer.harness import (
    RunningTrainer,
    make_group,
    running_trainer,
    train_step,
    upload,
)
from tests.service.weights.test_int4 import expected_logprobs
from tests.service.weights.test_transfer import score

RATE = 0.25  # far more than anybody would take, so that other experts are chosen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = next(case for case in CASES if case.name == "deepseek_v3")
    return build(case, tmp_path_factory.mktemp("mixture") / "model").directory


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    settings = {
        "publish": {"delta": True},
        "optim": {"learning_rate": 1e-12},
        "experts": {"bias_update_rate": RATE},
    }
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **settings) as running:
        yield running


async def test_an_engine_chooses_by_biases_of_a_delta(
    trainer: RunningTrainer, client, clients: list[EngineClient], model: Path, tmp_path: Path
) -> None:
    """As plain transformers does with those that numpy has moved."""
    engine, versions = clients[0], []
    samples = make_group("one", seed=5, rewards=[0.0, 1.0, 0.0, 1.0])
    for _ in range(2):
        if versions:
            await train_step(client, await upload(client, "one", samples))
        published = await client.publish_weights()
        versions.append(published)
        await engine.prepare_weights(published.weights)
        await engine.commit_weights(published.weights)
    assert 0 < versions[1].byte_count < 0.5 * versions[1].full_byte_count
    stored = load_file(model / "model.safetensors")
    moved = {**stored, **move(model, stored, samples)}
    served = np.array(await score(engine))
    wanted = expected_logprobs(model, moved, tmp_path / "moved")
    before = expected_logprobs(model, stored, tmp_path / "before")
    np.testing.assert_allclose(served, wanted, atol=1e-5)
    assert np.abs(wanted - before).max() > 0.1


def move(
    model: Path, stored: dict[str, torch.Tensor], samples: list[Sample]
) -> dict[str, torch.Tensor]:
    (name,) = (name for name in stored if name.endswith("e_score_correction_bias"))
    rows = [
        Row(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            token_ids=torch.from_numpy(sample.token_ids.astype(np.int64)),
            prompt_length=sample.prompt_length,
            loss_mask=torch.ones(len(sample.token_ids) - sample.prompt_length, dtype=torch.bool),
        )
        for sample in samples
    ]
    (counts,) = count_by_row(Model(model), rows)
    tokens = np.array(counts, dtype=np.float64)
    move = np.float32(RATE) * np.sign(tokens.mean() - tokens).astype(np.float32)
    return {name: torch.from_numpy(stored[name].numpy() + move)}
