"""Mixtures train with their experts spread over ranks, whatever the family calls them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from services.trainer.backends.families import FAMILIES, expert_count
from tests.contract.training_backend.cases import Model
from tests.fsdp.oracle import (
    STEPS,
    expect,
    gradient_difference,
    logprob_difference,
    read_ranks,
)
from tests.models.families import CASES, Case, build
from tests.models.proof import (
    MAX_GRADIENT_DIFF,
    MAX_LOGPROB_DIFF,
    Proof,
    Summary,
    on_ranks,
    prove,
)
from tests.rank_pool import Pool

fast = pytest.mark.fast
EXPERT: dict[str, Any] = {"fsdp": {"expert": 2}}
ON_FOUR = ("qwen3_moe", "deepseek_v3", "gpt_oss")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MIXTURES = [c for c in CASES if c.known in FAMILIES and any(map(c.settings.get, COUNTS))]
FAST = ("deepseek_v3",)  # a shared expert, and a router whose bias is no weight


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize(("case", "world"), on_ranks(MIXTURES, four=ON_FOUR, fast=FAST))
def test_a_family_trains_as_plain_transformers(
    pool: Pool, tmp_path: Path, summary: Summary, case: Case, world: int
) -> None:
    model = build(case, tmp_path / "model")
    proof = prove(pool, case, model, expect(model, STEPS), tmp_path / "out", world, **EXPERT)
    summary.proofs.append(replace(proof, layout="EP2" if world == 2 else "EP2 of 4"))
    assert proof.logprob <= proof.logprob_limit
    assert proof.gradient <= MAX_GRADIENT_DIFF
    assert proof.norm <= 1e-3
    assert proof.reloaded <= proof.logprob_limit


def test_every_family_with_experts_is_proven() -> None:
    configs = [{"model_type": case.known, **case.settings} for case in CASES]
    found = {config["model_type"] for config in configs if expert_count(config)}
    assert found == {case.known for case in MIXTURES}
    assert len(MIXTURES) >= 26
    assert expert_count({"model_type": "stablelm", "num_experts": 4}) is None
    assert expert_count({"model_type": "hunyuan_v1_moe", "num_experts": [4, 8]}) is None


@fast
def test_without_the_way_back_gradients_are_wrong(pool: Pool, tmp_path: Path) -> None:
    """The comparison sees what is left out, where log-probs do not show it."""
    proof = prove_one(pool, tmp_path, named("qwen3_moe"), left_out="way back")
    assert proof.logprob <= proof.logprob_limit
    assert proof.gradient > 100 * MAX_GRADIENT_DIFF


def test_counted_on_one_expert_rank_alone_the_norm_is_wrong(pool: Pool, tmp_path: Path) -> None:
    proof = prove_one(pool, tmp_path, named("qwen3_moe"), left_out="norm of experts")
    assert proof.gradient <= MAX_GRADIENT_DIFF
    assert proof.norm > 1e-2


@fast
@pytest.mark.parametrize(
    ("fsdp", "experts"),
    [
        ({}, "torch_grouped_mm"),
        ({"activation_checkpointing": True}, "loop"),
        ({"dtype": "bfloat16"}, "loop"),
    ],
)
def test_ranks_whose_experts_no_token_goes_to_take_part(
    pool: Pool, tmp_path: Path, fsdp: dict[str, Any], experts: str
) -> None:
    """The bias of the router has all tokens go to the first group, which one rank has whole."""
    plain = build(named("deepseek_v3"), tmp_path / "plain")
    tensors = load_file(plain.directory / "model.safetensors")
    (bias,) = (name for name in tensors if name.endswith("e_score_correction_bias"))
    tensors[bias][:4] += 100.0
    save_file(tensors, plain.directory / "model.safetensors", metadata={"format": "pt"})
    model = Model(plain.directory)
    out = tmp_path / "out"
    (out / "published").mkdir(parents=True)
    given: dict[str, Any] = {"model": str(model.directory), "out": str(out), "steps": 2}
    given["trainer"] = {"operations": {"experts": experts}}
    answers = pool.run("prove", 2, **given, fsdp={"expert": 2, **fsdp})
    expected = expect(model, 2)
    idle = {name for name, tensor in expected.gradients.items() if not tensor.any()}
    assert len(idle) == 4 * 3 and all(".experts." in name for name in idle)
    gradients = read_ranks(out, "gradients")
    assert not any(gradients.pop(name).any() for name in idle)
    others = {name: t for name, t in expected.gradients.items() if name not in idle}
    if "dtype" in fsdp:
        return
    assert gradient_difference(gradients, others) <= MAX_GRADIENT_DIFF
    assert logprob_difference(read_ranks(out, "logprobs"), expected.logprobs) <= MAX_LOGPROB_DIFF
    for found, should in zip(answers[0]["steps"], expected.steps, strict=True):
        assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-3)


def test_an_unproven_family_without_experts_is_refused(pool: Pool, tmp_path: Path) -> None:
    model = build(Case("stablelm", "StableLM"), tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    for answer in pool.run("attempt", 2, **arguments, fsdp={"unproven": True, "expert": 2}):
        assert "fsdp.expert has no effect on model_type stablelm" in answer["error_message"]


def test_experts_of_another_form_are_refused(pool: Pool, tmp_path: Path) -> None:
    """Llama 4's take all tokens, each as often as there are experts."""
    settings = {"num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1}
    model = build(Case("llama4_text", "Llama 4", settings), tmp_path / "model")
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    for answer in pool.run("attempt", 2, **arguments, fsdp={"unproven": True, "expert": 2}):
        assert (
            "fsdp.expert above 1 with model.layers.0.feed_forward.experts"
            in (answer["error_message"])
        )


@pytest.mark.parametrize("name", [pytest.param("deepseek_v3", marks=fast), "gpt_oss"])
def test_in_bfloat16_it_is_the_same_where_experts_are(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    """Of DeepSeek the router's weights are float32: rounded they are 1e-2 off."""
    model, found = build(named(name), tmp_path / "model"), []
    for expert in (1, 2):
        out = tmp_path / f"{expert}"
        (out / "published").mkdir(parents=True)
        fsdp = {"dtype": "bfloat16", "expert": expert}
        pool.run("prove", 2, model=str(model.directory), out=str(out), steps=1, fsdp=fsdp)
        found.append(read_ranks(out, "logprobs"))
    assert logprob_difference(*found) <= 1e-3


def named(name: str) -> Case:
    return next(case for case in MIXTURES if case.name == name)


def prove_one(pool: Pool, tmp_path: Path, case: Case, **arguments: Any) -> Proof:
    model = build(case, tmp_path / "model")
    return prove(pool, case, model, expect(model, 1), tmp_path / "out", 2, **arguments, **EXPERT)
