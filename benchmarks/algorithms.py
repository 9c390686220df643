"""Every shipped loss of a policy on the copy task: steps and processor seconds to a reward of 0.9.

Each is `examples.demo` with that loss, a whole run over services of its own, once a seed. `value`
learns beside `ppo_clip` in `ppo`. Those that take no rewards, of rows or of teachers, are not here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from sluice.algo.plugins import SHIPPED
from sluice.demo.copy_digits import ALGORITHMS

RUN_SECONDS = 3600
WITHOUT_REWARDS = ("sft", "cross_entropy", "topk_forward_kl", "topk_reverse_kl", "topk_jsd")
LINE = re.compile(r"demo: .* last=(?P<last>\S+) steps=(?P<steps>\d+) .*\bcpu_seconds=(?P<cpu>\S+)")


def demo_of(loss: str) -> str:
    """Returns the demo that learns by a loss; the first of several."""
    if loss == "value":
        return "ppo"
    return next(name for name, each in ALGORITHMS.items() if each["loss"]["name"] == loss)


def run(algorithm: str, seed: int, steps: int) -> dict[str, float]:
    """Returns what the demo came to: `last`, `steps`, `cpu`; nothing if it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "examples.demo", "--algorithm", algorithm]
        command += ["--seed", str(seed), "--steps", str(steps)]
        command += ["--run-dir", str(Path(scratch, "run"))]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
    lines = done.stdout.splitlines()
    match = LINE.search(lines[-1]) if lines else None
    return {name: float(value) for name, value in match.groupdict().items()} if match else {}


def main() -> int:
    policy = [name for name in SHIPPED["loss"] if name not in WITHOUT_REWARDS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=policy, default=policy)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--target", type=float, default=0.9)
    options = parser.parse_args()
    learned = 0
    print("| loss | " + " | ".join(f"steps, CPU-s (seed {seed})" for seed in options.seeds) + " |")
    print("|---" * (1 + len(options.seeds)) + "|")
    for loss in options.only:
        found = [run(demo_of(loss), seed, options.steps) for seed in options.seeds]
        reached = [each.get("last", 0.0) >= options.target for each in found]
        learned += all(reached)
        cells = [
            f"{each['steps']:.0f}, {each['cpu']:.0f}"
            if well
            else f"not learned ({each.get('last', float('nan')):.2f})"
            for each, well in zip(found, reached, strict=True)
        ]
        print(f"| `{loss}` | " + " | ".join(cells) + " |", flush=True)
    print(f"algorithms: shipped={len(options.only)} learned={learned}")
    return 0 if learned == len(options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
