"""Gradients and steps are those of autograd and AdamW over plain forward passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.backend import Row, StepOutcome, TrainingBackend
from sluice.algo.spec import LossSpec
from tests.contract.training_backend.cases import (
    OPTIM,
    PPO,
    TAUGHT,
    Model,
    Oracle,
    StartBackend,
    build_model,
    divergence_from_teacher,
    published,
    ragged_rows,
    relative_distance,
)

NORMALIZER = 37.0


def step(backend: TrainingBackend) -> StepOutcome:
    return backend.step(normalizer=NORMALIZER, learning_rate=OPTIM.learning_rate)


def test_two_steps_equal_autograd_and_adamw(
    start_backend: StartBackend, model: Model, tmp_path: Path
) -> None:
    rows = ragged_rows()
    backend, oracle = start_backend(model), Oracle(model.load())
    for _ in range(2):
        sums = backend.forward_backward([rows], PPO)
        loss = oracle.ppo_loss(rows)
        outcome = step(backend)
        norm = oracle.step(loss, NORMALIZER)
        assert sums.loss == pytest.approx(loss.item(), rel=1e-4)
        assert sums.token_count == sum(int(row.loss_mask.sum()) for row in rows)
        assert outcome.skipped_reason == ""
        assert outcome.learning_rate == OPTIM.learning_rate
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-4)
    oracle.model.save_pretrained(tmp_path / "oracle")
    start, expected = (
        load_file(directory / "model.safetensors")
        for directory in (model.directory, tmp_path / "oracle")
    )
    found = published(backend, tmp_path / "shards")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        moved, should = tensor - start[name], expected[name] - start[name]
        assert relative_distance(moved, should) < 2e-3, name


def kl_and_entropy(oracle: Oracle, rows: list[Row]) -> torch.Tensor:
    """0.1 KL (k3) to the reference less 0.05 entropy, on top of PPO."""
    loss = oracle.ppo_loss(rows)
    for row in rows:
        gap = row.columns["reference_logprobs"] - oracle.logprobs(row)
        extra = 0.1 * (gap.exp() - gap - 1) - 0.05 * oracle.entropy(row)
        loss = loss + row.loss_weight * extra[row.loss_mask].sum()
    return loss


def likelihood(oracle: Oracle, rows: list[Row]) -> torch.Tensor:
    return sum(
        (-row.loss_weight * oracle.logprobs(row)[row.loss_mask].sum() for row in rows),
        torch.zeros(()),
    )


@pytest.mark.parametrize(
    ("spec", "formula"),
    [
        (TAUGHT, divergence_from_teacher),
        (
            LossSpec(name="ppo_clip", clip_low=0.2, kl_coefficient=0.1, entropy_coefficient=0.05),
            kl_and_entropy,
        ),
        (LossSpec(name="sft"), likelihood),
    ],
)
def test_other_losses(
    start_backend: StartBackend,
    qwen3: Model,
    spec: LossSpec,
    formula: Callable[[Oracle, list[Row]], torch.Tensor],
) -> None:
    rows = ragged_rows()
    backend, oracle = start_backend(qwen3), Oracle(qwen3.load())
    sums = backend.forward_backward([rows, []], spec)
    loss = formula(oracle, rows)
    assert sums.loss == pytest.approx(loss.item(), rel=1e-4)
    assert step(backend).grad_norm == pytest.approx(oracle.step(loss, NORMALIZER), rel=1e-4)


def test_calls_of_one_row_equal_one_call(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    rows = ragged_rows()
    together, apart = start_backend(qwen3), start_backend(qwen3)
    whole = together.forward_backward([rows], PPO)
    parts = [apart.forward_backward([[row], []], PPO) for row in rows]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-6, abs=1e-6)
    assert sum(part.token_count for part in parts) == whole.token_count
    for name, (total, weight) in whole.metrics.items():
        summed = sum(part.metrics[name][0] for part in parts)
        assert summed == pytest.approx(total, rel=1e-5, abs=1e-5), name
        assert sum(part.metrics[name][1] for part in parts) == weight
    assert step(apart).grad_norm == pytest.approx(step(together).grad_norm, rel=1e-6)


def test_discarded_gradients_leave_no_trace(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    rows = ragged_rows()
    backend, fresh = start_backend(qwen3), start_backend(qwen3)
    backend.forward_backward([rows[:4]], PPO)
    backend.discard_gradients()
    for each in (backend, fresh):
        each.forward_backward([rows], PPO)
        step(each)
    left = published(backend, tmp_path / "left")
    right = published(fresh, tmp_path / "right")
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_a_pass_that_failed_leaves_no_trace(start_backend: StartBackend, tmp_path: Path) -> None:
    """Nor in the shares that a loss of even use goes by, which a pass counts ahead."""
    mixture = build_model(tmp_path / "mixture", "qwen3_moe", num_experts=8)
    rows, experts = ragged_rows(), {"aux_loss_coefficient": 10.0}
    foreign = rows[0]._replace(token_ids=torch.full_like(rows[0].token_ids, 10**6))
    backend, fresh = (start_backend(mixture, experts=experts) for _ in range(2))
    with pytest.raises(IndexError):
        backend.forward_backward([rows[:2], [foreign]], PPO, normalizer=NORMALIZER)
    backend.discard_gradients()
    for each in (backend, fresh):
        each.forward_backward([rows], PPO, normalizer=NORMALIZER)
        step(each)
    left = published(backend, tmp_path / "left")
    right = published(fresh, tmp_path / "right")
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_a_non_finite_norm_skips_the_step(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    rows = ragged_rows()
    poison = {**rows[0].columns, "advantages": torch.full((4,), math.inf)}
    backend = start_backend(qwen3)
    before = published(backend, tmp_path / "before")
    backend.forward_backward([[rows[0]._replace(columns=poison)]], PPO)
    outcome = step(backend)
    assert outcome.skipped_reason
    assert not math.isfinite(outcome.grad_norm)
    after = published(backend, tmp_path / "after")
    assert all(torch.equal(after[name], before[name]) for name in before)
    backend.forward_backward([rows], PPO)
    assert step(backend).skipped_reason == ""
    moved = published(backend, tmp_path / "moved")
    assert all(torch.isfinite(tensor).all() for tensor in moved.values())
    assert any(not torch.equal(moved[name], before[name]) for name in before)


def test_gradients_that_moments_cannot_hold_skip_the_step(
    start_backend: StartBackend, qwen3: Model, tmp_path: Path
) -> None:
    """Their squares would be infinite in float32, and what they are of would never move again."""
    rows = ragged_rows()
    optim = {"learning_rate": 1e-2, "epsilon": 1e-5, "max_grad_norm": 0.0}
    plain, backend = (start_backend(qwen3, optim=optim) for _ in range(2))
    backend.forward_backward([[rows[0]._replace(loss_weight=1e25)]], PPO)
    assert step(backend).skipped_reason
    moved = []
    for index, each in enumerate((plain, backend)):
        each.forward_backward([rows], PPO)
        assert step(each).skipped_reason == ""
        moved.append(published(each, tmp_path / f"moved-{index}"))
    assert all(torch.equal(moved[0][name], tensor) for name, tensor in moved[1].items())


def test_only_dummies_still_step(start_backend: StartBackend, qwen3: Model) -> None:
    backend = start_backend(qwen3)
    sums = backend.forward_backward([[], []], PPO)
    assert (sums.loss, sums.token_count) == (0.0, 0)
    assert step(backend).grad_norm == 0.0
