"""The check of an accelerator, whole, in its small form on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tools.accelerator_check.steps import STEPS


def check(out: Path) -> list[str]:
    """The lines that the check writes. Fails unless every step is done."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.accelerator_check", "--out", str(out)],
        env={**os.environ, "SLUICE_DEVICE": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@pytest.mark.long
def test_every_step_runs_on_a_cpu_and_only_once(tmp_path: Path) -> None:
    *steps, last = check(tmp_path)
    assert sorted(line.split()[1] for line in steps) == sorted(step.name for step in STEPS)
    name, *pairs = last.split()
    figures = dict(pair.split("=") for pair in pairs)
    assert name == "accelerator:"
    assert list(figures) == [
        *("device", "steps", "of", "parity_fp32", "parity_bf16", "mfu_0_5b", "mfu_1_5b"),
        *("vs_bare", "engine/generate", "sync_gbs", "sync/copy", "pause_ms"),
    ]
    assert figures["device"] == "cpu"
    assert figures["steps"] == figures["of"] == str(len(STEPS))
    of_a_gpu = ("parity_fp32", "mfu_0_5b", "mfu_1_5b")
    assert {figures[name] for name in of_a_gpu} == {"nan"}
    for name in ("parity_bf16", "vs_bare", "engine/generate", "sync_gbs", "sync/copy"):
        assert float(figures[name]) > 0, name
    written = json.loads((tmp_path / "accelerator.json").read_text())
    faults = next(found for found in written["results"] if found["name"] == "faults")
    assert faults["figures"]["killed"] == 2
    assert "# Check of cpu" in (tmp_path / "accelerator.md").read_text()
    before = (tmp_path / "steps" / "sync.json").stat().st_mtime_ns
    assert check(tmp_path)[-1] == last
    assert (tmp_path / "steps" / "sync.json").stat().st_mtime_ns == before
