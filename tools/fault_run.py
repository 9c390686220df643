"""A deterministic run over a stack of services, disturbed, and what came of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from sluice import faults
from sluice.client import TrainerClient
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.run_directory import list_run_checkpoints
from sluice.loop.training import wait_for_trainer
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import read_blob
from sluice.samples.blobs import BlobNotFoundError
from sluice.supervise import read_services
from sluice.weights.store import WeightStore
from tools.fault_cases import Disturbance, Fault
from tools.fault_damage import Disturbing, Scene
from tools.fault_stack import (
    CLI,
    Stack,
    environment,
)

STEPS, GROUPS, SAMPLES = 5, 4, 4
TICK_SECONDS = 0.1
TELLINGS = 2  # of one run, before it is over


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
    told: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.stack.directory / "runs" / self.name

    def run(self, fault: Fault | None = None) -> Outcome:
        """Train to the end with at most one fault on the way."""
        if fault is not None:
            number = signal.SIGSTOP if fault.stops else signal.SIGKILL
            faults.arm(self.stack.faults / fault.process, fault.name, fault.passing, number)
            if fault.beside:
                beside = self.stack.faults / "trainer", "weights.announced", fault.beside
                faults.arm(*beside, signal.SIGSTOP)
        try:
            return self._run_to_end(fault)
        finally:
            if fault is not None:
                faults.disarm(self.stack.faults / fault.process)
                faults.disarm(self.stack.faults / "trainer")

    def run_disturbed(self, disturbance: Disturbance) -> Outcome:
        """Train to the end; at a point of the loop something is done to the stack."""
        began, armed = time.monotonic(), self.stack.faults / "loop"
        faults.arm(armed, disturbance.at, disturbance.passing, signal.SIGSTOP)
        with ExitStack() as ending:
            ending.callback(faults.disarm, armed)
            process = self._start()
            ending.callback(_end, process)  # it could not begin, or the matrix is stopped
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                if process.poll() is not None or time.monotonic() - began > self.seconds:
                    return self._ended(began, process, f"it did not come to {disturbance.at}")
                time.sleep(0.01)
            scene = Scene(self.stack, self.directory, process.pid, self.stack.network)
            disturbing = Disturbing(disturbance, scene)
            ending.callback(disturbing.undo)
            disturbing.begin()
            process.send_signal(signal.SIGKILL if disturbance.restart else signal.SIGCONT)
            disturbing.go_on(self.seconds)
            outcome = self._run_to_end(None, process, disturbing)
        if missing := disturbing.finish(self.seconds):
            outcome = replace(outcome, hung=True, failure=f"{outcome.failure} {missing}".strip())
        return outcome

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

    def _run_to_end(
        self,
        fault: Fault | None,
        process: subprocess.Popen[str] | None = None,
        disturbing: Disturbing | None = None,
    ) -> Outcome:
        """From a start, or from where `process` is."""
        began = time.monotonic()
        while True:
            process = process or self._start()
            output = self._output(process, began + self.seconds, disturbing, fault)
            if output is None:
                return self._ended(began, process, "")
            self.returns += output.count(RETURN)
            if process.returncode == -signal.SIGKILL:
                process = None
                continue  # as a restart policy would
            may_end = disturbing is not None and disturbing.may_end_run
            if disturbing is not None and may_end and is_told(process.returncode, output):
                self.told.append(output.strip().splitlines()[-1])
                if len(self.told) >= TELLINGS and disturbing.is_damage:
                    seconds = time.monotonic() - began  # what the run itself needs is destroyed
                    return Outcome(seconds, self.starts, self.returns, told=len(self.told))
                if len(self.told) <= TELLINGS:
                    disturbing.undo()  # as a user would put right what the line names
                    process = None
                    continue
            if process.returncode != 0:
                return self._ended(began, process, output.strip()[-2000:])
            if fault is not None and self._is_armed(fault):
                return self._ended(began, process, f"{fault.name} was not passed often enough")
            return self._judge(time.monotonic() - began)

    def _output(
        self,
        process: subprocess.Popen[str],
        deadline: float,
        disturbing: Disturbing | None,
        fault: Fault | None,
    ) -> str | None:
        """What a loop said that has ended; None for one that does not end in time."""
        while True:
            try:
                return process.communicate(timeout=TICK_SECONDS)[0]
            except subprocess.TimeoutExpired:
                if disturbing is not None:
                    disturbing.tick()
                if fault is not None and fault.beside and not self._is_armed(fault):
                    self._let_ranks_go_on(process.pid)
                if time.monotonic() > deadline:
                    return None

    def _is_armed(self, fault: Fault) -> bool:
        return (self.stack.faults / fault.process / fault.name).exists()

    def _let_ranks_go_on(self, loop: int) -> None:
        scene = Scene(self.stack, self.directory, loop)
        for rank in ("rank0", "rank1"):
            for pid in scene.process_ids(rank):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _ended(self, began: float, process: subprocess.Popen[str], failure: str) -> Outcome:
        hung = _end(process)
        seconds = time.monotonic() - began
        lost = 0 if hung else 1
        return Outcome(seconds, self.starts, self.returns, lost, hung=hung, failure=failure)

    def _start(self) -> subprocess.Popen[str]:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "run.yaml"
        if not path.exists():
            path.write_text(yaml.safe_dump(self._config()))
        if not self.starts:
            self.stack.wait_whole(self.seconds)
        resume = ["--resume"] if self.starts else []
        self.starts += 1
        return subprocess.Popen(
            [*CLI, "train", str(path), *resume],
            env=environment(self.stack.faults / "loop"),
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
            "environment": {"name": "prompts", "settings": {"reward": REWARD}},
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
            dropped = set(ledger.dropped())
            digests = tuple(ledger.digest_of_step(step) for step in range(1, steps + 1))
        finally:
            ledger.close()
        found = {group.position for group in consumed}
        expected = set(range(steps * GROUPS))
        if self.changes.get("over_sampling", 1) > 1:
            known = found | {group.position for group in waiting}
            lost = len(set(range(max(found) + 1)) - known) + max(0, len(expected) - len(found))
            doubled = 0
        elif self._is_behind:  # what lost weights had sampled is dropped, and another group instead
            lost = len(set(range(max(found) + 1)) - found - dropped)
            lost += max(0, len(expected) - len(found))
            doubled = max(0, len(found) - len(expected))
        else:
            lost, doubled = len(expected - found), len(found - expected)
        by_step = Counter(group.consumed_step for group in consumed)
        doubled += sum(max(0, count - GROUPS) for count in by_step.values())
        failure, bound = "", int(self.changes.get("max_staleness", 0))
        age = max((group.consumed_step or 0) - 1 - group.oldest_step for group in consumed)
        if age > bound:
            lost, failure = lost + 1, f"a group of {age} steps, the bound is {bound}"
        if self._is_behind and (unknown := self._unknown_versions(consumed)):
            lost, failure = lost + 1, f"weights that were never durable: {sorted(unknown)}"
        return Outcome(
            seconds,
            self.starts,
            self.returns,
            lost,
            doubled,
            told=len(self.told),
            failure=failure,
            digests=digests,
            dropped=len(dropped),
        )

    @property
    def _is_behind(self) -> bool:
        return self.changes.get("weight_transport") == "collective"

    def _unknown_versions(self, consumed: Sequence[LedgerGroup]) -> set[int]:
        """Versions that the run trained on, or would go back to, and that no store ever had.

        On a stack that keeps all versions.
        """
        root = self.stack.directory / "store"
        named = {each.weight_version for each in list_run_checkpoints(self.directory / "cuts")}
        for group in consumed:
            assert group.blob is not None
            with suppress(BlobNotFoundError):  # collected: of a step before the run checkpoint
                for sample in decode_group(read_blob(root, group.blob)):
                    named.update(span.version for span in sample.spans)
        return named - set(WeightStore(root / "weights").versions())


def _end(process: subprocess.Popen[str]) -> bool:
    """Whether it still ran."""
    ran = process.poll() is None
    if ran:
        process.kill()
        process.communicate()
    return ran


def is_told(code: int | None, output: str) -> bool:
    """Whether a run ended with one line for its user, and no trace."""
    lines = [line for line in output.splitlines() if line.startswith("sluice: ")]
    return code == 2 and len(lines) == 1 and "Traceback" not in output


def save_first_checkpoint(stack: Stack, seconds: float) -> str:
    """The state of a fresh trainer, which every run on the stack begins with."""

    async def save() -> str:
        address = read_services(stack.directory / "services.json")["trainer"]
        async with TrainerClient(address) as trainer:
            await wait_for_trainer(trainer, seconds)
            return (await trainer.save_checkpoint("first")).checkpoint

    return asyncio.run(save())


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `digests`: of the weights after each step, from the first on.

    `returns`: how often a loop that went on went back to its last run checkpoint. `told`: how often
    it ended with a line that says what is wrong, which was then put right; where it cannot be, as
    the run's own data are destroyed, there are no digests. `silent`: 1 if damaged data was used
    without a word. `orphans`: processes that nobody is the parent of any more.
    `dropped`: groups that others took the place of.
    """

    seconds: float
    starts: int = 1
    returns: int = 0
    lost: int = 0
    doubled: int = 0
    hung: bool = False
    silent: int = 0
    orphans: int = 0
    told: int = 0
    dropped: int = 0
    failure: str = ""
    digests: tuple[str, ...] = ()


REWARD = "tools.fault_reward:matched"


RETURN = "going back to the last run checkpoint"  # in the log of the loop
