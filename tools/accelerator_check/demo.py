"""`examples.demo` over all services on the device: it learns in as many steps as on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys

from tools.accelerator_check.work import StepWork

CPU_STEPS = 68  # of seed 0 on a CPU, both backends: docs/benchmarks.md
SLACK = 2.0  # the chances of rounding: other seeds take 54 and 55 steps
TARGET = 0.9
SMALL_STEPS = 3
LINE = re.compile(r"demo: reward first=(\S+) last=(\S+) steps=(\d+) seconds=(\d+)")


def run(work: StepWork, backend: str) -> None:
    """Train until the reward is there; in the small form a few steps, whatever they reach."""
    steps = SMALL_STEPS if work.small else round(SLACK * CPU_STEPS)
    command = [sys.executable, "-m", "examples.demo", "--backend", backend]
    command += ["--run-dir", str(work.directory / "run"), "--steps", str(steps)]
    command += ["--target", "0" if work.small else str(TARGET)]
    # its own limit is that of the step
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    found = LINE.search(done.stdout)
    if found is None:
        work.fail(f"the demo ended with {done.returncode} and no figures: see the log")
        return
    first, last, count, seconds = (float(value) for value in found.groups())
    work.record(
        reward_first=first,
        reward_last=last,
        steps=int(count),
        cpu_steps=CPU_STEPS,
        seconds=seconds,
    )
    if done.returncode:
        work.fail(f"reward {last} after {int(count)} steps; a CPU takes {CPU_STEPS} to {TARGET}")
