"""A tiny Qwen3-VL learns the colour and the place of a square from its pixels.

`python -m examples.demo_vision [--seed 0] [--algorithm ppo] [--engine sglang] [--backend megatron]`

Beside the reward of the first and the last steps the last line has what the final policy gets on
other pictures that were emptied (`blank`): a quarter, if it is the pictures that it answers from.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.demo import START_SECONDS
from examples.measured import Cost, empty_directory, held_out_score, measured_run
from sluice import logs
from sluice.config import parse_config
from sluice.demo.copy_digits import add_stack_flags
from sluice.durable import DirectoryError
from sluice.exit_code import exit_code
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig

ENVIRONMENT = "examples.environments.colours_and_places:ColoursAndPlaces"
# without a bonus one of the two questions may settle on one answer to every picture
LOSS = {"name": "ppo_clip", "clip_low": 0.2, "entropy_coefficient": 0.01}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"name": "grpo"}, "loss": LOSS},
    "ppo": {"advantage": {"name": "gae", "whiten": True}, "loss": LOSS},
}
HELD_OUT = 32  # tasks, which is all there are, so that one answer to all gets a quarter
BLANK = 0.3  # above it the answer is not in the picture


def services(run_dir: Path, model: Path, flags: argparse.Namespace) -> UpConfig:
    """One router, one trainer, one rollout process with both roles; for PPO a critic."""
    trainer = {
        "model": str(model),
        "seed": flags.seed,
        "backend": flags.backend,
        "optim": {"learning_rate": 1.2e-3},
        "ranks": {"count": flags.ranks * flags.tensor},
        "max_tokens_per_micro_batch": 8192,
    }
    if flags.backend == "megatron":
        trainer["megatron"] = {"tensor": flags.tensor, "dtype": "float32"}
    if flags.backend == "fsdp":
        trainer["fsdp"] = {"dtype": "float32"}
    rollout: dict[str, Any] = {
        "tokenizer": str(model),
        "engine": {"max_running": 512, "max_model_length": 64, "threads": 1},
        "episodes": {"user_modules": ["examples"]},
    }
    if flags.engine == "sglang":
        rollout["engine"] |= {"backend": "sglang", "sglang": {"python": str(flags.sglang_python)}}
    entries = {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": trainer},
        "rollout": {"kind": "rollout", "config": rollout},
    }
    if flags.algorithm == "ppo":
        critic = {**trainer, "backend": "reference", "head": "value", "ranks": {"count": 1}}
        for name in ("megatron", "fsdp"):
            critic.pop(name, None)
        entries["critic"] = {"kind": "trainer", "config": critic}
    up = {"run_dir": run_dir, "services": entries, "start_timeout_seconds": START_SECONDS}
    return parse_config(UpConfig, up)


def training(run_dir: Path, flags: argparse.Namespace) -> RunConfig:
    """32 groups of 16, until the mean of ten steps is 0.9; then other pictures, and blank ones."""
    held_out = {
        name: {
            "prompts": {"index_count": HELD_OUT, "shuffle": False},
            "groups": HELD_OUT,
            "environment": {"name": ENVIRONMENT, "settings": {"seed": flags.seed + 1, **settings}},
        }
        for name, settings in (("seen", {}), ("blank", {"blank": True}))
    }
    return parse_config(
        RunConfig,
        {
            "run_dir": run_dir,
            "services": run_dir / "services.json",
            "prompts": {"index_count": 100_000},
            "environment": {"name": ENVIRONMENT, "settings": {"seed": flags.seed}},
            "sampling": {"max_new_tokens": 1},
            "algorithm": ALGORITHMS[flags.algorithm],
            "critic": {} if flags.algorithm == "ppo" else None,
            "groups_per_step": 32,
            "samples_per_group": 16,
            "steps": flags.steps,
            "stop_at_reward": 0.9,
            "seed": flags.seed,
            "evaluation": {"datasets": held_out},
            "checkpoint_every": 100,
            "service_timeout_seconds": START_SECONDS,
        },
    )


def build_model(directory: Path, seed: int) -> None:
    """A fresh model."""
    # a process of its own, so that torch stays out of the loop's
    builder = "examples.models.tiny_qwen3_vl"
    build = [sys.executable, "-m", builder, str(directory), str(seed)]
    subprocess.run(build, check=True, timeout=START_SECONDS, stderr=subprocess.DEVNULL)


def parse_flags(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Adds what services are chosen by, and reads the command line. Exits where it is wrong."""
    add_stack_flags(parser)
    flags = parser.parse_args()
    if flags.tensor > 1 and flags.backend != "megatron":
        parser.error("--tensor needs --backend megatron")
    if flags.engine == "sglang" and not flags.sglang_python.exists():
        parser.error(f"there is no {flags.sglang_python}; `make sglang-cpu` makes one")
    return flags


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo-vision"))
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), default="grpo")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--target", type=float, default=0.9, help="exit 1 below this reward")
    flags = parse_flags(parser)
    logs.configure("WARNING")
    try:
        run_dir = empty_directory(flags.run_dir)
    except DirectoryError as error:
        parser.error(str(error))
    build_model(run_dir / "model", flags.seed)
    cost = Cost()
    run = training(run_dir, flags)
    if code := exit_code(measured_run(services(run_dir, run_dir / "model", flags), run, cost)):
        return code
    first, last = (sum(part) / len(part) for part in (cost.rewards[:3], cost.rewards[-10:]))
    blank = held_out_score(run.run_dir, "blank")
    print(
        f"vision: reward first={first:.3f} last={last:.3f} blank={blank:.3f} "
        f"steps={len(cost.rewards)} cpu_seconds={cost.cpu_seconds:.1f}"
    )
    return 0 if last >= flags.target and blank <= BLANK else 1


if __name__ == "__main__":
    sys.exit(main())
