"""Families that ship a plan train with layers cut over tensor ranks; others are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from services.trainer.backends.families import FAMILIES, NO_PLAN, TENSOR_REFUSED
from tests.fsdp.oracle import STEPS, expect
from tests.models.families import CASES, Case, build
from tests.models.proof import MAX_GRADIENT_DIFF, Proof, Summary, on_ranks, prove
from tests.rank_pool import Pool

fast = pytest.mark.fast
TENSOR: dict[str, Any] = {"fsdp": {"tensor": 2}}
FAST = ("qwen3_next",)
ON_TWO = ("llama-tied", "qwen3", "qwen3_moe", "glm4", *FAST)
WHOLE = ("glm4_moe", "mistral")  # their vocabularies: of others a rank has a half
CUT = [
    replace(case, settings={**case.settings, "vocab_size": 53 if case.name in WHOLE else 54})
    for case in CASES
    if case.known in FAMILIES and case.known not in TENSOR_REFUSED
]
NORMS: dict[str, dict[str, Any]] = {  # which their plans do not tell of
    "glm4_moe": {"use_qk_norm": True, "num_experts_per_tok": 4},
    "phi": {"qk_layernorm": True, "head_dim": 8},
}
NORMED = [
    replace(case, of="norms", settings={**case.settings, **NORMS[case.name]})
    for case in CUT
    if case.name in NORMS
]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize(
    ("case", "world"),
    [
        *on_ranks([case for case in CUT if case.name in ON_TWO], fast=FAST),
        *(pytest.param(case, 4, id=f"{case.name}-4") for case in CUT),
    ],
)
def test_a_family_trains_as_plain_transformers(
    pool: Pool, tmp_path: Path, summary: Summary, case: Case, world: int
) -> None:
    model = build(case, tmp_path / "model")
    proof = prove(pool, case, model, expect(model, STEPS), tmp_path / "out", world, **TENSOR)
    summary.proofs.append(replace(proof, layout="TP2" if world == 2 else "DP2xTP2"))
    assert proof.logprob <= proof.logprob_limit
    assert proof.gradient <= MAX_GRADIENT_DIFF
    assert proof.norm <= 1e-3
    assert proof.reloaded <= proof.logprob_limit


@pytest.mark.parametrize("case", NORMED, ids=lambda case: case.name)
def test_norms_over_heads_have_the_gradients_of_all_heads(
    pool: Pool, tmp_path: Path, case: Case
) -> None:
    model = build(case, tmp_path / "model")
    expected = expect(model, 1)
    for name, left_out in (("told", ""), ("left out", "told")):
        more = {**TENSOR, "left_out": left_out}
        proof = prove(pool, case, model, expected, tmp_path / name, 2, **more)
        assert proof.logprob <= proof.logprob_limit
        limit = 100 * MAX_GRADIENT_DIFF if left_out else MAX_GRADIENT_DIFF
        assert (proof.gradient > limit) is bool(left_out)


def test_weights_of_every_head_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    case = named("cohere")
    settings = {**case.settings, "use_qk_norm": True}
    model = build(replace(case, settings=settings), tmp_path / "model")
    answers = pool.run("attempt", 2, model=str(model.directory), out=str(tmp_path), **TENSOR)
    assert all("self_attn.q_norm" in answer["error_message"] for answer in answers), answers


@pytest.mark.parametrize(
    ("left_out", "name"), [pytest.param("heads", "qwen3", marks=fast), ("vocabulary", "llama")]
)
def test_without_one_sum_over_tensor_ranks_gradients_are_wrong(
    pool: Pool, tmp_path: Path, left_out: str, name: str
) -> None:
    """The comparison sees what is left out, where log-probs do not show it."""
    proof = prove_one(pool, tmp_path, named(name), left_out=left_out)
    assert proof.logprob <= proof.logprob_limit
    assert proof.gradient > 100 * MAX_GRADIENT_DIFF


def test_counted_on_every_tensor_rank_the_norm_is_wrong(pool: Pool, tmp_path: Path) -> None:
    proof = prove_one(pool, tmp_path, named("qwen3"), left_out="norm")
    assert proof.gradient <= MAX_GRADIENT_DIFF
    assert proof.norm > 1e-2


def named(name: str) -> Case:
    return next(case for case in CUT if case.name == name)


def prove_one(pool: Pool, tmp_path: Path, case: Case, **arguments: Any) -> Proof:
    model = build(case, tmp_path / "model")
    return prove(pool, case, model, expect(model, 1), tmp_path / "out", 2, **arguments, **TENSOR)


@pytest.mark.parametrize(
    "model_type", [name for name, reason in TENSOR_REFUSED.items() if reason == NO_PLAN]
)
def test_a_family_without_a_plan_is_refused_by_name(
    pool: Pool, tmp_path: Path, model_type: str
) -> None:
    case = next(case for case in CASES if case.model_type == model_type)
    model = build(case, tmp_path / "model")
    answers = pool.run("attempt", 2, model=str(model.directory), out=str(tmp_path), **TENSOR)
    for answer in answers:
        assert f"{model_type} cannot be trained with fsdp.tensor" in answer["error_message"]
        assert TENSOR_REFUSED[model_type] in answer["error_message"]
