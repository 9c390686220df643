"""Routing replay over all services: experts that others chose train, killed or not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.loop.ledger import Ledger
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from tests.e2e.conftest import GRIM, Stack, Training, start_stack, stop_stack
from tests.e2e.test_experts import build_mixture
from tests.patience import PATIENCE

LAYERS, EXPERTS, CHOICES = 2, 8, 3
OLD = {"name": "ppo_clip", "clip_low": 0.2, "old_logprobs": "old"}
FSDP: dict[str, Any] = {"dtype": "float32", "expert": 2}


def build_undecided(folder: Path) -> Path:
    """A mixture with experts in pairs that its routers can hardly tell apart, but others can.

    A token goes to both of one pair and to one of another: which, rounding decides.
    """
    model = build_mixture(folder, num_experts_per_tok=CHOICES)
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            near = 1 + 1e-3 * torch.randn(EXPERTS // 2, tensor.shape[1])
            tensors[name] = torch.stack([tensor[::2], tensor[::2] * near], 1).flatten(0, 1) * 10
        elif ".experts." in name:
            tensors[name] = tensor * 6
    save_file(tensors, file, metadata={"format": "pt"})
    return model


def start(folder: Path, model: Path | None, engine: dict[str, Any], **trainer: Any) -> Stack:
    settings = {"max_running": 64, "max_model_length": 16, "threads": 1, **engine}
    named = {} if model is None else {"tokenizer": str(model)}
    rollout = {"tokenizer": str(folder / "model"), "engine": settings, **GRIM, **named}
    config = {"optim": {"learning_rate": 2e-3}, "model": str(model or folder / "model"), **trainer}
    return start_stack(
        folder,
        trainer={"kind": "trainer", "config": config},
        rollout={"kind": "rollout", "config": rollout},
    )


def experts_of(stack: Stack, training: Training) -> list[Any]:
    store = BlobStore(stack.run_dir / "store")
    groups = training.groups("consumed")
    return [s.routed_experts for g in groups for s in decode_group(store.get(g.blob))]


def mismatch(
    folder: Path, model: Path | None, engine: dict[str, Any], **trainer: Any
) -> tuple[float, list[Any]]:
    """Of two steps, and the experts that rows brought."""
    stack = start(folder, model, {"dtype": "bfloat16", **engine}, **trainer)
    try:
        training = stack.train("run", steps=2)
        training.finish()
        found = max(row["rollout_mismatch"] for row in training.learning_rows())
        return found, experts_of(stack, training)
    finally:
        stop_stack(stack)


@pytest.mark.long
def test_the_gap_to_a_narrow_engine_is_that_of_a_dense_model(tmp_path: Path) -> None:
    """Its rounding has routers choose others, which no correction of ratios takes back."""
    model = build_undecided(tmp_path)
    ranks = {"ranks": {"count": 2}, "backend": "fsdp"}
    records = {"routed_experts": True}
    dense, none = mismatch(tmp_path / "dense", None, {}, fsdp={"dtype": "float32"}, **ranks)
    free, told = mismatch(tmp_path / "free", model, records, fsdp=FSDP, **ranks)
    fsdp = {**FSDP, "routing_replay": "rollout"}
    replayed, _ = mismatch(tmp_path / "replayed", model, records, fsdp=fsdp, **ranks)
    own, _ = mismatch(tmp_path / "own", model, records, reference={"routing_replay": "rollout"})
    print(f"routing replay: {dense=:.1e} {free=:.1e} {replayed=:.1e} reference={own:.1e}")
    assert free > 10 * max(replayed, own)
    assert max(replayed, own) < 3 * dense
    assert none and all(each is None for each in none)
    assert told and all(each.shape[1:] == (LAYERS, CHOICES) for each in told)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["recorded", "rollout"])
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path, mode: str) -> None:
    """Of two mini-batches a step, the second by experts of older weights; ranks lose records."""
    model = build_undecided(tmp_path)
    run = {"steps": 4, "checkpoint_every": 2, "deterministic": True}
    run |= {"algorithm": {"mini_batches": 2, "loss": OLD}}
    engine = {"deterministic": True, "routed_experts": mode == "rollout"}
    fsdp = {**FSDP, "routing_replay": mode}
    ends, ranks = {}, {"backend": "fsdp", "ranks": {"count": 2}}
    for name in ("straight", "killed"):
        stack = start(tmp_path / name, model, engine, fsdp=fsdp, **ranks)
        try:
            if name == "killed":
                stack.train("run", **run, dies_at=("consumed", 3)).died()
                for pid in stack.rank_pids():
                    os.kill(pid, signal.SIGKILL)
            training = stack.train("run", **run, resume=name == "killed")
            training.finish(2 * PATIENCE)
            ledger = Ledger(training.run_dir / "ledger.sqlite")
            ends[name] = ledger.digest_of_step(4)
            ledger.close()
        finally:
            stop_stack(stack)
    assert ends["killed"] == ends["straight"] != ""


@pytest.mark.long
@pytest.mark.parametrize("mode", ["recorded", "rollout"])
def test_a_run_that_has_no_experts_to_replay_is_told_as_it_begins(
    tmp_path: Path, mode: str
) -> None:
    """Neither engines tell them, nor has it a pass that records them; nothing is sampled."""
    model = build_undecided(tmp_path)
    stack = start(tmp_path / "stack", model, {}, reference={"routing_replay": mode})
    try:
        training = stack.train("run", steps=1)
        output, _ = training.process.communicate(timeout=PATIENCE)
    finally:
        stop_stack(stack)
    assert training.process.returncode == 2
    assert "sluice: reference.routing_replay: the trainer takes" in output
    assert ("engine.routed_experts: true" if mode == "rollout" else "old_logprobs: old") in output
    assert training.groups("consumed") == training.groups("generated") == []
