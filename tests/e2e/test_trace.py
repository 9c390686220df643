"""The trace of a real run, and the page that `sluice trace` makes of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sluice.loop.timeline.page import load, summarise
from sluice.loop.trace import LOOP, STEP
from tests.e2e.conftest import ENVIRONMENT
from tests.patience import PATIENCE

CLOCKS = 0.05  # seconds by which the wall clock and the monotonic one may drift apart
PHASES = ("wait for groups", "upload", "advantages", "forward_backward", "optimizer", "publish")


@pytest.fixture(scope="module")
def training(stack):
    training = stack.train("traced", steps=3)
    training.finish()
    return training


def test_a_run_leaves_a_trace_that_adds_up(training):
    trace = load(training.run_dir)
    assert trace.steps == (1, 3)
    rows = training.rows()
    steps = [span for span in trace.of(LOOP) if span.name == STEP]
    for row, step in zip(rows, steps, strict=True):
        assert step.duration >= row["step_seconds"] - CLOCKS
    summary = summarise(trace)
    assert summary.sample_count == 3 * 16
    assert sum(summary.steps.values()) == pytest.approx(sum(s.duration for s in steps), rel=0.05)
    waits = [span for span in trace.of(LOOP) if span.name == "wait for groups"]
    assert summary.steps["wait for groups"] == pytest.approx(sum(s.duration for s in waits))
    for row, wait in zip(rows, waits, strict=True):
        assert 0 < wait.duration <= row["rollout_seconds"] + CLOCKS
    assert summary.steps.keys() >= {*PHASES, "other"}
    assert all(summary.steps[name] > 0 for name in PHASES)
    # every sample is traced from the begin of its group, inside the wait of its step
    for wait in waits:
        inside = [span for span in trace.samples if wait.start <= span.start < wait.end]
        assert max(span.end for span in inside) <= wait.end + CLOCKS
    samples = {(s.group, s.episode) for s in trace.samples if s.episode >= 0}
    for group, episode in samples:
        spans = [s for s in trace.samples if s.group == group and s.episode in (-1, episode)]
        wall = max(s.end for s in spans) - min(s.start for s in spans)
        assert sum(s.duration for s in spans) == pytest.approx(wall, rel=0.01)


def test_the_page_is_written_beside_the_run(training):
    run_dir = training.run_dir
    command = [sys.executable, "-m", "sluice.cli", "trace", str(run_dir)]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "decode" in done.stdout
    page = (run_dir / "trace.html").read_text()
    assert "://" not in page
    wrong = subprocess.run(
        [*command, "--steps", "x"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("sluice: --steps")
