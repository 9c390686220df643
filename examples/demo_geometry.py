"""A tiny Qwen3-VL learns to measure the red side of a figure, and to read the ruler.

`python -m examples.demo_geometry [--seed 0] [--engine sglang] [--backend megatron]`

The two turns of `examples.geometry.measured` at difficulty 0: the picture shows which side is asked
for, the picture that comes back shows how long it is. `first` is measured on the random model.
Then comes a short supervised start (`sluice sft`, a few steps) on texts without any picture, from
which it learns how one asks and answers, each side and each length as often as any other; what is
in the pictures it learns by GRPO alone. In training, not where it is scored, a length that was read
but is not that of the red side gets half a reward. `hidden` is what the final policy gets where the
picture of the second turn is empty, `turns` how many answers its last episodes have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo import START_SECONDS
from examples.demo_vision import build_model, parse_flags, services
from examples.geometry.measured import LONGEST_SIDE, SIDES
from examples.measured import Cost, empty_directory, held_out_score, measured_run
from examples.models.tiny_qwen3_vl import WORDS
from sluice import logs
from sluice.config import parse_config
from sluice.driver import run_rows, run_training
from sluice.durable import DirectoryError
from sluice.exit_code import exit_code
from sluice.loop.config import RunConfig, SftConfig
from sluice.loop.ledger import Ledger
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore

ENVIRONMENT = "examples.geometry.measured:MeasuredGeometry"
LENGTHS = [str(number) for number in range(1, LONGEST_SIDE + 1)]
PARTIAL = 0.5  # in training only: what was read of another side
GAIN, GAP = 0.3, 0.2  # of `last` over `first`, and over `hidden`


def training(run_dir: Path, seed: int, **changes: Any) -> RunConfig:
    """32 groups of 16; every answer is one token, so that a turn ends with a side or a digit."""
    sampling = {"max_new_tokens": 2, "stop_token_ids": [WORDS.index(w) for w in (*SIDES, *LENGTHS)]}
    held_out = {
        name: {
            "prompts": {"index_count": 64, "shuffle": False},
            "environment": {
                "name": ENVIRONMENT,
                "settings": {"difficulty": 0, "max_turns": 2, "seed": seed + 1, **settings},
            },
            "sampling": sampling,
            "samples": 8,
        }
        for name, settings in (("shown", {}), ("hidden", {"blank": True}))
    }
    settings = {"difficulty": 0, "max_turns": 2, "seed": seed, "partial": PARTIAL}
    config = {
        "run_dir": run_dir,
        "prompts": {"index_count": 100_000},
        "environment": {"name": ENVIRONMENT, "settings": settings},
        "sampling": sampling,
        "algorithm": {
            "advantage": {"name": "grpo"},
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "entropy_coefficient": 0.01},
        },
        "groups_per_step": 32,
        "samples_per_group": 16,
        "stop_at_reward": 0.93,
        "seed": seed,
        "evaluation": {"datasets": held_out},
        "checkpoint_every": 100,
        "service_timeout_seconds": START_SECONDS,
    }
    return parse_config(RunConfig, config | changes)


def supervised_start(run_dir: Path, services: Path, model: Path, seed: int) -> SftConfig:
    """Conversations in which any side is asked for, and any length is the answer."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": side},
                {"role": "user", "content": "="},
                {"role": "assistant", "content": answer},
            ]
        }
        for side, answer in itertools.product(SIDES, LENGTHS)
    ]
    run_dir.mkdir(parents=True)
    file = run_dir / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run_dir": run_dir,
        "services": services,
        "tokenizer": model,
        "rows": {"file": file},
        "rows_per_step": len(rows),
        "epochs": 30,
        "checkpoint_every": 0,
        "seed": seed,
    }
    return parse_config(SftConfig, config)


def mean_turns(run_dir: Path, store: Path, groups: int) -> float:
    """Answers of an episode, over the latest groups that were trained on."""
    ledger, blobs = Ledger(run_dir / "ledger.sqlite"), BlobStore(store, sync=False)
    try:
        latest = ledger.groups("consumed")[-groups:]
    finally:
        ledger.close()
    turns = [
        float(sample.columns["score/turns"])
        for group in latest
        if group.blob is not None and blobs.exists(group.blob)
        for sample in decode_group(blobs.get(group.blob))
    ]
    return float(np.mean(turns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo-geometry"))
    parser.add_argument("--steps", type=int, default=400)
    parser.set_defaults(algorithm="grpo")
    flags = parse_flags(parser)
    logs.configure("WARNING")
    try:
        run_dir = empty_directory(flags.run_dir)
    except DirectoryError as error:
        parser.error(str(error))
    model, addresses = run_dir / "model", run_dir / "services.json"
    build_model(model, flags.seed)
    # of the first run only what is measured before its one small step is used
    few: dict[str, Any] = {"steps": 1, "groups_per_step": 1, "samples_per_group": 2}
    untrained = training(
        run_dir / "untrained", flags.seed, services=addresses, stop_at_reward=None, **few
    )
    start = supervised_start(run_dir / "start", addresses, model, flags.seed)
    run = training(run_dir / "run", flags.seed, services=addresses, steps=flags.steps)

    async def begin() -> None:
        await run_training(untrained)
        await run_rows(start)

    cost = Cost()
    measuring = measured_run(services(run_dir, model, flags), run, cost, before=begin)
    if code := exit_code(measuring):
        return code
    first = held_out_score(untrained.run_dir, "shown", "before")
    last, hidden = (held_out_score(run.run_dir, name) for name in ("shown", "hidden"))
    turns = mean_turns(run.run_dir, run_dir / "store", 10 * run.groups_per_step)
    print(cost.describe())
    print(
        f"geometry: reward first={first:.3f} last={last:.3f} hidden={hidden:.3f} turns={turns:.2f}"
    )
    return 0 if last >= first + GAIN and hidden <= last - GAP else 1


if __name__ == "__main__":
    sys.exit(main())
