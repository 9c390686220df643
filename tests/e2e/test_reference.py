"""A run whose reference moves, killed between steps: the same numbers as of one that never died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.loop.run_directory import RunCheckpoint, latest_run_checkpoint
from tests.e2e.conftest import Stack, Training, start_stack, stop_stack
from tests.patience import PATIENCE

KL = {
    "loss": {"name": "ppo_clip", "clip_low": 0.2, "kl_coefficient": 0.5},
    "reference_every": 2,
}
STEPS = 5
COMPARED = ("loss", "grad_norm", "kl_reference", "reward_mean", "reference_step")


def numbers(training: Training) -> list[dict[str, Any]]:
    return [{n: row[n] for n in COMPARED if n in row} for row in training.rows()]


def last_cut(training: Training) -> RunCheckpoint:
    run_checkpoint = latest_run_checkpoint(training.run_dir / "cuts")
    assert run_checkpoint is not None
    return run_checkpoint


def test_a_killed_run_compares_with_the_same_reference_again(stack: Stack) -> None:
    """Killed behind the third step with a run checkpoint of the second, and behind the fifth."""
    stack.train("first", steps=1, checkpoint_every=1).finish()
    begin: dict[str, Any] = {
        "initial_checkpoint": last_cut(Training(stack.run_dir / "runs/first", None)).checkpoint,
        "algorithm": KL,
        "deterministic": True,
        "steps": STEPS,
    }
    whole = stack.train("whole", **begin)
    whole.finish()
    assert [row["reference_step"] for row in whole.rows()] == [0, 0, 2, 2, 4]
    for row in whole.learning_rows():  # the first step behind a move has the reference for policy
        is_same = 0 < row["reference_step"] == row["step"] - 1
        assert row["kl_reference"] < 1e-9 if is_same else row["kl_reference"] > 1e-9
    assert (last_cut(whole).reference_step, last_cut(whole).step) == (4, STEPS)
    for passing in (3, 5):
        name = f"killed-{passing}"
        training = stack.train(name, **begin, dies_at=("consumed", passing))
        training.died()
        assert last_cut(training).reference_step == last_cut(training).step == passing - 1
        training = stack.train(name, **begin, resume=True)
        training.finish()
        assert numbers(training) == numbers(whole)
        assert last_cut(training).weight_digest == last_cut(whole).weight_digest


def test_a_run_without_a_kl_or_with_a_reference_that_stays_is_refused(
    stack: Stack, tmp_path: Path
) -> None:
    training = stack.train("no-kl", algorithm={"reference_every": 2})
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    assert "reference_every: has no effect without a KL" in " ".join(output.split())
    model = str(build_tiny_qwen3(tmp_path / "model", 0))
    trainer = {"kind": "trainer", "config": {"model": model, "publish": {"delta": True}}}
    other = start_stack(tmp_path, trainer=trainer)
    try:
        training = other.train("delta", algorithm=KL)
        output, _ = training.process.communicate(timeout=PATIENCE)
        assert training.process.returncode == 2
        assert "the trainer's reference stays: publish.delta" in " ".join(output.split())
    finally:
        stop_stack(other)


@pytest.mark.parametrize("point", ["published", "version", "checkpoint_begun"])
def test_a_run_killed_where_the_reference_moves_goes_on_from_the_run_checkpoint_before(
    stack: Stack, point: str
) -> None:
    training = stack.train(point, algorithm=KL, steps=4, dies_at=(point, 3))
    training.died()
    training = stack.train(point, algorithm=KL, steps=4, resume=True)
    training.finish()
    assert [row["reference_step"] for row in training.rows()] == [0, 0, 2, 2]
