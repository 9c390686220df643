"""A run of Muon whose controller and ranks are killed ends with the weights of one that was not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sluice.loop.journal import read_journal
from sluice.loop.ledger import Ledger
from tests.e2e.conftest import Training, start_stack, stop_stack
from tests.patience import PATIENCE

STEPS = 5
RUN: dict[str, Any] = {"steps": STEPS, "deterministic": True, "checkpoint_every": 2}


def trainer_of(folder: Path) -> dict[str, Any]:
    return {
        "kind": "trainer",
        "config": {
            "model": str(folder / "model"),
            "backend": "fsdp",
            "fsdp": {"dtype": "float32"},
            "ranks": {"count": 2},
            "optim": {"kind": "muon", "learning_rate": 2e-3},
        },
    }


def published(run: Training) -> str:
    """Digest of the weights of the last step."""
    ledger = Ledger(run.run_dir / "ledger.sqlite")
    try:
        return ledger.digest_of_step(STEPS)
    finally:
        ledger.close()


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    ends = {}
    for name in ("straight", "killed"):
        folder = tmp_path / name
        stack = start_stack(folder, trainer=trainer_of(folder))
        try:
            if name == "killed":
                stack.train("run", **RUN, dies_at=("consumed", 3)).died()
                for pid in stack.rank_pids():
                    os.kill(pid, signal.SIGKILL)
            run = stack.train("run", **RUN, resume=name == "killed")
            run.finish(2 * PATIENCE)
            assert len(run.rows()) == STEPS
            ends[name] = published(run)
            notes = " ".join(
                event["text"] for event in read_journal(run.run_dir) if "text" in event
            )
            assert "other settings" not in notes
        finally:
            stop_stack(stack)
    assert ends["killed"] == ends["straight"] != ""
