"""The main job on a laptop: a tiny Qwen3, built on the spot, learns to copy four digits by GRPO.

`sluice demo [--seed 0] [--algorithm grpo] [--engine sglang] [--lora 8] [--run-dir runs/demo]`
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from sluice import logs
from sluice.config import ConfigError, FlagParser
from sluice.demo.adapters import train_adapters
from sluice.demo.copy_digits import (
    ALGORITHMS,
    DISTILLED,
    DIVERGENCES,
    SAMPLED,
    add_service_flags,
    check_service_flags,
    prepare,
    services,
    training,
    weights_directory,
)
from sluice.demo.distillation import distil
from sluice.demo.measured import Cost, empty_directory, measured_run
from sluice.durable import DirectoryError
from sluice.exit_code import exit_code


def read_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Raises ConfigError."""
    parser = FlagParser(prog="sluice demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    add_service_flags(parser)
    algorithms = sorted([*ALGORITHMS, DISTILLED])
    parser.add_argument("--algorithm", choices=algorithms, default="grpo")
    parser.add_argument(
        "--teacher", choices=["engine", "trainer"], default="engine", help="for --algorithm opd"
    )
    parser.add_argument(
        "--divergence",
        choices=[SAMPLED, *DIVERGENCES],
        default=SAMPLED,
        help="for --algorithm opd: of the sampled tokens, or of those the teacher finds likeliest",
    )
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains the model")
    parser.add_argument(
        "--placement",
        choices=["separate", "colocated"],
        default="separate",
        help="colocated: trainer and engine sleep in turns, and weights go through memory",
    )
    parser.add_argument("--max-staleness", type=int, default=0, help="steps; 0 is synchronous")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--target", type=float, default=0.9, help="exit 1 below this reward")
    flags = parser.parse_args(arguments)
    if flags.teacher != "engine" and flags.algorithm != DISTILLED:
        parser.error(f"--teacher needs --algorithm {DISTILLED}")
    if flags.divergence != SAMPLED and flags.algorithm != DISTILLED:
        parser.error(f"--divergence needs --algorithm {DISTILLED}")
    if flags.lora and flags.algorithm == DISTILLED:
        parser.error("--lora: a run of a teacher and students trains whole models")
    if flags.lora < 0:
        parser.error("--lora: a rank is positive; 0 trains the model")
    if flags.lora and flags.optimizer == "muon":
        parser.error("--optimizer muon is not for adapters")
    for name, least in (("steps", 1), ("max_staleness", 0)):
        if getattr(flags, name) < least:
            parser.error(f"--{name.replace('_', '-')}: is {least} or more")
    if math.isnan(flags.target):
        parser.error("--target: is a number")
    check_service_flags(parser, flags)
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it with these flags, or the process's; the exit code."""
    logs.configure("WARNING")
    try:
        flags = read_flags(arguments)
        run_dir = empty_directory(flags.run_dir)
    except (ConfigError, DirectoryError) as error:
        print(f"sluice demo: {error}", file=sys.stderr)
        return 2
    prepare(run_dir, flags.seed)
    if flags.lora:
        return train_adapters(run_dir, flags)
    cost = Cost()
    if flags.algorithm == DISTILLED:
        return distil(run_dir, flags)
    with weights_directory(flags.placement) as weights:
        up = services(run_dir, run_dir / "model", flags, weights)
        run = training(run_dir, run_dir / "prompts.jsonl", flags)
        if code := exit_code(measured_run(up, run, cost)):
            return code
    first, last = (sum(part) / len(part) for part in (cost.rewards[:5], cost.rewards[-10:]))
    missed = last < flags.target
    if missed:
        print(f"the last ten steps have {last:.3f}, below --target {flags.target}", file=sys.stderr)
    print(f"demo: reward first={first:.3f} last={last:.3f} {cost.describe()}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
