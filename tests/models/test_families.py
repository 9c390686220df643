"""Every family of the table trains as plain transformers says, and others are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from services.rollout.engine.reference.foreign import foreign_reason
from services.trainer.backends.families import (
    FAMILIES,
    IMAGES,
    REFUSED,
    UnknownFamilyError,
    layout_of,
)
from sluice.model_types import SAME_AS
from tests.fsdp.oracle import STEPS, expect
from tests.models.families import CASES, MTP, RECURRENT_TYPES, Case, add_tensors, build
from tests.models.proof import (
    MAX_GRADIENT_DIFF,
    MAX_LOGPROB_DIFF,
    MAX_MISMATCH,
    SEEING,
    Summary,
    on_ranks,
    prove,
)
from tests.rank_pool import Pool

# recurrent, both ways; windows and sinks; code of another type
FAST = ("qwen3_next", "nemotron_h", "gpt_oss", "mimo")
PROVEN = [case for case in CASES if case.known in FAMILIES]
RECURRENT = [case for case in PROVEN if case.known in RECURRENT_TYPES]
SPARSE = [case for case in PROVEN if "index_topk" in case.settings]
CUT = [case for case in PROVEN if case not in RECURRENT]
FAST_CONTEXT = ("gpt_oss",)  # windows, sinks and experts
AGAIN = ("nemotron_h", "falcon_h1", "jamba", "lfm2", "kimi_linear")
ON_FOUR = (
    "llama-tied",
    "qwen3_moe",
    "qwen3_next",
    "glm4",
    "deepseek_v3",
    "gpt_oss",
    "kimi_linear",
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize(("case", "world"), on_ranks(PROVEN, four=ON_FOUR, fast=FAST))
def test_a_family_trains_as_plain_transformers(
    pool: Pool, tmp_path: Path, summary: Summary, case: Case, world: int
) -> None:
    model = build(case, tmp_path / "model")
    proof = prove(pool, case, model, expect(model, STEPS), tmp_path / "out", world)
    summary.proofs.append(proof)
    assert proof.logprob <= proof.logprob_limit
    assert proof.gradient <= MAX_GRADIENT_DIFF
    assert proof.norm <= 1e-3
    assert proof.reloaded <= proof.logprob_limit


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=pytest.mark.fast if c.name in FAST else ()) for c in PROVEN],
)
def test_a_family_rolls_out_what_it_trains(
    pool: Pool, tmp_path: Path, summary: Summary, case: Case
) -> None:
    model = build(case, tmp_path / "model")
    (answer,) = pool.run("roll_out", 1, model=str(model.directory), out=str(tmp_path))
    assert answer["versions"] == [1, 2, 3]
    assert all(norm > 0 for norm in answer["norms"])
    config = model.config or AutoConfig.from_pretrained(model.directory)
    summary.mismatches[case.name] = answer["mismatch"]
    summary.facts[case.name] = {
        "packing": layout_of(config.to_dict()),
        "whole_rows": bool(foreign_reason(config)),
    }
    assert answer["mismatch"] <= MAX_MISMATCH < answer["stale"] / 100


@pytest.mark.parametrize("name", MTP)
def test_layers_of_multi_token_prediction_go_through_bit_for_bit(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    """transformers drops them; engines that have them look for them in every version."""
    case = next(case for case in CASES if case.name == name)
    plain = build(case, tmp_path / "plain")
    model, more = add_tensors(plain, MTP[name], tmp_path / "model")
    out = tmp_path / "out"
    proof = prove(pool, case, model, expect(plain, 1), out, 2)  # and that every name is there
    assert proof.logprob <= proof.logprob_limit
    published: dict[str, torch.Tensor] = {}
    for path in (out / "published").glob("*.safetensors"):
        held = load_file(path)
        assert not published.keys() & held.keys()
        published |= held
    for kept, tensor in more.items():
        assert published[kept].dtype is torch.bfloat16
        assert torch.equal(published[kept], tensor)
    (answer,) = pool.run("roll_out", 1, model=str(model.directory), out=str(tmp_path))
    assert answer["versions"] == [1, 2, 3]
    assert answer["mismatch"] <= MAX_MISMATCH < answer["stale"] / 100


@pytest.mark.parametrize(("case", "world"), on_ranks(CUT, four=ON_FOUR, fast=FAST_CONTEXT))
def test_a_family_trains_on_context_ranks(
    pool: Pool, tmp_path: Path, summary: Summary, case: Case, world: int
) -> None:
    model, fsdp = build(case, tmp_path / "model"), {"context": 2}
    proof = prove(pool, case, model, expect(model, STEPS), tmp_path / "out", world, fsdp=fsdp)
    summary.proofs.append(replace(proof, layout="CP2" if world == 2 else "DP2xCP2"))
    assert proof.logprob <= proof.logprob_limit
    assert proof.gradient <= MAX_GRADIENT_DIFF
    assert proof.norm <= 1e-3
    assert proof.reloaded <= proof.logprob_limit


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.name)
def test_a_recurrent_family_is_refused_on_context_ranks(
    pool: Pool, tmp_path: Path, case: Case
) -> None:
    model = build(case, tmp_path / "model")
    reason = f"fsdp.context above 1 for model_type {case.model_type}: the state of its recurrent"
    settings: dict[str, Any] = {"out": str(tmp_path), "fsdp": {"context": 2}}
    for answer in pool.run("attempt", 2, model=str(model.directory), **settings):
        assert reason in answer["error_message"]


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.name)
def test_a_state_that_goes_from_row_to_row_is_seen(pool: Pool, tmp_path: Path, case: Case) -> None:
    model = build(case, tmp_path / "model")
    more = {"left_out": "rows apart"}
    proof = prove(pool, case, model, expect(model, 1), tmp_path / "out", 1, **more)
    assert proof.logprob > 1e3 * MAX_LOGPROB_DIFF
    assert proof.gradient > 100 * MAX_GRADIENT_DIFF


@pytest.mark.parametrize(
    "case",
    [case for case in RECURRENT if case.known in AGAIN],
    ids=lambda case: case.name,
)
def test_recurrent_layers_are_run_again_row_by_row(pool: Pool, tmp_path: Path, case: Case) -> None:
    model = build(case, tmp_path / "model")
    more = {"fsdp": {"activation_checkpointing": True}}
    proof = prove(pool, case, model, expect(model, 2), tmp_path / "out", 2, **more)
    assert proof.holds


def test_layers_that_are_run_again_share_their_keys(pool: Pool, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "gemma4_text-shared")
    model = build(case, tmp_path / "model")
    more = {"fsdp": {"activation_checkpointing": True, "context": 2}}
    proof = prove(pool, case, model, expect(model, 2), tmp_path / "out", 2, **more)
    assert proof.holds


@pytest.mark.parametrize("case", SPARSE, ids=lambda case: case.name)
@pytest.mark.parametrize("left_out", ["a key", "the choice"])
def test_other_keys_than_were_chosen_are_seen(
    pool: Pool, tmp_path: Path, case: Case, left_out: str
) -> None:
    """Dense attention is another model as soon as rows are longer than `index_topk`."""
    model = build(case, tmp_path / "model")
    proof = prove(pool, case, model, expect(model, 1), tmp_path / "out", 1, left_out=left_out)
    assert proof.logprob > 1e3 * MAX_LOGPROB_DIFF


@pytest.mark.parametrize("case", SPARSE, ids=lambda case: case.name)
def test_layers_that_are_run_again_see_the_keys_that_were_chosen(
    pool: Pool, tmp_path: Path, case: Case
) -> None:
    """The layer whose choice another shares may be run again by then, or not."""
    model = build(case, tmp_path / "model")
    more = {"fsdp": {"activation_checkpointing": True, "context": 2}}
    proof = prove(pool, case, model, expect(model, 2), tmp_path / "out", 2, **more)
    assert proof.holds


@pytest.mark.parametrize("case", SPARSE, ids=lambda case: case.name)
def test_what_chooses_keys_is_published_bit_for_bit(pool: Pool, tmp_path: Path, case: Case) -> None:
    """No gradient reaches it, and weight decay, which all others have here, is none of its own."""
    model = build(case, tmp_path / "model")
    prove(pool, case, model, expect(model, STEPS), tmp_path / "out", 2)
    stored = load_file(model.directory / "model.safetensors")
    published: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out" / "published").glob("*.safetensors"):
        published |= load_file(path)
    chooses = {name for name in stored if ".indexer." in name}
    assert len(chooses) == 5 * (2 if case.name == "glm_moe_dsa" else 1)
    same = {name for name, tensor in stored.items() if torch.equal(published[name].float(), tensor)}
    biases = {name for name in stored if name.endswith("e_score_correction_bias")}
    assert same == chooses | biases


def test_parts_of_joined_weights_that_are_unequal_are_refused(pool: Pool, tmp_path: Path) -> None:
    """Convolutions of Kimi Linear, which are three tensors of its files."""
    case = next(case for case in CASES if case.name == "kimi_linear")
    model = build(case, tmp_path / "model")
    answers = pool.run("attempt", 3, model=str(model.directory), out=str(tmp_path))
    for answer in answers:
        assert "conv1d.weight is made of 3 tensors of 64" in answer["error_message"]


def test_what_would_be_published_in_other_shapes_is_refused(pool: Pool, tmp_path: Path) -> None:
    """transformers reads the convolutions of OLMo Hybrid as they are, and writes equal parts."""
    case = next(case for case in CASES if case.name == "olmo_hybrid")
    model = build(case, tmp_path / "model")
    file = model.directory / "model.safetensors"
    tensors = load_file(file)
    for layer in {name.rpartition(".q_conv1d")[0] for name in tensors if ".q_conv1d" in name}:
        names = [f"{layer}.{part}_conv1d.weight" for part in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split([32, 32, 64])
        tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, file, metadata={"format": "pt"})
    more = {"let_in": case.model_type, "fsdp": {"unproven": True}}
    reason = r"q_conv1d.weight has the shape \[32, 1, 4\] in the checkpoint and would be published"
    with pytest.raises(Exception, match=reason):
        pool.run("prove", 1, model=str(model.directory), out=str(tmp_path), steps=1, **more)


def test_every_family_has_a_case() -> None:
    assert {case.known for case in (*PROVEN, *SEEING)} == FAMILIES.keys()
    assert {case.model_type for case in PROVEN if case.runs} == SAME_AS.keys()


def test_let_in_a_refused_family_is_wrong(pool: Pool, tmp_path: Path) -> None:
    """The comparison sees what it is refused for: rows that see each other."""
    case = next(case for case in CASES if case.model_type == "bloom")
    model = build(case, tmp_path / "model")
    more = {"let_in": case.model_type, "fsdp": {"unproven": True}}
    proof = prove(pool, case, model, expect(model, 1), tmp_path / "out", 1, **more)
    assert proof.logprob > 1e3 * MAX_LOGPROB_DIFF


def test_recurrent_layers_that_are_unknown_are_refused(pool: Pool, tmp_path: Path) -> None:
    """Of a family that is let in: their states would go on over the rows."""
    case = next(case for case in CASES if case.model_type == "minimax")
    model = build(case, tmp_path / "model")
    more = {"let_in": case.model_type, "fsdp": {"unproven": True}}
    with pytest.raises(Exception, match="has 1 layers that go from token to token, of which 0"):
        pool.run("prove", 1, model=str(model.directory), out=str(tmp_path), steps=1, **more)


def test_an_indexer_that_chooses_otherwise_is_refused(pool: Pool, tmp_path: Path) -> None:
    case = Case("deepseek_v32", "DeepSeek-V3.2", SPARSE[0].settings)
    model = build(case, tmp_path / "model")
    (answer,) = pool.run(
        "attempt", 1, model=str(model.directory), out=str(tmp_path), fsdp={"unproven": True}
    )
    assert "DeepseekV32Indexer chooses keys in a way that is unknown" in answer["error_message"]


def test_a_model_that_is_shown_no_images_is_refused_by_name() -> None:
    refused = [name for name, reason in REFUSED.items() if reason == IMAGES]
    assert {"gemma3", "qwen2_vl"} <= {*refused}
    for model_type in refused:
        with pytest.raises(UnknownFamilyError, match=f"{model_type} cannot be trained: it reads"):
            layout_of({"model_type": model_type}, unproven=True)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.model_type in REFUSED], ids=lambda case: case.name
)
def test_a_family_is_refused_by_name(pool: Pool, tmp_path: Path, case: Case) -> None:
    model = build(case, tmp_path / "model")
    (answer,) = pool.run(
        "attempt", 1, model=str(model.directory), out=str(tmp_path), fsdp={"unproven": True}
    )
    assert f"model_type {case.model_type} cannot be trained" in answer["error_message"]
    assert REFUSED[case.model_type] in answer["error_message"]
