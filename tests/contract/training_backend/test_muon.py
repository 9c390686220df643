"""Steps of Muon are those of numpy in float64, on a plain model, and its checkpoints resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.backend import TrainingBackend
from services.trainer.config import OptimConfig
from tests.contract.training_backend.cases import (
    OPTIM,
    PPO,
    Model,
    Oracle,
    StartBackend,
    published,
    ragged_rows,
    relative_distance,
)
from tests.muon_oracle import MuonOracle

NORMALIZER = 37.0
SETTINGS: dict[str, Any] = {
    "kind": "muon",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "betas": (0.8, 0.9),
    "epsilon": 1e-6,
}
EXACT = {"newton_schulz_dtype": "float32"}


def optim_of(muon: dict[str, Any], **more: Any) -> OptimConfig:
    return OptimConfig.model_validate({**SETTINGS, **more, "muon": {**EXACT, **muon}})


def moved(backend: TrainingBackend, model: Model, directory: Path) -> dict[str, torch.Tensor]:
    """What steps have added to each tensor of the checkpoint."""
    start = load_file(model.directory / "model.safetensors")
    return {name: tensor - start[name] for name, tensor in published(backend, directory).items()}


def moved_by(oracle: Oracle, model: Model, directory: Path) -> dict[str, torch.Tensor]:
    oracle.model.save_pretrained(directory)
    start = load_file(model.directory / "model.safetensors")
    end = load_file(directory / "model.safetensors")
    return {name: tensor - start[name] for name, tensor in end.items()}


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(relative_distance(found[name], expected[name]) for name in expected)


def step_both(backend: TrainingBackend, oracle: Oracle, steps: int) -> None:
    rows = ragged_rows()
    for _ in range(steps):
        backend.forward_backward([rows], PPO)
        norm = oracle.step(oracle.ppo_loss(rows), NORMALIZER)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=oracle.optim.learning_rate)
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-3)


def test_five_steps_of_muon(start_backend: StartBackend, model: Model, tmp_path: Path) -> None:
    optim = optim_of({})
    backend, oracle = start_backend(model, optim=optim), MuonOracle(model.load(), optim)
    step_both(backend, oracle, 5)
    found = moved(backend, model, tmp_path / "found")
    assert farthest(found, moved_by(oracle, model, tmp_path / "oracle")) < 5e-3


@pytest.mark.parametrize(
    "muon",
    [
        {"momentum": 0.5},
        {"nesterov": False},
        {"newton_schulz_steps": 3},
        {"adjustment": "original"},
        {"rate_factor": 2.5},
    ],
)
def test_every_setting_of_muon_is_read(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path, muon: dict[str, Any]
) -> None:
    optim, plain = optim_of(muon), optim_of({})
    backend, oracle = start_backend(qwen3, optim=optim), MuonOracle(qwen3.load(), optim)
    other = MuonOracle(qwen3.load(), plain)
    step_both(backend, oracle, 2)
    for _ in range(2):
        other.step(other.ppo_loss(ragged_rows()), NORMALIZER)
    found = moved(backend, qwen3, tmp_path / "found")
    assert farthest(found, moved_by(oracle, qwen3, tmp_path / "oracle")) < 5e-3
    assert farthest(found, moved_by(other, qwen3, tmp_path / "other")) > 2e-2


@pytest.mark.parametrize(
    "changed",
    [{"betas": (0.5, 0.9)}, {"betas": (0.8, 0.2)}, {"epsilon": 1e-3}, {"weight_decay": 1.0}],
)
def test_what_is_not_of_muon_is_read_beside_it(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path, changed: dict[str, Any]
) -> None:
    optim, plain = optim_of({}, **changed), optim_of({})
    backend, oracle = start_backend(qwen3, optim=optim), MuonOracle(qwen3.load(), optim)
    other = MuonOracle(qwen3.load(), plain)
    step_both(backend, oracle, 2)
    for _ in range(2):
        other.step(other.ppo_loss(ragged_rows()), NORMALIZER)
    found = moved(backend, qwen3, tmp_path / "found")
    assert farthest(found, moved_by(oracle, qwen3, tmp_path / "oracle")) < 5e-3
    assert farthest(found, moved_by(other, qwen3, tmp_path / "other")) > 2e-2


def test_bfloat16_makes_other_steps_that_are_near(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    """Controls: float32's own distance above, and AdamW's steps."""
    optim = optim_of({"newton_schulz_dtype": "bfloat16"})
    backend, oracle = start_backend(qwen3, optim=optim), MuonOracle(qwen3.load(), optim)
    step_both(backend, oracle, 1)
    found = moved(backend, qwen3, tmp_path / "found")
    assert 5e-3 < farthest(found, moved_by(oracle, qwen3, tmp_path / "oracle")) < 0.15
    adam = Oracle(qwen3.load(), OptimConfig.model_validate({**SETTINGS, "kind": "adamw"}))
    adam.step(adam.ppo_loss(ragged_rows()), NORMALIZER)
    assert farthest(found, moved_by(adam, qwen3, tmp_path / "adam")) > 0.5


def train(backend: TrainingBackend, steps: int) -> list[float]:
    norms = []
    for _ in range(steps):
        backend.forward_backward([ragged_rows()], PPO)
        norms.append(backend.step(normalizer=NORMALIZER, learning_rate=1e-2).grad_norm)
    return norms


@pytest.mark.parametrize("first", [0, 2])
def test_a_run_of_muon_goes_on_to_the_bit(
    start_backend: StartBackend, model: Model, tmp_path: Path, first: int
) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    straight = start_backend(model, optim=optim_of({}))
    train(straight, first)
    straight.save_checkpoint(directory)
    expected = train(straight, 2)
    resumed = start_backend(model, optim=optim_of({}))
    train(resumed, 1)  # what loading has to drop
    resumed.load_checkpoint(directory)
    assert train(resumed, 2) == expected
    left, right = published(straight, tmp_path / "a"), published(resumed, tmp_path / "b")
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("saved", "loaded"), [("muon", "adamw"), ("adamw", "muon")])
def test_a_checkpoint_of_the_other_kind_is_refused_by_name(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path, saved: str, loaded: str
) -> None:
    optims = {"muon": optim_of({}), "adamw": OPTIM}
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    before = start_backend(qwen3, optim=optims[saved])
    train(before, 1)
    before.save_checkpoint(directory)
    with pytest.raises(ValueError, match=f"saved by a trainer with optim.kind {saved}: set it so"):
        start_backend(qwen3, optim=optims[loaded]).load_checkpoint(directory)


def test_what_is_held_has_one_moment_of_a_matrix(start_backend: StartBackend, qwen3: Model) -> None:
    """Numbers that the optimizer keeps: 1 of a matrix's each, 2 of all others'."""
    backend = start_backend(qwen3, optim=optim_of({}))
    before = sum(tensor.numel() for tensor in backend.held_tensors().state)
    train(backend, 1)
    kept = [t for t in backend.held_tensors().state if t.ndim]
    model = qwen3.load()
    hidden = sum(p.numel() for p in MuonOracle(model, optim_of({})).hidden.values())
    others = sum(p.numel() for p in model.parameters()) - hidden
    assert sum(tensor.numel() for tensor in kept) - before == hidden + 2 * others
