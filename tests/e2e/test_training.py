"""The main job over real processes, in short."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sluice.loop.metrics import is_documented
from sluice.loop.run_directory import latest_run_checkpoint
from sluice.loop.trace import STEP, read_trace, trace_files
from tests.patience import PATIENCE


def consumed(training) -> dict[str, int]:
    return {group.group_id: group.consumed_step for group in training.groups("consumed")}


@pytest.fixture(scope="module")
def plain(stack):
    """A run that has ended, and what it printed."""
    training = stack.train("plain")
    return training, training.finish()


def test_a_run_trains_every_group_once_and_leaves_its_report(plain):
    training, output = plain
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4]
    assert consumed(training) == {f"g{i:07}": i // 4 + 1 for i in range(16)}
    for row in training.rows():
        assert row["rollout_mismatch"] <= 1e-4  # reference engine against reference trainer
        assert row["staleness_max"] == 0
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
    assert (training.run_dir / "reward.png").stat().st_size > 10_000
    assert "reward.png" in output


def test_a_run_is_not_overwritten(plain, stack):
    training = stack.train("plain")
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    assert "holds a run" in output


def test_a_killed_loop_resumes_from_its_run_checkpoint_and_loses_nothing(stack):
    training = stack.train("killed-loop", steps=6, dies_at=("consumed", 5))
    training.died()
    run_checkpoint = latest_run_checkpoint(training.run_dir / "cuts")
    assert run_checkpoint is not None
    assert run_checkpoint.step in (2, 4)  # the one of step 4 may not have been written yet
    stack.train("killed-loop", steps=6, resume=True).finish()
    assert consumed(training) == {f"g{i:07}": i // 4 + 1 for i in range(24)}
    assert not training.groups("dropped")


def test_trackers_have_every_number_of_a_run_under_documented_keys(stack):
    held_out = {
        "prompts": {"file": str(stack.run_dir / "prompts.jsonl")},
        "sampling": {"max_new_tokens": 5, "temperature": 1.0},
        "groups": 2,
        "samples": 2,
    }
    datasets = {"held_out": {**held_out, "pass_at": [1, 2]}}
    evaluation = {"datasets": datasets, "before_training": False}
    training = stack.train("tracked", evaluation=evaluation, trackers={"tensorboard": {}})
    training.finish()
    read = EventAccumulator(str(training.run_dir / "tensorboard"), {"tensors": 0}).Reload()
    shown = {tag: len(read.Tensors(tag)) for tag in read.Tags()["tensors"]}
    assert [tag for tag in shown if not is_documented(tag)] == []
    assert shown["reward_mean"] == shown["step_seconds"] == 4
    assert shown["eval/held_out/pass@2"] == 1  # after
    assert not is_documented("reward") and not is_documented("pass@2")


def test_no_step_waits_for_the_run_checkpoint_before_it(stack):
    training = stack.train("beside", steps=3)
    training.finish()
    spans = [
        span
        for path in trace_files(training.run_dir / "traces")
        for span in read_trace(path).to_pylist()
    ]
    steps = [each for each in spans if each["name"] == STEP]
    waits = [each["start"] for each in spans if each["name"] == "checkpoint"]
    written = {each["detail"] for each in spans if each["name"] == "write checkpoint"}
    assert written == {"step 0", "step 2", "step 3"}
    last = max(each["start"] + each["duration"] for each in steps)
    assert len(steps) == 3
    assert waits, "the first and the last are waited for"
    first = min(each["start"] for each in steps)
    assert all(start < first or start > last - 1e-3 for start in waits)


def test_a_killed_rollout_process_costs_no_group(stack):
    training = stack.train("killed-rollout", steps=6)
    training.wait_for_step(2)
    os.kill(stack.pid("rollout"), signal.SIGKILL)
    training.finish()
    assert consumed(training) == {f"g{i:07}": i // 4 + 1 for i in range(24)}


def test_a_killed_rank_brings_the_run_back_to_its_run_checkpoint(stack):
    training = stack.train("killed-rank", steps=6)
    training.wait_for_step(3)
    os.kill(stack.rank_pids()[0], signal.SIGKILL)
    training.finish()
    assert consumed(training) == {f"g{i:07}": i // 4 + 1 for i in range(24)}
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4, 5, 6]


def test_asynchronous_steps_keep_the_staleness_bound(stack):
    training = stack.train("async", steps=8, max_staleness=2)
    training.finish()
    groups = training.groups("consumed")
    assert len(groups) == 32
    ages = [group.consumed_step - 1 - group.oldest_step for group in groups]
    assert min(ages) >= 0
    assert 1 <= max(ages) <= 2  # it is asynchronous, and bounded


def test_bad_settings_end_in_one_line(stack, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(tmp_path), "setps": 3}))
    command = [sys.executable, "-m", "sluice.cli", "train", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    assert "setps: unknown key" in ended.stderr
    assert "Traceback" not in ended.stderr
