"""Adapters learn to copy, on a base that learned the digits in another order and is frozen.

`sluice demo --lora 8 [--backend megatron] [--engine sglang]`: adapters alone cannot teach a random
model, whose embedding and head stay as they are. So a short run of the whole model comes first.
`adapter_mib` is the size of what every step publishes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from sluice.config import parse_config
from sluice.demo.copy_digits import services, training, weights_directory, write_prompts
from sluice.demo.measured import Cost, measured_run
from sluice.exit_code import exit_code
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig
from sluice.weights.adapter import ADAPTER_FILE
from sluice.weights.checkpoint import digest_base
from sluice.weights.store import StoredVersion, WeightStore

BASE_ORDER = (1, 2, 3, 0)  # of the digits that the base learns; copied, they keep their own
BASE_REWARD = 0.4
BONUS = 0.03  # digits that the base took for each other, adapters hardly tell apart
RATE = 5e-3
TEMPERATURE = 0.5  # logits of a head that is frozen so early are 4 at most: at 1 it stops at 0.85


def train_adapters(run_dir: Path, flags: argparse.Namespace) -> int:
    """Train a base and then adapters of it; the exit code."""
    before, cost = Cost(), Cost()
    base_dir = run_dir / "base"
    base_dir.mkdir()
    up, run = _base(base_dir, run_dir / "model", flags)
    if code := exit_code(measured_run(up, run, before)):
        return code
    base = _newest(base_dir / "store" / "weights")
    assert base.directory is not None
    with weights_directory(flags.placement) as weights:
        run_of_them = adapting(run_dir, base.directory, flags, weights)
        if code := exit_code(measured_run(*run_of_them, cost)):
            return code
        size = _checked_size(Path(weights or run_dir / "store" / "weights"), base)
    cost.seconds += before.seconds
    cost.startup_cpu -= before.cpu_seconds  # which a later one goes on from
    first, last = fmean(cost.rewards[:5]), fmean(cost.rewards[-10:])
    print(
        f"demo: reward first={first:.3f} last={last:.3f} {cost.describe()} "
        f"adapter_mib={size / 2**20:.3f}"
    )
    return 0 if last >= flags.target else 1


def _base(run_dir: Path, model: Path, flags: argparse.Namespace) -> tuple[UpConfig, RunConfig]:
    """The whole model, by the plainest means, whatever trains its adapters."""
    plain = {"backend": "reference", "engine": "reference", "ranks": 1}
    plain |= {"tensor": 1, "context": 1}
    plain |= {"algorithm": "grpo", "max_staleness": 0, "placement": "separate"}
    flags = argparse.Namespace(**{**vars(flags), **plain})
    prompts = run_dir / "prompts.jsonl"
    write_prompts(prompts, flags.seed, BASE_ORDER)
    run = _settings(training(run_dir, prompts, flags)) | {"stop_at_reward": BASE_REWARD}
    return services(run_dir, model, flags), parse_config(RunConfig, run)


def adapting(
    run_dir: Path, base: Path, flags: argparse.Namespace, weights: str = ""
) -> tuple[UpConfig, RunConfig]:
    """Services and run of `flags`, of adapters beside the model in `base`."""
    up = services(run_dir, base, flags, weights).model_dump(mode="json", exclude_unset=True)
    configs: dict[str, Any] = {
        name: entry["config"] for name, entry in up["services"].items() if "config" in entry
    }
    configs["trainer"] |= {"lora": {"rank": flags.lora}, "optim": {"learning_rate": RATE}}
    engine = configs["rollout"]["engine"]
    engine["model"] = str(base)
    if flags.engine == "sglang":
        engine["sglang"]["lora"] = {"max_rank": flags.lora}
    run = _settings(training(run_dir, run_dir / "prompts.jsonl", flags))
    run["sampling"]["temperature"] = TEMPERATURE
    return parse_config(UpConfig, up), parse_config(RunConfig, run)


def _settings(run: RunConfig) -> dict[str, Any]:
    settings = run.model_dump(mode="json", exclude_unset=True)
    settings["algorithm"]["loss"]["entropy_coefficient"] = BONUS
    return settings


def _newest(weights: Path) -> StoredVersion:
    return WeightStore(weights).latest()


def _checked_size(weights: Path, base: StoredVersion) -> int:
    """Bytes of the newest adapter. Raises OtherBaseError unless the base is what it was."""
    adapter = _newest(weights)
    assert adapter.adapter is not None and adapter.directory is not None and base.directory
    adapter.adapter.check_base(base.digest)
    adapter.adapter.check_base(digest_base(base.directory))
    return (adapter.directory / ADAPTER_FILE).stat().st_size
