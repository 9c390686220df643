"""Held-out scores of a real run, beside its training."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sluice.loop.report import read_metrics
from tests.e2e.conftest import Stack
from tests.patience import PATIENCE

DENSE = {"name": "prompts", "settings": {"reward": "position_match"}}


def run_eval(path: Path) -> list[dict[str, Any]]:
    """`sluice eval`: what it printed."""
    command = [sys.executable, "-m", "sluice.cli", "eval", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_data_sets_are_scored_beside_training(stack: Stack) -> None:
    prompts = {"file": str(stack.run_dir / "prompts.jsonl"), "shuffle": False}
    datasets = {
        "greedy": {"prompts": prompts, "groups": 3},
        "sampled": {
            "prompts": prompts,
            "sampling": {"max_new_tokens": 5, "temperature": 0.8},
            "groups": 2,
            "samples": 4,
            "pass_at": [1, 4],
        },
    }
    training = stack.train(
        "evaluated", steps=5, evaluation={"datasets": datasets, "every_steps": 2}
    )
    output = training.finish()
    rows = [row for row in read_metrics(training.run_dir) if "dataset" in row]
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4, 5]
    found = {(row["evaluation"], row["dataset"], row["step"]) for row in rows}
    names = ("greedy", "sampled")
    assert {("before", name, 0) for name in names} <= found
    assert {("during", name, 2) for name in names} <= found
    assert {("after", name, 5) for name in names} <= found
    versions = {row["step"]: row["weight_version"] for row in training.rows()}
    for row in rows:
        assert row["failed_groups"] == 0 and 0 <= row["score"] <= 1
        if row["evaluation"] == "during":
            assert row["weight_version"] == versions[row["step"]]
            assert row["version_min"] >= row["weight_version"]
        else:
            assert row["version_min"] == row["version_max"] == row["weight_version"]
        assert ("pass@4" in row) == (row["dataset"] == "sampled")
    assert "sampled, after (step 5" in output
    again = run_eval(training.run_dir / "run.yaml")
    last = {row["dataset"]: row for row in rows if row["evaluation"] == "after"}
    assert [row["dataset"] for row in again] == ["greedy", "sampled"]
    for row in again:
        assert row["weight_version"] == last[row["dataset"]]["weight_version"]
        assert row["score"] == last[row["dataset"]]["score"], "of the same samples"
    assert len(training.groups("consumed")) == 20, "no held-out group is trained on"


def test_an_environment_of_later_is_refused_before_anything_runs(stack: Stack) -> None:
    """Of an evaluation after the run, the run would be over by then."""
    prompts = {"file": str(stack.run_dir / "prompts.jsonl")}
    wrong = {"name": "prompts", "settings": {"reward": "exact_macht"}}
    held_out = {"held_out": {"prompts": prompts, "environment": wrong}}
    training = stack.train(
        "wrong-later", steps=1, evaluation={"datasets": held_out, "before_training": False}
    )
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    key = "evaluation.datasets.held_out.environment.settings.reward"
    assert f"{key}: 'exact_macht' is unknown" in output.replace("\n", " "), output
    assert not training.groups("issued") and not training.groups("consumed")


def test_the_environment_that_trains_is_refused_by_its_key(stack: Stack) -> None:
    """Not as tasks of an evaluation that all failed."""
    prompts = {"file": str(stack.run_dir / "prompts.jsonl")}
    training = stack.train(
        "wrong-now",
        steps=1,
        environment={"name": "prompts", "settings": {"reward": "exact_macht"}},
        evaluation={"datasets": {"held_out": {"prompts": prompts}}},
    )
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    said = output.replace("\n", " ")
    assert "sluice: environment.settings.reward: 'exact_macht' is unknown" in said, output
