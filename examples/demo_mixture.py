"""A tiny Qwen3 learns two tasks of a mixture, 3 groups to 1, over a run that is killed once.

`python -m examples.demo_mixture [--seed 0] [--backend fsdp] [--engine sglang]`

`copy`: `1234=` asks for 1234. `next`: `=1234=` asks for 2345. The run is killed (-9) in the
middle and resumed. `counts_exact`: every step trained on the groups that the weights name, each
task of both environments came to its turn once and in its order, and nothing was left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from examples.demo import DIGITS, START_SECONDS
from examples.measured import Cost, empty_directory, held_out_score
from sluice import logs
from sluice.config import parse_config
from sluice.demo.copy_digits import add_service_flags, check_service_flags, prepare, services
from sluice.durable import DirectoryError
from sluice.exit_code import exit_code
from sluice.loop.config import RunConfig
from sluice.loop.ledger import Ledger
from sluice.loop.report import read_metrics
from sluice.loop.workers import RolloutFailedError
from sluice.supervise import Supervisor, supervised

WEIGHTS = {"copy": 3, "next": 1}
GROUPS = 32
EVERY = 10  # steps between evaluations, and between run checkpoints
KILL_AFTER = 25  # steps: between two run checkpoints, so that some are trained on again
ROWS, HELD_OUT = 4096, 64
RUN_SECONDS = 3600


def write_prompts(path: Path, name: str, count: int, seed: int) -> None:
    """Tasks of one environment: `1234=` asks for 1234, `=1234=` for 2345."""
    rng = random.Random(f"{name}/{seed}")
    with path.open("w") as file:
        for _ in range(count):
            digits = "".join(rng.choice("0123456789") for _ in range(DIGITS))
            row = {"prompt": f"{digits}=", "answer": digits}
            if name == "next":
                following = "".join(str((int(digit) + 1) % 10) for digit in digits)
                row = {"prompt": f"={digits}=", "answer": following}
            file.write(json.dumps(row) + "\n")


def training(run_dir: Path, flags: argparse.Namespace) -> dict[str, Any]:
    """A run until both environments have 0.9 of the reward on tasks that were held out."""
    environment = {"name": "prompts", "settings": {"reward": "position_match"}}
    shares, datasets = {}, {}
    for name, weight in WEIGHTS.items():
        trained, held_out = (run_dir / f"{name}_{part}.jsonl" for part in ("train", "held_out"))
        write_prompts(trained, name, ROWS, flags.seed)
        write_prompts(held_out, name, HELD_OUT, flags.seed + 1)
        shares[name] = {
            "weight": weight,
            "prompts": {"file": str(trained)},
            "environment": environment,
        }
        datasets[name] = {
            "prompts": {"file": str(held_out), "shuffle": False},
            "environment": name,
            "groups": HELD_OUT,
            "stop_at_score": 0.9,
        }
    return {
        "run_dir": str(run_dir),
        "services": str(run_dir / "services.json"),
        "environments": shares,
        "evaluation": {"datasets": datasets, "every_steps": EVERY, "beside_training": False},
        "sampling": {"max_new_tokens": DIGITS + 1},
        # a bonus, or the rarer task is left at what the other one answers
        "algorithm": {
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "entropy_coefficient": 0.03},
        },
        "groups_per_step": GROUPS,
        "samples_per_group": 16,
        "steps": flags.steps,
        "checkpoint_every": EVERY,
        "seed": flags.seed,
        "service_timeout_seconds": START_SECONDS,
    }


async def train(run_yaml: Path, run_dir: Path, *, kill_after: int | None) -> None:
    """One `sluice train`, killed after so many steps or left to its end.

    Raises RolloutFailedError.
    """
    resume = [] if kill_after is not None else ["--resume"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli", "train", str(run_yaml), *resume),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=None if kill_after is None else asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(RUN_SECONDS):
            while kill_after is not None and process.returncode is None:
                if last_step(run_dir) >= kill_after:
                    process.send_signal(signal.SIGKILL)
                    break
                await asyncio.sleep(0.05)
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    if code != (0 if kill_after is None else -signal.SIGKILL):
        raise RolloutFailedError(f"sluice train ended with {code} at step {last_step(run_dir)}")


def last_step(run_dir: Path) -> int:
    """The last step that the run told of."""
    return max((row["step"] for row in read_metrics(run_dir)), default=0)


def counts_are_exact(run_dir: Path) -> bool:
    """Whether what was trained on is what the weights, the order of tasks and the steps ask for."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    groups = ledger.groups("consumed")
    ledger.close()
    steps, total = last_step(run_dir), sum(WEIGHTS.values())
    exact = [group.position for group in groups] == list(range(steps * GROUPS))
    for name, weight in WEIGHTS.items():
        own = [group for group in groups if group.environment == name]
        exact &= [group.task for group in own] == list(range(steps * GROUPS * weight // total))
        by_step = [group.consumed_step for group in own]
        share = GROUPS * weight // total
        exact &= by_step == [step for step in range(1, steps + 1) for _ in range(share)]
    return exact


async def demo(flags: argparse.Namespace, run_dir: Path, cost: Cost) -> None:
    """Services, a run that is killed, and the run that goes on. Raises RolloutFailedError."""
    run_yaml = run_dir / "run.yaml"
    run = training(run_dir, flags)
    parse_config(RunConfig, run)
    run_yaml.write_text(yaml.safe_dump(run))
    supervisor = Supervisor(services(run_dir, run_dir / "model", flags))
    async with supervised(supervisor):
        await train(run_yaml, run_dir, kill_after=KILL_AFTER)
        await train(run_yaml, run_dir, kill_after=None)
    cost.cpu_seconds = supervisor.cpu_seconds()


def read_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Of these arguments, or the process's. Exits where they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo-mixture"))
    add_service_flags(parser)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--target", type=float, default=0.9, help="exit 1 below this score")
    parser.set_defaults(algorithm="grpo", placement="separate")
    flags = parser.parse_args(arguments)
    check_service_flags(parser, flags)
    return flags


def main() -> int:
    """Run it with the process's flags; the exit code."""
    flags = read_flags()
    logs.configure("WARNING")
    try:
        run_dir = empty_directory(flags.run_dir)
    except DirectoryError as error:
        print(f"demo_mixture: {error}", file=sys.stderr)
        return 2
    prepare(run_dir, flags.seed)
    cost = Cost()
    if code := exit_code(demo(flags, run_dir, cost)):
        return code
    scores = {name: held_out_score(run_dir, name) for name in WEIGHTS}
    exact = counts_are_exact(run_dir)
    print(f"steps={last_step(run_dir)} cpu_seconds={cost.cpu_seconds:.1f}")
    print(f"mixture: a={scores['copy']:.3f} b={scores['next']:.3f} counts_exact={int(exact)}")
    return 0 if exact and min(scores.values()) >= flags.target else 1


if __name__ == "__main__":
    sys.exit(main())
