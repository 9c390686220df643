"""Services and runs in which a tiny Qwen3 learns to copy four digits."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice.config import parse_config
from sluice.durable import scratch
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig

DIGITS, PROMPTS = 4, 4096
START_SECONDS = 600  # SGLang imports for a minute on a busy machine

CLIPPED = {"name": "ppo_clip", "clip_low": 0.2}
# whitened over the whole batch, sure groups push hardest: without a bonus that stops at 0.8
WITH_BONUS = {**CLIPPED, "entropy_coefficient": 0.01}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"name": "grpo"}, "loss": CLIPPED},
    "dr_grpo": {
        "advantage": {"name": "grpo", "scale_by_std": False},
        "loss": {**CLIPPED, "aggregation": "constant", "constant_length": DIGITS + 1},
    },
    "rloo": {"advantage": {"name": "rloo"}, "loss": CLIPPED},
    "reinforce++": {
        "advantage": {"name": "reinforce_plus_plus_baseline"},
        "loss": WITH_BONUS,
    },
    "gspo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "gspo", "clip_low": 0.2, "aggregation": "sample_mean"},
    },
    "ppo": {"advantage": {"name": "gae", "whiten": True}, "loss": WITH_BONUS},
    "cispo": {"advantage": {"name": "grpo"}, "loss": {"name": "cispo", "clip_high": 0.2}},
    "sapo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "sapo", "aggregation": "sample_mean"},
    },
    "gmpo": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "gmpo", "aggregation": "sample_mean"},
    },
    "dppo": {"advantage": {"name": "grpo"}, "loss": {"name": "dppo"}},
    "clip_cov": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "clip_cov", "clip_low": 0.2, "settings": {"share": 0.002}},
    },
    "kl_cov": {"advantage": {"name": "grpo"}, "loss": {"name": "kl_cov"}},
    "importance_sampling": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "importance_sampling"},
    },
    "reinforce": {"advantage": {"name": "opo"}, "loss": {"name": "reinforce"}},
    "gpg": {"advantage": {"name": "gpg"}, "loss": {"name": "gpg"}},
    "dro": {"advantage": {"name": "grpo"}, "loss": {"name": "dro", "dro_beta": 0.1}},
    "tinker_ppo": {"advantage": {"name": "grpo"}, "loss": {"name": "ppo"}},
}

DISTILLED = "opd"  # on-policy distillation, in sluice.demo.distillation
SAMPLED, DIVERGENCES = "sampled", ("forward_kl", "reverse_kl", "jsd")


def write_prompts(path: Path, seed: int, order: Sequence[int] = range(DIGITS)) -> None:
    """Four random digits and `=`; the answer is the digits, in this order."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(PROMPTS):
            digits = "".join(rng.choice("0123456789") for _ in range(DIGITS))
            answer = "".join(digits[place] for place in order)
            file.write(json.dumps({"prompt": f"{digits}=", "answer": answer}) + "\n")


@contextmanager
def weights_directory(placement: str) -> Iterator[str]:
    """Where versions of weights are, if not in the store: in memory, gone with the block."""
    if placement == "separate":
        yield ""
        return
    memory = Path("/dev/shm")
    with scratch("sluice-weights-", memory if memory.is_dir() else None) as directory:
        yield str(directory / "weights")


def add_stack_flags(parser: argparse.ArgumentParser) -> None:
    """What services of any demo are chosen by."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["reference", "fsdp", "megatron"], default="reference")
    parser.add_argument("--engine", choices=["reference", "sglang"], default="reference")
    parser.add_argument(
        "--sglang-python",
        type=Path,
        default=Path("build/sglang/bin/python").absolute(),
        help="interpreter that has SGLang (make sglang-cpu)",
    )
    parser.add_argument(
        "--tensor", type=int, default=1, help="tensor-parallel ranks of the trainer"
    )
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of the trainer")


def add_service_flags(parser: argparse.ArgumentParser) -> None:
    """What `services` are chosen by, but for the algorithm and the placement."""
    add_stack_flags(parser)
    parser.add_argument("--context", type=int, default=1, help="ranks that share every row")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")


def check_service_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Has the parser tell of flags that no services can have."""
    for name in ("ranks", "tensor", "context"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name}: is 1 or more")
    if max(flags.tensor, flags.context) > 1 and flags.backend == "reference":
        parser.error("--tensor and --context need --backend fsdp or megatron")
    if flags.optimizer == "muon" and flags.backend == "megatron":
        parser.error("--optimizer muon needs --backend reference or fsdp")
    if flags.engine == "sglang" and not flags.sglang_python.exists():
        parser.error(f"there is no {flags.sglang_python}; `make sglang-cpu` makes one")


def services(run_dir: Path, model: Path, flags: argparse.Namespace, weights: str = "") -> UpConfig:
    """One router, one trainer, one rollout process with both roles; for PPO a critic.

    `weights` is where versions of them are, if not in the store.
    """
    trainer = {
        "model": str(model),
        "seed": flags.seed,
        "backend": flags.backend,
        "optim": {"kind": flags.optimizer, "learning_rate": 2e-3},
        "ranks": {"count": flags.ranks * flags.tensor * flags.context},
        "max_tokens_per_micro_batch": 8192,
        "weights": weights,
    }
    if flags.backend == "fsdp":
        layout = {"tensor": flags.tensor, "context": flags.context}
        trainer["fsdp"] = {**layout, "dtype": "float32"}
    if flags.backend == "megatron":
        layout = {"tensor": flags.tensor, "context": flags.context}
        trainer["megatron"] = {**layout, "dtype": "float32"}
    rollout: dict[str, Any] = {
        "tokenizer": str(model),
        "engine": {"max_running": 512, "max_model_length": 16, "threads": 1},
    }
    if flags.engine == "sglang":
        rollout["engine"] |= {"backend": "sglang", "sglang": {"python": str(flags.sglang_python)}}
        if flags.placement == "colocated":
            rollout["engine"]["sglang"]["server_args"] = {"enable_memory_saver": True}
    entries = {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": trainer},
        "rollout": {"kind": "rollout", "config": rollout},
    }
    if flags.algorithm == "ppo":
        critic = {n: value for n, value in trainer.items() if n != "megatron"}
        if flags.backend == "megatron":
            critic |= {"backend": "reference", "ranks": {"count": 1}}
        entries["critic"] = {
            "kind": "trainer",
            "config": {**critic, "head": "value"},
        }
    up = {"run_dir": run_dir, "services": entries, "start_timeout_seconds": START_SECONDS}
    return parse_config(UpConfig, up)


def training(run_dir: Path, prompts: Path, flags: argparse.Namespace) -> RunConfig:
    """32 groups of 16, dense reward, until the mean of ten steps is 0.9."""
    return parse_config(
        RunConfig,
        {
            "run_dir": run_dir,
            "services": run_dir / "services.json",
            "prompts": {"file": prompts},
            "environment": {"name": "prompts", "settings": {"reward": "position_match"}},
            "sampling": {"max_new_tokens": DIGITS + 1},
            "algorithm": ALGORITHMS[flags.algorithm],
            "critic": {} if flags.algorithm == "ppo" else None,
            "groups_per_step": 32,
            "samples_per_group": 16,
            "steps": flags.steps,
            "stop_at_reward": 0.9,
            "seed": flags.seed,
            "max_staleness": flags.max_staleness,
            "placement": flags.placement,
            "service_timeout_seconds": START_SECONDS,
        },
    )


def prepare(run_dir: Path, seed: int) -> None:
    """A fresh model and prompts."""
    # a process of its own, so that torch stays out of the loop's
    build = [sys.executable, "-m", "sluice.demo.tiny_qwen3", str(run_dir / "model"), str(seed)]
    subprocess.run(build, check=True, timeout=START_SECONDS, stderr=subprocess.DEVNULL)
    write_prompts(run_dir / "prompts.jsonl", seed)
