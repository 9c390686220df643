"""kill -9 of the trainer's rank, then of the engine, while the demo runs on the device."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from sluice.loop.report import read_metrics
from tools.accelerator_check.work import StepWork

RANK = "services.trainer.rank"
POLL_SECONDS = 0.05


class DemoEndedError(Exception):
    """The demo was over before it came to where it was to be killed."""


def run(work: StepWork, placement: str = "separate") -> None:
    """The run must come to its last step all the same."""
    steps = 8 if work.small else 24
    run_dir = work.directory / "run"
    command = [sys.executable, "-m", "examples.demo", "--run-dir", str(run_dir)]
    command += ["--placement", placement]
    demo = subprocess.Popen([*command, "--steps", str(steps), "--target", "0"])
    try:
        for name, step in (("rank", 1), ("engine", steps // 2 - 1)):
            _until_step(demo, run_dir, step)
            victim = _rank(run_dir) if name == "rank" else _service(run_dir, "rollout")
            before, began = _steps(run_dir), time.monotonic()
            victim.kill()
            _until_step(demo, run_dir, before + 2)
            work.record(**{f"{name}_back_after_s": time.monotonic() - began})
        code = demo.wait()
    except DemoEndedError as error:
        work.fail(str(error))
        return
    finally:
        demo.kill()
        demo.wait()
    done = _steps(run_dir)
    work.record(steps=done, of=steps, killed=2)
    if code or done != steps:
        work.fail(f"the demo ended with {code} after {done} of {steps} steps")


def _until_step(demo: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    """Wait, as long as the demo lives; the step's own limit ends a hang."""
    while _steps(run_dir) < step:
        if demo.poll() is not None and _steps(run_dir) < step:
            raise DemoEndedError(f"the demo ended with {demo.returncode} too early")
        time.sleep(POLL_SECONDS)


def _steps(run_dir: Path) -> int:
    return max((row["step"] for row in read_metrics(run_dir) if "reward_mean" in row), default=0)


def _service(run_dir: Path, name: str) -> psutil.Process:
    known = json.loads((run_dir / "services.json").read_text())
    return psutil.Process(known[name]["pid"])


def _rank(run_dir: Path) -> psutil.Process:
    children = _service(run_dir, "trainer").children(recursive=True)
    return next(child for child in children if RANK in child.cmdline())
