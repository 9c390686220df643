"""A run script of verl, imported, trains on rows as verl's data sets have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.importers.verl import import_script
from sluice.loop.report import read_metrics
from tests.patience import PATIENCE

SCRIPT = r"""
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['$DATA/sums/train.parquet', '$DATA/doubles/train.parquet']" \
    data.val_files=$DATA/sums/test.parquet \
    data.train_batch_size=$((2 * 4)) data.max_prompt_length=64 data.max_response_length=8 \
    actor_rollout_ref.model.path=$DATA/model \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.hybrid_engine=False rollout.nnodes=1 rollout.n_gpus_per_node=1 \
    trainer.n_gpus_per_node=1 trainer.total_training_steps=2 trainer.test_freq=1
"""


def row(number: int) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number}+{number}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"index": number},
    }


def test_an_imported_script_trains(tmp_path: Path) -> None:
    build_tiny_qwen3(tmp_path / "model", 0)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    for name in ("sums", "doubles"):
        (tmp_path / name).mkdir()
        for part, count in (("train", 20), ("test", 5)):
            table = pa.Table.from_pylist([row(number) for number in range(count)])
            pq.write_table(table, tmp_path / name / f"{part}.parquet")
    run, services, _ = import_script(SCRIPT, tmp_path / "run", {"DATA": str(tmp_path)})
    engine = services["services"]["rollout"]["config"]["engine"]
    engine["backend"] = "reference"  # in place of an accelerator
    del engine["sglang"]
    for entry in services["services"].values():
        entry.pop("devices", None)
    files = {"run.yaml": run, "services.yaml": services}
    for name, document in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "sluice.cli", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(
        [*command, "--up", str(tmp_path / "services.yaml")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run")
    steps = [row for row in rows if "reward_mean" in row]
    assert [step["step"] for step in steps] == [1, 2]
    groups = sum(step.get(f"groups/{name}", 0) for step in steps for name in ("sums", "doubles"))
    assert groups == 16
    scored = [(row["evaluation"], row["dataset"], row["groups"]) for row in rows if "score" in row]
    assert scored[-1] == ("after", "sums", 5)
