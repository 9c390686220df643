"""A whole run whose store is a bucket: nothing is shared but that."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.bucket import ObjectBucket
from sluice.loop.journal import read_journal
from sluice.loop.run_directory import latest_run_checkpoint
from sluice.loop.run_samples import load_samples
from tests.e2e import conftest
from tests.e2e.conftest import Stack, start_stack, stop_stack
from tests.patience import PATIENCE
from tests.s3_server import environment, make_bucket, running_s3

URL = "s3://runs/one"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    caches = tmp_path_factory.mktemp("caches")
    with running_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "runs")
        for name, value in {**environment(endpoint), "TMPDIR": str(caches)}.items():
            patch.setenv(name, value)
            patch.setitem(conftest.ENVIRONMENT, name, value)
        stack = start_stack(tmp_path_factory.mktemp("stack"), {"store": URL})
        yield stack
        stop_stack(stack)


def test_a_run_in_a_bucket_is_killed_and_goes_on(stack: Stack) -> None:
    settings = {"steps": 6, "store": None, "checkpoint_every": 2}
    training = stack.train("killed", dies_at=("consumed", 3), **settings)
    training.died()
    assert latest_run_checkpoint(training.run_dir / "cuts").step == 2
    for name in ("trainer", "rollout"):
        os.kill(stack.pid(name), signal.SIGKILL)
    training = stack.train("killed", resume=True, **settings)
    training.wait_for_step(3)
    os.kill(stack.pid("trainer"), signal.SIGKILL)
    training.finish()
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(24)}
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4, 5, 6]
    bucket = ObjectBucket(URL)
    found = {key.split("/")[0] for key in bucket.keys("")}
    assert {"blobs", "blob_pins", "rollouts", "checkpoints", "weights"} <= found
    newest = latest_run_checkpoint(training.run_dir / "cuts")
    assert bucket.exists(f"{newest.checkpoint}/checkpoint.json")
    assert not (stack.run_dir / "store").exists()
    assert not Path(training.run_dir / "store").exists()
    seen = list(load_samples(training.run_dir, URL, range(6, 7), print))
    assert {sample.step for sample in seen} == {6}


@pytest.mark.fast
def test_a_run_goes_on_where_nothing_is_left_of_its_directory(stack: Stack) -> None:
    settings = {"steps": 6, "store": None, "checkpoint_every": 1, "takeover_seconds": 2}
    training = stack.train("moved", dies_at=("archive.recorded", 3), **settings)
    training.died()
    first = [row["reward_mean"] for row in training.rows()][:2]
    before = training.rows()[0]["optimizer_step"] - 1  # of the run that the trainer had
    shutil.rmtree(training.run_dir)  # its host is lost
    training = stack.train("moved", dies_at=("archive.uploaded", 3), resume=True, **settings)
    training.died()
    shutil.rmtree(training.run_dir)
    training = stack.train("moved", resume=True, **settings)
    training.finish()
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(24)}
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["optimizer_step"] - row["step"] for row in rows} == {before}  # each was made once
    assert [row["reward_mean"] for row in rows][:2] == first  # they came along
    events = [event["event"] for event in read_journal(training.run_dir)]
    assert events.count("start") > 1
    assert "in s3://runs/one/loops/" in training.run_dir.joinpath("journal.jsonl").read_text()


def test_of_two_loops_of_one_run_the_second_is_refused_by_name(stack: Stack) -> None:
    settings = {"steps": 400, "store": None, "checkpoint_every": 2}
    training = stack.train("twice", **settings)
    training.wait_for_step(3)
    shutil.move(training.run_dir, training.run_dir.with_name("kept"))  # as on another host
    try:
        second = stack.train("twice", resume=True, **settings)
        output, _ = second.process.communicate(timeout=PATIENCE)
    finally:
        training.process.kill()
        training.process.wait()
    assert second.process.returncode == 2, output
    assert f"process {training.process.pid} on " in output, output
    assert "trains this run (s3://runs/one/loops/" in output, output


def test_of_two_runs_on_one_trainer_the_second_is_refused_until_the_first_has_died(
    stack: Stack,
) -> None:
    settings = {"store": None, "checkpoint_every": 2, "takeover_seconds": 2}
    training = stack.train("driving", steps=400, **settings)
    training.wait_for_step(1)
    refused = stack.train("rival", steps=2, **settings)
    output, _ = refused.process.communicate(timeout=PATIENCE)
    assert refused.process.returncode == 2, output
    assert f"is driven by process {training.process.pid} on " in output, output
    assert f"for {training.run_dir}; stop that" in output, output
    training.process.kill()
    training.process.wait()
    refused = stack.train("rival", steps=2, resume=True, **settings)
    refused.finish()
    assert [row["step"] for row in refused.rows()] == [1, 2]


def test_a_loop_that_was_stopped_ends_when_another_has_taken_over(stack: Stack) -> None:
    settings = {"steps": 40, "store": None, "checkpoint_every": 1, "takeover_seconds": 2}
    training = stack.train("stopped", **settings)
    training.wait_for_step(2)
    os.kill(training.process.pid, signal.SIGSTOP)
    kept = training.run_dir.with_name("kept of stopped")
    shutil.move(training.run_dir, kept)
    second = stack.train("stopped", resume=True, **{**settings, "steps": 8})
    second.wait_for_step(5)
    os.kill(training.process.pid, signal.SIGCONT)
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2, output
    assert f"process {second.process.pid} on " in output and "has taken over" in output, output
    second.finish()
    consumed = {group.group_id: group.consumed_step for group in second.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(32)}


def test_other_settings_are_known_where_nothing_is_left_of_the_directory(stack: Stack) -> None:
    """Those that a run went on with last, though it came to no further run checkpoint."""
    settings = {"steps": 3, "store": None, "checkpoint_every": 9, "takeover_seconds": 2}
    stack.train("other", dies_at=("consumed", 3), **settings).died()
    more = {**settings, "algorithm": {"epochs": 2}, "resume": True}
    training = stack.train("other", dies_at=("consumed", 2), **more)
    training.died()
    notes = [each["text"] for each in read_journal(training.run_dir) if each["event"] == "note"]
    assert any(text.startswith("8 groups are sampled again") for text in notes)
    shutil.rmtree(training.run_dir)
    training = stack.train("other", resume=True, **settings)
    output = " ".join(training.finish().split())
    assert "resumed with another algorithm (algorithm.epochs: 2, now 1)" in output
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(12)}
