"""On-policy distillation: a fresh model learns to copy from one that was trained, and from one that
was not.

`sluice demo --algorithm opd [--teacher trainer]`: no reward reaches the student, whose advantage is
the teacher's log-prob of each sampled token less its own; with `--divergence forward_kl` (or
reverse_kl, jsd) its loss is one of the teacher's likeliest tokens at each place, and `kl` of the
last line is that divergence. `wrong_teacher_reward` is what the same
run comes to with an untrained teacher.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from sluice.config import parse_config
from sluice.demo.copy_digits import CLIPPED, SAMPLED, prepare, services, training
from sluice.demo.measured import Cost, measured_run
from sluice.exit_code import exit_code
from sluice.loop.config import RunConfig
from sluice.loop.report import read_metrics
from sluice.stack import UpConfig

LEARNED = 0.97  # reward of the teacher, so that its student can come to 0.9
STEPS = 150
WINDOW = 10
KL, RIGHT, WRONG = 0.02, 0.9, 0.3  # nats a token at most; rewards at least, and at most
TOP_COUNT = 4  # of thirteen tokens
OTHER_SEED = 1000  # further from any seed that somebody tries


def distil(run_dir: Path, flags: argparse.Namespace) -> int:
    """Train a teacher, a student of it, and one of another model; the exit code."""
    costs = [Cost(), Cost(), Cost()]
    prompts = run_dir / "prompts.jsonl"
    first = _part(run_dir / "teacher", flags.seed + OTHER_SEED)
    grpo = argparse.Namespace(**{**vars(flags), "algorithm": "grpo"})
    up = services(first, first / "model", grpo)
    run = training(first, prompts, grpo).model_copy(update={"stop_at_reward": LEARNED})
    if code := exit_code(measured_run(up, run, costs[0])):
        return code
    teacher = max((first / "store" / "weights" / "versions").iterdir())  # a model directory
    wrong = _part(run_dir / "untrained", flags.seed + 2 * OTHER_SEED) / "model"
    kls: list[list[float]] = []
    for name, model, cost in (("student", teacher, costs[1]), ("misled", wrong, costs[2])):
        part = _part(run_dir / name, flags.seed)
        up, run = _student(part, prompts, model, grpo, flags)
        if code := exit_code(measured_run(up, run, cost)):
            return code
        kls.append([row["kl_teacher"] for row in read_metrics(part) if "kl_teacher" in row])
    kl_first, kl_last = fmean(kls[0][:1]), fmean(kls[0][-WINDOW:])
    right, misled = (fmean(cost.rewards[-WINDOW:]) for cost in costs[1:])
    print(
        f"opd: kl_first={kl_first:.3f} kl_last={kl_last:.4f} reward_last={right:.3f} "
        f"wrong_teacher_reward={misled:.3f} steps={len(kls[0])} "
        f"cpu_seconds={costs[-1].cpu_seconds:.1f}"  # of this process and all that it ever ran
    )
    return 0 if kl_last <= KL and right >= RIGHT and misled <= WRONG else 1


def _part(directory: Path, seed: int) -> Path:
    directory.mkdir()
    prepare(directory, seed)
    return directory


def _student(
    run_dir: Path,
    prompts: Path,
    teacher: Path,
    grpo: argparse.Namespace,
    flags: argparse.Namespace,
) -> tuple[UpConfig, RunConfig]:
    up = services(run_dir, run_dir / "model", grpo).model_dump(mode="json", exclude_unset=True)
    entries: dict[str, Any] = up["services"]
    named: Mapping[str, str]
    if flags.teacher == "engine":
        engine = {**entries["rollout"]["config"]["engine"], "model": str(teacher)}
        config = {"roles": ["engine"], "engine_id": "teacher-0", "pool": "teacher"}
        entries["teacher"] = {"kind": "rollout", "config": {**config, "engine": engine}}
        named = {"pool": "teacher"}
    else:
        config = {**entries["trainer"]["config"], "model": str(teacher)}
        entries["teacher"] = {"kind": "trainer", "config": config}
        named = {"service": "teacher"}
    run = training(run_dir, prompts, grpo).model_dump(mode="json", exclude_unset=True)
    run |= {
        "algorithm": _algorithm(flags.divergence),
        "teachers": {"copy": named},
        "steps": STEPS,
    }
    for key in ("stop_at_reward", "stop_window"):
        del run[key]
    return parse_config(UpConfig, up), parse_config(RunConfig, run)


def _algorithm(divergence: str) -> dict[str, Any]:
    if divergence == SAMPLED:
        return {"advantage": {"name": "distillation"}, "loss": CLIPPED}
    return {"loss": {"name": f"topk_{divergence}", "settings": {"top_count": TOP_COUNT}}}
