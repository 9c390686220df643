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


def test_settings_that_changed_are_told_and_the_other_kind_is_refused(tmp_path: Path) -> None:
    """Of a run that goes on with a trainer that was started again."""
    for steps, optim, told in (
        (1, {"kind": "muon"}, ""),
        (2, {"kind": "muon", "muon": {"momentum": 0.9}}, "optim.muon.momentum: 0.95, now 0.9"),
        (3, {"kind": "adamw"}, "it was saved by a trainer with optim.kind muon: set it so"),
    ):
        trainer = trainer_of(tmp_path)
        trainer["config"] |= {"backend": "reference", "ranks": {"count": 1}, "optim": optim}
        del trainer["config"]["fsdp"]
        stack = start_stack(tmp_path, trainer=trainer)
        try:
            run = stack.train("run", steps=steps, checkpoint_every=1, resume=steps > 1)
            output, _ = run.process.communicate(timeout=PATIENCE)
        finally:
            stop_stack(stack)
        assert told in output
        assert (run.process.returncode == 0) == (optim["kind"] == "muon"), output
