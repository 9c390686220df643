"""`sluice up --on ray` on two nodes: a run outlives the loss of a service and of an actor."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.patience import PATIENCE

LAST = (
    r"ray: up_seconds=[\d.]+ faults=2 recovered=2 reward_last=(0\.9\d+|1\.000) lost=0 doubled=0 "
    r"orphans=0"
)


@pytest.mark.long
def test_a_stack_on_ray_trains_and_comes_back() -> None:
    command = [sys.executable, "-m", "tools.ray_check"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(LAST, done.stdout.splitlines()[-1])
