"""What `sluice status` says of real services: at work, stopped, and gone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sluice.loop.run_samples import load_samples
from tests.e2e.conftest import ENVIRONMENT, Stack, wait_until
from tests.e2e.test_waits import stopped
from tests.patience import PATIENCE


def status_of(target: str | Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "sluice.cli", "status", str(target), "--json", *flags]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode in (0, 2), done.stderr
    return json.loads(done.stdout)


def test_a_run_at_work_and_after_a_kill(stack: Stack) -> None:
    training = stack.train("status", steps=500)
    training.wait_for_step(2)
    with stopped(stack.pid("trainer")):
        # the loop waits for it, and nobody waits for longer than asked to find that out
        found = wait_until(lambda: _waits_on_trainer(stack, training.run_dir))
    by_name = {service["name"]: service for service in found["services"]}
    assert by_name["trainer"]["health"] == "no answer"
    assert by_name["router"]["health"] == by_name["loop"]["health"] == "serving"
    assert (found["run"]["state"], found["run"]["steps"]) == ("running", 500)
    assert found["run"]["step"] >= 2
    assert found["run"]["seconds_left"] > 0
    step = found["run"]["step"]
    training.wait_for_step(step + 2)
    found = status_of(training.run_dir, "--timeout_seconds", "60")
    by_name = {service["name"]: service for service in found["services"]}
    assert {service["health"] for service in found["services"]} == {"serving"}
    assert by_name["trainer"]["step"] > step
    with stopped(training.process.pid):  # trainer and engine are asked one after the other
        (engine,) = wait_until(lambda: _engines_at_rest(training.run_dir))
    assert engine["state"] == "active"
    assert 0 <= engine["versions_behind"] <= 1
    training.process.send_signal(signal.SIGKILL)
    training.process.communicate(timeout=PATIENCE)
    found = status_of(training.run_dir)
    assert (found["run"]["state"], found["run"]["seconds_left"]) == ("gone", None)
    seen = next(load_samples(training.run_dir, stack.run_dir / "store", range(1, 2), print))
    assert seen.step == 1
    assert seen.advantage is not None  # as the trainer computed it
    router = status_of(stack.services["router"]["address"], "--timeout_seconds", "60")
    assert router["services"][0]["kind"] == "router"
    assert len(router["engines"]) == 1


def _waits_on_trainer(stack: Stack, run_dir: Path) -> dict[str, Any] | None:
    found = status_of(run_dir, "--timeout_seconds", "2")
    address = stack.services["trainer"]["address"]
    by_name = {service["name"]: service for service in found["services"]}
    if any(by_name[name]["health"] != "serving" for name in ("loop", "router")):
        return None  # which were too slow for it just now
    return found if any(address in wait["on"] for wait in by_name["loop"]["waits"]) else None


def _engines_at_rest(run_dir: Path) -> list[dict[str, Any]] | None:
    """Once all that is said of them has been answered in time."""
    engines = status_of(run_dir, "--timeout_seconds", "2")["engines"]
    return engines if engines and engines[0]["versions_behind"] is not None else None
