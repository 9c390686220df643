"""Real processes, as a user starts them: `sluice up` once, `sluice train` many times."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from examples.demo import write_prompts
from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice import faults
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.report import read_metrics
from tests import warm
from tests.patience import PATIENCE

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
GRIM = {
    "episodes": {
        "environments": {"grim": "tests.unit.rollout.grim:GrimEnvironment"},
        "user_modules": ["examples", "tests"],
    }
}


def wait_until(condition, seconds: float = PATIENCE, what: str = "") -> Any:
    """The first true value of `condition()`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what or condition}"
        time.sleep(0.05)
    return value


@dataclass
class Training:
    """A `sluice train` process and what it leaves in its run directory."""

    run_dir: Path
    process: subprocess.Popen

    def finish(self, seconds: float = PATIENCE) -> str:
        """Wait for its end; its output. Fails unless it ended well."""
        output, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, output
        return output

    def die_at(self, point: str, passing: int = 1) -> None:
        """Be killed (-9) at a later passing of a point of `sluice.faults`."""
        faults.arm(self.run_dir / "faults", point, passing)

    def died(self, seconds: float = PATIENCE) -> None:
        """Wait for its death at the point of `die_at`."""
        output, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode == -signal.SIGKILL, output

    @property
    def is_stopped(self) -> bool:
        """Whether it stands at the point of `stops_at`."""
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While it stands at the point of `stops_at`; then it goes on."""

        def is_there() -> bool:
            assert self.process.poll() is None
            return self.is_stopped

        wait_until(is_there, what="the run to stop itself")
        try:
            yield
        finally:
            self.go_on()

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in read_metrics(self.run_dir) if "reward_mean" in row]

    def learning_rows(self) -> list[dict[str, Any]]:
        """Rows of steps that had something to learn: groups of equal rewards are not passed over,
        and of the small ones here all of a step can be such."""
        rows = [row for row in self.rows() if "entropy" in row]
        assert rows
        return rows

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None or self.rows()[-1]["step"] >= step
            return bool(self.rows()) and self.rows()[-1]["step"] >= step

        wait_until(reached, what=f"step {step}")

    def groups(self, state: str) -> list[LedgerGroup]:
        ledger = Ledger(self.run_dir / "ledger.sqlite")
        try:
            return ledger.groups(state)
        finally:
            ledger.close()


@dataclass
class Stack:
    """A `sluice up` process."""

    run_dir: Path
    process: subprocess.Popen

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        return json.loads((self.run_dir / "services.json").read_text())

    def pid(self, name: str) -> int:
        return self.services[name]["pid"]

    def rank_pids(self) -> list[int]:
        return [child.pid for child in warm.children(self.pid("trainer"), recursive=True)]

    def train(
        self,
        name: str,
        *,
        dies_at: tuple[str, int] | None = None,
        stops_at: tuple[str, int] | None = None,
        output: int = subprocess.PIPE,
        before: tuple[str, ...] = (),
        **changes: Any,
    ) -> Training:
        """Begin a run; `dies_at`, `stops_at`: a point of `sluice.faults`, and its passing.

        output: where it writes. before: a command that runs it.

        A change to `...` leaves a setting out.
        """
        run_dir = self.run_dir / "runs" / name
        run_dir.mkdir(parents=True, exist_ok=True)
        config = {
            "run_dir": str(run_dir),
            "store": str(self.run_dir / "store"),
            "services": str(self.run_dir / "services.json"),
            "prompts": {"file": str(self.run_dir / "prompts.jsonl")},
            "environment": {"name": "prompts", "settings": {"reward": "position_match"}},
            "sampling": {"max_new_tokens": 5},
            "groups_per_step": 4,
            "samples_per_group": 4,
            "steps": 4,
            "checkpoint_every": 2,
            "service_timeout_seconds": PATIENCE,
            **changes,
        }
        config = {name: value for name, value in config.items() if value is not ...}
        path = run_dir / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        for fault, number in ((dies_at, signal.SIGKILL), (stops_at, signal.SIGSTOP)):
            if fault is not None:
                faults.arm(run_dir / "faults", *fault, number)
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "sluice.cli", "train", str(path)],
            env={**ENVIRONMENT, faults.VARIABLE: str(run_dir / "faults")},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Training(run_dir, process)


def start_stack(
    run_dir: Path, up: dict[str, Any] | None = None, **services: dict[str, Any] | None
) -> Stack:
    """`sluice up` of a router, a trainer and a rollout, changed by `services` and `up`.

    A service that is None is left out.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    model = str(build_tiny_qwen3(run_dir / "model", 0))
    write_prompts(run_dir / "prompts.jsonl", 0)
    trainer = {"model": model, "optim": {"learning_rate": 2e-3}}
    engine = {"max_running": 64, "max_model_length": 16, "threads": 1, "deterministic": True}
    entries: dict[str, dict[str, Any] | None] = {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": trainer},
        "rollout": {"kind": "rollout", "config": {"tokenizer": model, "engine": engine, **GRIM}},
    }
    entries.update(services)
    path = run_dir / "services.yaml"
    chosen = {name: entry for name, entry in entries.items() if entry is not None}
    path.write_text(yaml.safe_dump({"run_dir": str(run_dir), "services": chosen, **(up or {})}))
    with (run_dir / "up.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice.cli", "up", str(path)],
            env=ENVIRONMENT,
            stdout=log,
            stderr=log,
        )
    stack = Stack(run_dir, process)

    def is_up() -> bool:
        assert process.poll() is None, (run_dir / "up.log").read_text()
        return (run_dir / "services.json").exists()

    wait_until(is_up, what="sluice up")
    return stack


def stop_stack(stack: Stack) -> None:
    """Ctrl-C; it ends well and leaves no process behind."""
    processes = psutil.Process(stack.process.pid).children(recursive=True)
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(timeout=PATIENCE) == 0
    wait_until(lambda: not any(map(runs, processes)), what=f"the end of {processes}")


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one whose parent went first is there until init looks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = start_stack(tmp_path_factory.mktemp("stack"))
    yield stack
    stop_stack(stack)
