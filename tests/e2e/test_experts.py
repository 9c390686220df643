"""Runs with experts spread over ranks, killed and resumed under the same and other layouts."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sluice.demo.tiny_qwen3 import build_tiny_qwen3
from sluice.loop.journal import read_journal
from sluice.loop.ledger import Ledger
from tests.e2e.conftest import GRIM, Stack, Training, start_stack, stop_stack
from tests.patience import PATIENCE

STEPS = 5
RUN: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 2}
DETERMINISTIC = {**RUN, "deterministic": True}


def build_mixture(folder: Path, **settings: Any) -> Path:
    """A random Qwen3-MoE with the tokenizer of the tiny Qwen3."""
    plain, directory = build_tiny_qwen3(folder / "plain", 0), folder / "mixture"
    told = json.loads((plain / "config.json").read_bytes())
    config = Qwen3MoeConfig(
        vocab_size=told["vocab_size"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        moe_intermediate_size=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=told["eos_token_id"],
        **{"num_experts_per_tok": 2, **settings},
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(plain / name, directory)
    return directory


def start(folder: Path, ranks: int, expert: int) -> Stack:
    model = folder / "mixture"
    if not model.exists():
        build_mixture(folder)
    engine = {"max_running": 64, "max_model_length": 16, "threads": 1, "deterministic": True}
    trainer = {
        "model": str(model),
        "backend": "fsdp",
        "fsdp": {"dtype": "float32", "expert": expert},
        "ranks": {"count": ranks},
        "optim": {"learning_rate": 2e-3},
    }
    rollout = {"tokenizer": str(model), "engine": engine, **GRIM}
    return start_stack(
        folder,
        trainer={"kind": "trainer", "config": trainer},
        rollout={"kind": "rollout", "config": rollout},
    )


def notes(run: Training) -> str:
    return " ".join(event["text"] for event in read_journal(run.run_dir) if "text" in event)


def die(stack: Stack, settings: dict[str, Any]) -> None:
    """The controller at its third step, and the ranks of the trainer."""
    stack.train("run", **settings, dies_at=("consumed", 3)).died()
    for pid in stack.rank_pids():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    ends = {}
    for name in ("straight", "killed"):
        stack = start(tmp_path / name, 2, 2)
        try:
            if name == "killed":
                die(stack, DETERMINISTIC)
            run = stack.train("run", **DETERMINISTIC, resume=name == "killed")
            run.finish(2 * PATIENCE)
            ledger = Ledger(run.run_dir / "ledger.sqlite")
            ends[name] = ledger.digest_of_step(STEPS)
            ledger.close()
        finally:
            stop_stack(stack)
    assert ends["killed"] == ends["straight"] != ""


@pytest.mark.long
def test_a_run_goes_on_with_experts_on_other_ranks(tmp_path: Path) -> None:
    stack = start(tmp_path, 2, 2)
    try:
        die(stack, RUN)
    finally:
        stop_stack(stack)
    for more, (ranks, expert) in enumerate(((4, 4), (2, 1))):
        stack = start(tmp_path, ranks, expert)
        try:
            refused = stack.train("run", **DETERMINISTIC, resume=True)
            output, _ = refused.process.communicate(timeout=PATIENCE)
            assert refused.process.returncode == 2
            assert "the ranks of the run to resume were laid out otherwise" in output
            run = stack.train("run", **{**RUN, "steps": STEPS + 2 * more}, resume=True)
            run.finish(2 * PATIENCE)
            assert [row["step"] for row in run.rows()] == [*range(1, STEPS + 2 * more + 1)]
            assert max(row["rollout_mismatch"] for row in run.learning_rows()) < 1e-4
            assert "resumed with another layout of ranks" in notes(run)
        finally:
            stop_stack(stack)
