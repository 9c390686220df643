"""A stack of real services for fault injection, and deterministic runs over it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from examples.demo import write_prompts
from sluice import faults
from sluice.client import TrainerClient
from sluice.loop.ledger import Ledger
from sluice.loop.training import wait_for_trainer
from sluice.supervise import read_services
from tools.fault_cases import Fault

STEPS, GROUPS, SAMPLES = 5, 4, 4
STOP_SECONDS = 60.0
RETURN = "going back to the last run checkpoint"  # in the log of the loop


class NotUpError(Exception):
    """The services did not start; the message is the end of their log."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `digests`: of the weights after each step, from the first on.

    `returns`: how often a loop that went on went back to its last run checkpoint.
    """

    seconds: float
    starts: int = 1
    returns: int = 0
    lost: int = 0
    doubled: int = 0
    hung: bool = False
    failure: str = ""
    digests: tuple[str, ...] = ()


def small_services(model: Path) -> dict[str, Any]:
    """One process of each kind."""
    return {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": _trainer(model, ranks=1)},
        "rollout": {
            "kind": "rollout",
            "config": {"tokenizer": str(model), "engine": _ENGINE, "episodes": _EPISODES},
        },
    }


def wide_services(model: Path) -> dict[str, Any]:
    """Two ranks, two engines, an episode worker of its own."""
    engines = {
        f"engine-{index}": {
            "kind": "rollout",
            "config": {"roles": ["engine"], "engine": _ENGINE},
        }
        for index in range(2)
    }
    worker = {"roles": ["episodes"], "tokenizer": str(model), "episodes": _EPISODES}
    return {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": _trainer(model, ranks=2)},
        **engines,
        "episodes": {"kind": "rollout", "config": worker},
    }


_ENGINE = {"max_running": 16, "max_model_length": 16, "deterministic": True}
_EPISODES = {"kept_rollouts": 4}


def _trainer(model: Path, ranks: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "optim": {"learning_rate": 2e-3},
        "ranks": {"count": ranks, "restart_backoff": 0.1},
        "keep_versions": 2,
    }


@dataclass
class Stack:
    """`sluice up` in a directory, started and ended as often as a test likes."""

    directory: Path
    services: Callable[[Path], dict[str, Any]]
    initial_checkpoint: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def prepare(self) -> None:
        """Build the model and the prompts."""
        self.directory.mkdir(parents=True, exist_ok=True)
        build = [sys.executable, "-m", "examples.models.tiny_qwen3", str(self.model)]
        subprocess.run(
            build, check=True, timeout=300, env=_environment(), stderr=subprocess.DEVNULL
        )
        write_prompts(self.directory / "prompts.jsonl", 0)
        config = {
            "run_dir": str(self.directory),
            "services": self.services(self.model),
            "restarts": 1000,
        }
        (self.directory / "services.yaml").write_text(yaml.safe_dump(config))

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def faults(self) -> Path:
        return self.directory / "faults"

    def start(self, seconds: float) -> None:
        """Raises NotUpError."""
        ready = self.directory / "services.json"
        ready.unlink(missing_ok=True)  # of a life that was killed
        with (self.directory / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*_CLI, "up", str(self.directory / "services.yaml")],
                env=_environment(self.faults),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + seconds
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise NotUpError((self.directory / "up.log").read_text()[-2000:])
            time.sleep(0.05)

    def stop(self) -> None:
        """SIGINT, as Ctrl-C would."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """kill -9 of the supervisor and of every service at once."""
        assert self.process is not None
        try:
            tree = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        self.process.kill()
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(STOP_SECONDS)
        psutil.wait_procs(tree, timeout=STOP_SECONDS)

    def cpu_seconds(self) -> float:
        """Of the supervisor and all its services so far."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        total = 0.0
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
            total += times.children_user + times.children_system
        return total


_CLI = (sys.executable, "-m", "sluice.cli")


def _environment(fault_directory: Path | None = None) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(faults.VARIABLE, None)
    if fault_directory is not None:
        environment[faults.VARIABLE] = str(fault_directory)
    return environment


@dataclass
class FaultRun:
    """One deterministic run over a stack: started, and again whenever it is killed.

    `changes` are settings of the run that differ.
    """

    stack: Stack
    name: str
    seconds: float  # until it counts as hung
    changes: Mapping[str, Any] = field(default_factory=dict)
    starts: int = 0
    returns: int = 0

    @property
    def directory(self) -> Path:
        return self.stack.directory / "runs" / self.name

    def run(self, fault: Fault | None = None) -> Outcome:
        """Train to the end with at most one fault on the way."""
        if fault is not None:
            faults.arm(self.stack.faults / fault.process, fault.name, fault.passing)
        try:
            return self._run_to_end(fault)
        finally:
            if fault is not None:
                faults.disarm(self.stack.faults / fault.process)

    def run_killed(self, at_checkpoint: int) -> Outcome:
        """Kills loop and services once the run checkpoint of step `at_checkpoint` is written."""
        began = time.monotonic()
        process = self._start()
        run_checkpoints = self.directory / "cuts"
        while True:
            over = process.poll() is not None or time.monotonic() - began > self.seconds
            # by name: the run may remove one between two looks, at the folder and into a file
            if any(int(path.stem) >= at_checkpoint for path in run_checkpoints.glob("*.json")):
                break
            if over:
                return self._ended(began, process, "it did not come to the run checkpoint")
            time.sleep(0.01)
        process.kill()
        self.stack.kill()
        process.communicate()
        self.stack.start(self.seconds)
        return self._run_to_end(None)

    def _run_to_end(self, fault: Fault | None) -> Outcome:
        began = time.monotonic()
        while True:
            process = self._start()
            left = self.seconds - (time.monotonic() - began)
            try:
                output, _ = process.communicate(timeout=max(left, 0.1))
            except subprocess.TimeoutExpired:
                return self._ended(began, process, "")
            self.returns += output.count(RETURN)
            if process.returncode == -signal.SIGKILL:
                continue  # as a restart policy would
            if process.returncode != 0:
                return self._ended(began, process, output.strip()[-2000:])
            if fault is not None and (self.stack.faults / fault.process / fault.name).exists():
                return self._ended(began, process, f"{fault.name} was not passed often enough")
            return self._judge(time.monotonic() - began)

    def _ended(self, began: float, process: subprocess.Popen[str], failure: str) -> Outcome:
        hung = process.poll() is None
        if hung:
            process.kill()
            process.communicate()
        seconds = time.monotonic() - began
        lost = 0 if hung else 1
        return Outcome(seconds, self.starts, self.returns, lost, hung=hung, failure=failure)

    def _start(self) -> subprocess.Popen[str]:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "run.yaml"
        if not path.exists():
            path.write_text(yaml.safe_dump(self._config()))
        resume = ["--resume"] if self.starts else []
        self.starts += 1
        return subprocess.Popen(
            [*_CLI, "train", str(path), *resume],
            env=_environment(self.stack.faults / "loop"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _config(self) -> dict[str, Any]:
        directory = self.stack.directory
        return {
            "run_dir": str(self.directory),
            "services": str(directory / "services.json"),
            "prompts": {"file": str(directory / "prompts.jsonl")},
            "environment": {"name": "prompts", "settings": {"reward": "position_match"}},
            "sampling": {"max_new_tokens": 5},
            "groups_per_step": GROUPS,
            "samples_per_group": SAMPLES,
            "steps": STEPS,
            "checkpoint_every": 2,
            "deterministic": True,
            "initial_checkpoint": self.stack.initial_checkpoint,
            "retention": {"cuts": 1, "blob_grace_seconds": 0.001},
            "service_timeout_seconds": self.seconds,
            **self.changes,
        }

    def _judge(self, seconds: float) -> Outcome:
        """Every group has to be consumed once, GROUPS of them by each step, none too old.

        With over-sampling those that finish first are; the others have to be waiting.
        """
        steps = int(self.changes.get("steps", STEPS))
        ledger = Ledger(self.directory / "ledger.sqlite")
        try:
            consumed = ledger.groups("consumed")
            waiting = [*ledger.groups("issued"), *ledger.groups("generated")]
            digests = tuple(ledger.digest_of_step(step) for step in range(1, steps + 1))
        finally:
            ledger.close()
        found = {group.position for group in consumed}
        expected = set(range(steps * GROUPS))
        if self.changes.get("over_sampling", 1) > 1:
            known = found | {group.position for group in waiting}
            lost = len(set(range(max(found) + 1)) - known) + max(0, len(expected) - len(found))
            doubled = 0
        else:
            lost, doubled = len(expected - found), len(found - expected)
        by_step = Counter(group.consumed_step for group in consumed)
        doubled += sum(max(0, count - GROUPS) for count in by_step.values())
        failure, bound = "", int(self.changes.get("max_staleness", 0))
        age = max((group.consumed_step or 0) - 1 - group.oldest_step for group in consumed)
        if age > bound:
            lost, failure = lost + 1, f"a group of {age} steps, the bound is {bound}"
        return Outcome(
            seconds, self.starts, self.returns, lost, doubled, failure=failure, digests=digests
        )


def save_first_checkpoint(stack: Stack, seconds: float) -> str:
    """The state of a fresh trainer, which every run on the stack begins with."""

    async def save() -> str:
        address = read_services(stack.directory / "services.json")["trainer"]
        async with TrainerClient(address) as trainer:
            await wait_for_trainer(trainer, seconds)
            return (await trainer.save_checkpoint("first")).checkpoint

    return asyncio.run(save())
