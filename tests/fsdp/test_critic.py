"""A critic on two ranks is one process of the reference backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.trainer.backend import Mesh
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.algo.spec import LossSpec
from tests.contract.training_backend.cases import Model
from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.jobs import NORMALIZER, OPTIM, replace_columns, rows_of
from tests.fsdp.oracle import read_ranks
from tests.rank_pool import Pool


@pytest.mark.parametrize(
    ("family", "fsdp"),
    [
        pytest.param("qwen3", {}, marks=pytest.mark.fast),
        pytest.param("llama", {}, marks=pytest.mark.fast),
        ("qwen3", {"context": 2}),
        ("qwen3_moe", {"expert": 2}),
    ],
)
def test_values_and_steps(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, family: str, fsdp: dict[str, int]
) -> None:
    model, _ = expected(family)
    check_critic(pool, model, tmp_path, 2, fsdp=fsdp)


def check_critic(pool: Pool, model: Model, tmp_path: Path, world: int, **settings: Any) -> None:
    """Three steps of a new head on ranks are those of the reference backend."""
    answers = pool.run("critic", world, model=str(model.directory), out=str(tmp_path), **settings)
    optim = settings.get("trainer", {}).get("optim", OPTIM)
    config = TrainerConfig(
        model=str(model.directory), store=tmp_path, optim=optim, head="value", durable=False
    )
    reference = ReferenceBackend(config, Mesh(rank=0, world_size=1))
    rows = [replace_columns(row) for row in rows_of(0)]
    for found in answers[0]["steps"]:
        loss = reference.forward_backward([rows], LossSpec(name="value")).loss
        outcome = reference.step(normalizer=NORMALIZER, learning_rate=None)
        assert found["loss"] == pytest.approx(loss, rel=1e-4)
        assert found["grad_norm"] == pytest.approx(outcome.grad_norm, rel=1e-4)
    before, after = (read_ranks(tmp_path, part) for part in ("before", "after"))
    assert all((values == 0).all() for values in before.values())  # a new head starts there
    for name, values in reference.compute_values([rows]).items():
        assert (after[name] - values).abs().max() < 1e-4
        assert values.abs().max() > 0
    weights = read_ranks(tmp_path, "weights")
    assert {"score.weight", "score.bias"} <= weights.keys()
    assert "lm_head.weight" not in weights
