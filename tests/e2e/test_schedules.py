"""Asynchronous steps, rollouts that all fail, and runs that are refused."""

import json
import math

import pytest

from tests.patience import PATIENCE


def test_importance_weights_are_measured_where_the_loss_corrects_for_age(stack):
    loss = {
        "name": "ppo_clip",
        "clip_low": 0.2,
        "old_logprobs": "old",
        "importance": {"mode": "truncate", "high": 2.0},
    }
    training = stack.train("corrected", steps=5, max_staleness=2, algorithm={"loss": loss})
    training.finish()
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert 0 <= row["staleness_mean"] <= row["staleness_max"] <= 2
    for row in training.learning_rows():
        assert 0 < row["importance_weight"] <= 2
        assert math.isfinite(row["rollout_mismatch"])
    # what of the first groups later steps take; how far rollouts keep ahead then depends on speed
    assert max(row["staleness_max"] for row in rows) > 0
    # what is not of the current policy differs from it, and the weight says so
    assert any(abs(row["importance_weight"] - 1) > 1e-4 for row in training.learning_rows()[2:])


def test_rollouts_that_all_crash_end_the_run_with_the_reason(stack, tmp_path):
    prompts = tmp_path / "crash.jsonl"
    prompts.write_text(json.dumps({"prompt": "1=", "deed": "raise"}) + "\n")
    training = stack.train(
        "crashing",
        prompts={"file": str(prompts)},
        environment={"name": "grim"},
        groups_per_step=2,  # each that crashes costs a process
        group_attempts=2,
        max_dropped_in_a_row=3,
        max_staleness=1,
    )
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2, output
    assert "3 groups in a row were dropped" in output
    assert "Traceback" not in output
    assert not training.groups("consumed")


@pytest.fixture(scope="module")
def used_stack(stack):
    """A stack whose trainer is past its first step."""
    stack.train("before", steps=1).finish()
    return stack


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deterministic": True, "max_staleness": 1}, "deterministic needs max_staleness 0"),
        ({"deterministic": True}, "the trainer is at step"),
        ({"store": "/nowhere"}, "store: /nowhere does not exist"),
    ],
)
def test_a_run_that_cannot_be_what_it_says_is_refused_in_one_line(used_stack, changes, message):
    training = used_stack.train(f"refused-{len(message)}", **changes)
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2, output
    (line,) = [line for line in output.splitlines() if line.startswith("sluice: ")]
    assert message in line
    assert "Traceback" not in output
