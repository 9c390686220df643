"""A real model: SmolLM2-135M-Instruct learns to answer with the number alone, by GRPO on a CPU.

`python -m examples.demo_smollm2 [--task compare | chain_sum] [--lora 16] [--seed 0]`

Much of what it learns is elicitation: asked which of two numbers is larger it first says so in a
sentence, afterwards it says the number. With `--lora` it is adapters of that rank that learn, and
the model stays as it was.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from examples.models.smollm2 import ensure_smollm2
from sluice import logs
from sluice.config import parse_config
from sluice.demo.measured import Cost, empty_directory, measured_run
from sluice.durable import DirectoryError
from sluice.exit_code import exit_code
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig

HELD_OUT = 64
WHOLE_RATE, ADAPTER_RATE = 3e-5, 2e-4
CHAIN_SUM_QUESTION = "State the final answer to the following arithmetic problem: 2 + 3 ="


def compare_row(rng: random.Random) -> dict[str, Any]:
    """Which of two two-digit numbers is larger; one solved example comes first."""
    first, second = rng.sample(range(10, 100), 2)
    messages = [
        {"role": "system", "content": "Reply with only a number."},
        {"role": "user", "content": "Which number is larger, 2 or 5?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": f"Which number is larger, {first} or {second}?"},
    ]
    return {"messages": messages, "answer": str(max(first, second))}


def write_rows(path: Path, seed: int, count: int) -> Path:
    rng = random.Random(seed)
    path.write_text("".join(json.dumps(compare_row(rng)) + "\n" for _ in range(count)))
    return path


def compare_task(run_dir: Path, seed: int) -> dict[str, Any]:
    """Random pairs; held-out ones from another seed."""
    return {
        "prompts": {"file": write_rows(run_dir / "prompts.jsonl", seed, 4096)},
        "environment": {"name": "prompts", "settings": {"reward": "exact_match"}},
        "sampling": {"max_new_tokens": 6},
        "evaluation": {
            "datasets": {
                "held_out": {
                    "prompts": {
                        "file": write_rows(run_dir / "held_out.jsonl", 999, HELD_OUT),
                        "shuffle": False,
                    },
                    "groups": HELD_OUT,
                }
            }
        },
    }


def chain_sum_task(run_dir: Path, seed: int) -> dict[str, Any]:
    """reasoning_gym's sums of two one-digit numbers, one shown solved."""

    def environment(data_seed: int) -> dict[str, Any]:
        sizes = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        return {
            "name": "reasoning_gym",
            "settings": {
                "dataset": "chain_sum",
                "size": 100_000,
                "seed": data_seed,
                "config": sizes,
                "system_prompt": "Calculator",
                "examples": [[CHAIN_SUM_QUESTION, "5"]],
            },
        }

    return {
        "prompts": {"index_count": 100_000, "shuffle": False},
        "environment": environment(seed),
        "sampling": {"max_new_tokens": 5},
        "evaluation": {
            "datasets": {
                "held_out": {
                    "prompts": {"index_count": HELD_OUT, "shuffle": False},
                    "environment": environment(10**6 + 7),
                    "groups": HELD_OUT,
                }
            }
        },
    }


TASKS = {"compare": compare_task, "chain_sum": chain_sum_task}


def services(run_dir: Path, model: Path, seed: int, lora: int) -> UpConfig:
    """float32 weights trained under bfloat16 autocast, a bfloat16 engine; adapters of rank `lora`
    beside the model, unless that is 0."""
    trainer: dict[str, Any] = {
        "model": str(model),
        "seed": seed,
        "optim": {"learning_rate": ADAPTER_RATE if lora else WHOLE_RATE},
        "autocast": True,
        "max_tokens_per_micro_batch": 4096,
    }
    engine: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_running": 64,
        "max_model_length": 192,
        "threads": 1,
    }
    if lora:
        trainer["lora"] = {"rank": lora}
        engine["model"] = str(model)
    entries = {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": trainer},
        "rollout": {"kind": "rollout", "config": {"tokenizer": str(model), "engine": engine}},
    }
    return parse_config(UpConfig, {"run_dir": run_dir, "services": entries})


def training(run_dir: Path, flags: argparse.Namespace) -> RunConfig:
    """8 groups of 8, until the mean reward of five steps is high enough."""
    return parse_config(
        RunConfig,
        {
            "run_dir": run_dir,
            "services": run_dir / "services.json",
            "groups_per_step": 8,
            "samples_per_group": 8,
            "steps": flags.steps,
            "stop_at_reward": flags.stop_at_reward,
            "stop_window": 5,
            "checkpoint_every": 0,
            "seed": flags.seed,
            **TASKS[flags.task](run_dir, flags.seed),
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(TASKS), default="compare")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains the model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stop-at-reward", type=float, default=0.85)
    parser.add_argument("--target", type=float, default=0.8, help="exit 1 below this score")
    flags = parser.parse_args()
    if flags.lora < 0:
        parser.error("--lora: a rank is positive; 0 trains the model")
    logs.configure("WARNING")
    try:
        run_dir = empty_directory(flags.run_dir or Path(f"runs/smollm2-{flags.task}"))
    except DirectoryError as error:
        parser.error(str(error))
    model = ensure_smollm2()
    cost = Cost()
    if code := exit_code(
        measured_run(
            services(run_dir, model, flags.seed, flags.lora), training(run_dir, flags), cost
        )
    ):
        return code
    print(
        f"demo-smollm2: reward first={cost.scores[0]:.3f} last={cost.scores[-1]:.3f} "
        f"{cost.describe()}"
    )
    return 0 if cost.scores[-1] >= flags.target else 1


if __name__ == "__main__":
    sys.exit(main())
