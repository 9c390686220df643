"""What the demo costs beside the same training written as one bare loop.

Both sides are whole processes: imports, building the model, training, ending. They have the same
seed, learning rate, batch and losses, and take as many steps, one after the other on one machine.
Of several rounds each figure is the median.
"""

from __future__ import annotations

import argparse
import compileall
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

SIDE_SECONDS = 1800
LEARNED = 0.85  # mean reward of the last ten steps: below, a side has not done the work


def run(*arguments: str) -> tuple[str, float]:
    """Returns the last line a module prints, and the processor time of all its processes."""
    before = _children_seconds()
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=SIDE_SECONDS, check=True
    )
    return done.stdout.splitlines()[-1], _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(seed: str) -> dict[str, float]:
    """Runs both sides once; `reward` is that of the one that learned less."""
    with tempfile.TemporaryDirectory() as directory:
        line, cpu = run(
            *("examples.demo", "--seed", seed, "--run-dir", str(Path(directory, "demo")))
        )
        print(line)
        figures = dict(word.split("=") for word in line.split() if "=" in word)
        bare_line, bare_cpu = run(
            *("benchmarks.bare_loop", str(Path(directory, "bare")), "--seed", seed),
            *("--steps", figures["steps"]),
        )
    bare = json.loads(bare_line)
    reward = fmean(bare["rewards"][-10:])
    print(f"bare: reward last={reward:.3f} cpu_per_step={bare['cpu_per_step']:.3f}", flush=True)
    return {
        "sluice": cpu,
        "bare": bare_cpu,
        "ratio": cpu / bare_cpu,
        "per_step_ratio": float(figures["cpu_per_step"]) / bare["cpu_per_step"],
        "startup_cpu": float(figures["startup_cpu"]),
        "reward": min(reward, float(figures["last"])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    for part in ("sluice", "services"):  # as an installed package and the libraries of both are
        compileall.compile_dir(Path(__file__).parents[1] / part, quiet=1)
    rounds = [measure(options.seed) for _ in range(options.rounds)]
    middle = {name: median(each[name] for each in rounds) for name in rounds[0]}
    print(
        f"bench_demo: sluice={middle['sluice']:.1f} bare={middle['bare']:.1f} "
        f"ratio={middle['ratio']:.2f} per_step_ratio={middle['per_step_ratio']:.2f} "
        f"startup_cpu={middle['startup_cpu']:.1f}"
    )
    return 0 if min(each["reward"] for each in rounds) >= LEARNED else 1


if __name__ == "__main__":
    sys.exit(main())
