"""`sluice profile` of a run at work, of one that makes no steps, and of what is not there."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT, Stack, Training
from tests.e2e.test_waits import stopped
from tests.patience import PATIENCE


def profiled(target: str | Path, *flags: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "sluice.cli", "profile", str(target), *flags]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def training(stack: Stack) -> Iterator[Training]:
    """A run of more steps than a test waits for; it ends with the test, whatever came of that."""
    training = stack.train("profile", steps=500)
    yield training
    training.process.send_signal(signal.SIGINT)
    training.process.communicate(timeout=PATIENCE)


def test_a_run_at_work_and_one_that_stands_still(training: Training) -> None:
    training.wait_for_step(2)
    code, told, wrong = profiled(training.run_dir, "--steps", "2", "--engines", "--passes", "3")
    assert (code, wrong) == (0, "")
    files = [Path(line.partition(": ")[2]) for line in told.splitlines() if line[0] != " "]
    assert [file.name for file in files] == [
        "rank-0.trace.json.gz",
        "engine-rollout.trace.json.gz",
    ]
    assert len({file.parent for file in files}) == 1, "they lie beside each other"
    tables = [line for line in told.splitlines() if line.startswith("  host: ")]
    assert len(tables) == 2, "what took the time of both"
    for file in files:
        with gzip.open(file) as trace:
            operations = {event["name"] for event in json.load(trace)["traceEvents"]}
        assert "aten::mm" in operations
    with stopped(training.process.pid):  # no step comes
        code, told, wrong = profiled(training.run_dir, "--timeout_seconds", "1")
        assert (code, told) == (2, "")
        assert "trainer: 1 are still to come after 1 s" in wrong
        code, _, wrong = profiled(training.run_dir, "--ranks", "7")
        assert code == 2
        assert "ranks: must be of 0 to 0" in wrong
    training.wait_for_step(training.rows()[-1]["step"] + 2)  # it goes on


def test_who_is_not_there_is_named() -> None:
    code, told, wrong = profiled("127.0.0.1:9")
    assert (code, told) == (2, "")
    assert "127.0.0.1:9: nobody listens there" in wrong
    code, _, wrong = profiled("no/such/run")
    assert code == 2
    assert "neither a run directory nor host:port" in wrong
