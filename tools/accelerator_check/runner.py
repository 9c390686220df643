"""Runs steps, each as a process with a limit; what they came to stays in OUT/steps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tools.accelerator_check.packages import ROOT, missing, third_party
from tools.accelerator_check.steps import PACKAGE, CheckStep
from tools.accelerator_check.work import Form, found_path

Status = Literal["ok", "failed", "timeout"]
Command = Callable[[CheckStep], Sequence[str]]


@dataclass(frozen=True)
class CheckResult:
    """What a step came to. `reason` is empty for one that is ok; `device` is the one it ran on."""

    name: str
    status: Status
    seconds: float
    form: Form
    device: str
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def line(self) -> str:
        """`step: <name> ok|failed|timeout seconds=<s>` and its figures, or why not."""
        figures = " ".join(f"{name}={_shown(value)}" for name, value in self.figures.items())
        rest = figures if self.status == "ok" else f"reason: {self.reason}"
        return f"step: {self.name} {self.status} seconds={self.seconds:.1f} {rest}".rstrip()


class StepRunner:
    """Runs the steps that an earlier run in the same `out` has not done."""

    def __init__(
        self,
        out: Path,
        form: Form,
        device: str,
        *,
        seconds: float,
        environment: dict[str, str],
        command: Command | None = None,
    ) -> None:
        """`seconds` are for all steps together; one that they do not reach times out.

        `environment` is added for every step; `command` is what a test puts in their place.
        """
        self.out, self.form, self.device = out, form, device
        self._end = time.monotonic() + seconds
        self._environment = {**os.environ, **environment}
        self._command = command or self._own_command
        self._printing = threading.Lock()
        for name in ("steps", "logs", "work"):
            (out / name).mkdir(parents=True, exist_ok=True)

    def run(self, steps: Sequence[CheckStep], jobs: int = 1) -> list[CheckResult]:
        """Their results, in order; each printed as it ends. `jobs` at once: nothing to time."""
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(self._one, steps))

    def _one(self, step: CheckStep) -> CheckResult:
        result = None if step.always else self._earlier(step)
        if result is None:
            result = self._run(step)
            path = self.out / "steps" / f"{step.name}.json"
            path.write_text(json.dumps(asdict(result), indent=1))
        with self._printing:
            print(result.line, flush=True)
        return result

    def _earlier(self, step: CheckStep) -> CheckResult | None:
        try:
            found = CheckResult(
                **json.loads((self.out / "steps" / f"{step.name}.json").read_text())
            )
        except (OSError, ValueError, TypeError):
            return None
        same = (found.form, found.device) == (self.form, self.device)
        return found if same and found.status == "ok" else None

    def _run(self, step: CheckStep) -> CheckResult:
        began = time.monotonic()
        if gone := missing(third_party(step.roots)):
            return self._result(step, "failed", began, f"missing: {', '.join(gone)}")
        limit = step.small_seconds if self.form == "small" else step.seconds
        limit = min(limit, self._end - began)
        if limit <= 0:
            return self._result(step, "timeout", began, "no time was left to start it")
        found_path(self.out, step.name).unlink(missing_ok=True)
        log = self.out / "logs" / f"{step.name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._command(step),
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                return self._result(step, "timeout", began, f"not done in {limit:.0f} s")
            finally:  # and what it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            return self._result(step, "failed", began, _reason(log, code))
        return self._result(step, "ok", began, "")

    def _result(self, step: CheckStep, status: Status, began: float, reason: str) -> CheckResult:
        try:
            found = json.loads(found_path(self.out, step.name).read_text())
        except (OSError, ValueError):
            found = {}
        return CheckResult(
            name=step.name,
            status=status,
            seconds=round(time.monotonic() - began, 2),
            form=self.form,
            device=self.device,
            figures=found.get("figures", {}),
            notes=found.get("notes", []),
            reason="; ".join(found.get("failures", [])) or reason,
        )

    def _own_command(self, step: CheckStep) -> Sequence[str]:
        return [sys.executable, "-m", f"{PACKAGE}.work", step.name, str(self.out), self.form]


def _reason(log: Path, code: int) -> str:
    """The last line that a step wrote, which is its exception if it had one."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:300] if lines else "it said nothing"
    return f"ended with {code}: {last}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace(" ", "_")
