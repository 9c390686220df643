"""What cannot be trained is refused by name; narrow passes keep wide weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.backends.families import shares_prompts
from tests.contract.training_backend.cases import Model
from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.oracle import logprob_difference, read_ranks
from tests.rank_pool import Pool

fast = pytest.mark.fast


def copy_model(model: Model, directory: Path, **settings: Any) -> Path:
    shutil.copytree(model.directory, directory)
    config = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps({**config, **settings}))
    return directory


@fast
def test_what_cannot_be_trained_is_refused_by_name(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    unknown = copy_model(model, tmp_path / "unknown", model_type="stablelm")
    cut = copy_model(model, tmp_path / "cut")
    tensors = load_file(cut / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, cut / "model.safetensors", metadata={"format": "pt"})
    drops = copy_model(model, tmp_path / "drops", attention_dropout=0.1)
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (unknown, {}, "model_type stablelm"),
        (model.directory, {"cpu_offload": True}, "fsdp.cpu_offload"),
        (cut, {}, "model.norm.weight"),
        (drops, {"activation_checkpointing": True}, "attention_dropout"),
    ]
    for directory, fsdp, reason in cases:
        answers = pool.run("attempt", 2, model=str(directory), out=str(tmp_path), fsdp=fsdp)
        assert all(reason in answer["error_message"] for answer in answers), answers
    assert shares_prompts(str(model.directory))
    assert not shares_prompts(str(unknown))


@fast
def test_bfloat16_passes_train_float32_weights(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, oracle = expected("qwen3")
    answers = pool.run(
        "parity", 2, model=str(model.directory), out=str(tmp_path), fsdp={"dtype": "bfloat16"}
    )
    difference = logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs)
    assert 1e-4 < difference < 0.1  # narrow, and no narrower than that
    assert all(g.dtype == torch.float32 for g in read_ranks(tmp_path, "gradients").values())
    for found, should in zip(answers[0]["steps"], oracle.steps, strict=True):
        assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=0.1)
    weights = read_ranks(tmp_path, "weights")
    assert any(not torch.equal(w, w.bfloat16().float()) for w in weights.values())


@fast
def test_rounded_logits_are_further_off(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    """`float32_head: false` is what it says: log-probs move by what a bfloat16 logit loses."""
    model, oracle = expected("qwen3")
    found = []
    for wide in (True, False):
        out = tmp_path / str(wide)
        out.mkdir()
        settings = {"fsdp": {"dtype": "bfloat16"}, "trainer": {"float32_head": wide}}
        pool.run("parity", 1, model=str(model.directory), out=str(out), steps=0, **settings)
        logprobs = read_ranks(out, "logprobs")
        gaps = [(logprobs[name] - oracle.logprobs[name]).abs().mean() for name in logprobs]
        found.append(float(torch.stack(gaps).mean()))
    assert found[0] < found[1]


@fast
def test_activations_are_run_again_only_where_it_is_asked_for(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    for again, runs in ((True, 2), (False, 1)):
        settings = {"fsdp": {"activation_checkpointing": again}}
        (answer,) = pool.run(
            "recomputes", 1, model=str(model.directory), out=str(tmp_path), **settings
        )
        assert answer["runs"] == runs


@fast
def test_experts_that_do_not_go_round_are_refused_and_copies_take_them(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe")
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    for answer in pool.run("attempt", 3, **arguments, fsdp={}):
        assert "has 4 experts, of which one of 3 ranks would have none" in answer["error_message"]
    for answer in pool.run("attempt", 3, **arguments, fsdp={"replicas": 3}):
        assert not answer["error_message"]
