"""`examples.demo_vision` over all services on the device: a tiny model learns from pixels."""

from __future__ import annotations

import re
import subprocess
import sys

from tools.accelerator_check.work import StepWork

STEPS, SMALL_STEPS = 60, 2
LINE = re.compile(r"vision: reward first=(\S+) last=(\S+) blank=(\S+) steps=(\d+)")


def run(work: StepWork) -> None:
    """Some steps, in which the reward rises; in the small form two, whatever they reach."""
    steps = SMALL_STEPS if work.small else STEPS
    command = [sys.executable, "-m", "examples.demo_vision", "--steps", str(steps)]
    command += ["--run-dir", str(work.directory / "run"), "--target", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    found = LINE.search(done.stdout)
    if found is None:
        work.fail(f"the demo ended with {done.returncode} and no figures: see the log")
        return
    first, last, blank, count = (float(value) for value in found.groups())
    work.record(reward_first=first, reward_last=last, blank=blank, steps=int(count))
    if not work.small and last <= first:
        work.fail(f"the reward was {first} at first and {last} after {int(count)} steps")
