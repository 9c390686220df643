"""Layers cut over tensor ranks are those of plain transformers, in files and out of them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.backend import LayoutError
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.fsdp.layout import mesh_of
from services.trainer.config import OptimConfig
from tests.contract.training_backend.cases import NAMED, Oracle, divergence_from_teacher
from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.jobs import NORMALIZER, OPTIM, rows_of
from tests.fsdp.oracle import gradient_difference, logprob_difference, read_ranks
from tests.fsdp.test_checkpoints import resume, save
from tests.fsdp.test_critic import check_critic
from tests.fsdp.test_start import copy_model
from tests.rank_pool import Pool

TENSOR = {"tensor": 2}
EVEN = {"vocab_size": 54}  # of which both ranks have a half; else each has all of it
fast = pytest.mark.fast
CASES = [
    pytest.param("qwen3", EVEN, 2, {}, id="two ranks", marks=fast),
    pytest.param("qwen3", {}, 2, {}, id="the vocabulary whole"),
    pytest.param("qwen3", EVEN, 4, {}, id="data 2"),
    pytest.param("llama", EVEN, 4, {}, id="tied, data 2"),
    pytest.param("llama", {}, 2, {}, id="tied, the vocabulary whole"),
    pytest.param("qwen3_moe", EVEN, 4, {}, id="experts, data 2", marks=fast),
    pytest.param("glm4", EVEN, 2, {}, id="biases"),
    pytest.param("qwen3", {**EVEN, "intermediate_size": 66}, 4, {}, id="parts of unlike size"),
    pytest.param("qwen3", EVEN, 4, {"reduce": "call"}, id="reduced once a call"),
    pytest.param("qwen3_moe", EVEN, 2, {"reshard_after_forward": False}, id="kept gathered"),
    pytest.param("qwen3", EVEN, 4, {"context": 2}, id="context 2"),
    pytest.param("qwen3_moe", {}, 4, {"context": 2}, id="experts, context 2"),
    pytest.param("qwen3", EVEN, 2, {"activation_checkpointing": True}, id="activations run again"),
    pytest.param("qwen3_moe", EVEN, 4, {"activation_checkpointing": True}, id="experts run again"),
]


@pytest.mark.parametrize(("family", "sizes", "world", "fsdp"), CASES)
def test_numbers_are_those_of_one_process(
    pool: Pool,
    expected: ExpectedByModel,
    tmp_path: Path,
    family: str,
    sizes: Any,
    world: int,
    fsdp: Any,
) -> None:
    model, oracle = expected(family, **sizes)
    settings = {"fsdp": {**TENSOR, **fsdp}}
    answers = pool.run("parity", world, model=str(model.directory), out=str(tmp_path), **settings)
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs) <= 5e-6
    assert gradient_difference(read_ranks(tmp_path, "gradients"), oracle.gradients) <= 5e-5
    for answer in answers:
        for found, should in zip(answer["steps"], oracle.steps, strict=True):
            assert found["loss"] == pytest.approx(should["loss"], rel=1e-4, abs=1e-4)
            assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-4)
    weights = read_ranks(tmp_path, "weights")
    assert weights.keys() == oracle.weights.keys()
    for name, tensor in oracle.weights.items():
        assert (weights[name] - tensor).abs().max() < 2e-4, name
    assert sum(answer["counted"] for answer in answers) == answers[0]["whole"]
    if sizes:  # but for norms and routers
        assert max(answer["held"] for answer in answers) < 1.1 * answers[0]["whole"] / world


@fast
def test_weights_that_are_whole_stay_alike_on_tensor_ranks(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3", **EVEN)
    settings = {"fsdp": TENSOR, "steps": 3}
    answers = pool.run("replicas", 4, model=str(model.directory), out=str(tmp_path), **settings)
    for first in (0, 2):  # tensor ranks are neighbours
        same, other = answers[first]["digests"], answers[first + 1]["digests"]
        assert same == other and len(same) > 4
    assert answers[0]["digests"] != answers[2]["digests"]


@fast
def test_what_is_published_is_what_was_loaded_bit_for_bit(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe", **EVEN)
    settings = {"fsdp": TENSOR, "steps": 0}
    pool.run("parity", 4, model=str(model.directory), out=str(tmp_path), **settings)
    published = read_ranks(tmp_path, "weights")
    stored = load_file(model.directory / "model.safetensors")
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("family", "sizes", "world"),
    [pytest.param("qwen3", EVEN, 2, marks=fast), ("llama", EVEN, 4), ("qwen3", {}, 2)],
)
def test_likeliest_tokens_are_found_over_parts_of_the_vocabulary(
    family: str, sizes: Any, world: int, pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected(family, **sizes)
    pool.run("named", world, model=str(model.directory), out=str(tmp_path), fsdp=TENSOR)
    named, oracle = read_ranks(tmp_path, "named"), Oracle(model.load().double())
    rows = rows_of(0)
    assert len(named) == 3 * len(rows)
    seen = set()
    for row in rows:
        best, ids = oracle.table(row, 0.8).detach().topk(NAMED, dim=1)
        assert torch.equal(named[f"{row.sample_id}/ids"].long(), ids)
        found = named[f"{row.sample_id}/top"].double()
        torch.testing.assert_close(found, best, atol=2e-5, rtol=1e-5)
        seen |= set(ids.flatten().tolist())
    assert min(seen) < 27 <= max(seen)  # of both halves


def test_what_a_teacher_names_is_learned(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3", **EVEN)
    answers = pool.run("taught", 2, model=str(model.directory), out=str(tmp_path), fsdp=TENSOR)
    oracle, rows = Oracle(model.load(), OptimConfig(**OPTIM)), rows_of(0)
    loss = divergence_from_teacher(oracle, rows)
    loss.backward()
    named = oracle.model.named_parameters()
    gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
    assert gradient_difference(read_ranks(tmp_path, "gradients"), gradients) <= 5e-5
    norm = oracle.step(divergence_from_teacher(oracle, rows), NORMALIZER)
    for answer in answers:
        assert answer["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert answer["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_critic(pool: Pool, expected: ExpectedByModel, tmp_path: Path, family: str) -> None:
    model, _ = expected(family, **EVEN)
    check_critic(pool, model, tmp_path, 2, fsdp=TENSOR)


def test_bfloat16_passes_train_float32_weights(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, oracle = expected("qwen3", **EVEN)
    settings = {"fsdp": {**TENSOR, "dtype": "bfloat16"}}
    answers = pool.run("parity", 4, model=str(model.directory), out=str(tmp_path), **settings)
    difference = logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs)
    assert 1e-4 < difference < 0.1
    for found, should in zip(answers[0]["steps"], oracle.steps, strict=True):
        assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=0.1)


def test_a_run_goes_on_the_same_to_the_bit(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3_moe", **EVEN)
    saved = save(pool, tmp_path, model.directory, 4, fsdp=TENSOR)
    resumed = resume(pool, tmp_path, model.directory, 4, fsdp=TENSOR)
    for before, after in zip(saved, resumed, strict=True):
        assert (after["steps"], after["draw"]) == (before["steps"], before["draw"])
    before, after = (read_ranks(tmp_path / part, "weights") for part in ("saved", "resumed"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("family", "world", "fsdp", "other", "then"),
    [
        pytest.param("qwen3_moe", 4, TENSOR, 1, {}, id="onto one rank", marks=fast),
        pytest.param("qwen3_moe", 2, {}, 4, TENSOR, id="onto tensor ranks"),
        pytest.param("llama", 2, TENSOR, 4, {}, id="tied, onto data ranks"),
        pytest.param("qwen3", 4, {"tensor": 2}, 2, TENSOR, id="onto fewer data ranks"),
    ],
)
def test_a_checkpoint_loads_under_other_layouts(
    pool: Pool,
    expected: ExpectedByModel,
    tmp_path: Path,
    family: str,
    world: int,
    fsdp: Any,
    other: int,
    then: Any,
) -> None:
    model, _ = expected(family, **EVEN)
    saved = save(pool, tmp_path, model.directory, world, fsdp=fsdp)
    resumed = resume(pool, tmp_path, model.directory, other, fsdp=then)
    for before, after in zip(saved[0]["steps"], resumed[0]["steps"], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-4, abs=1e-4)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)


@fast
def test_what_cannot_be_cut_is_refused_by_name(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("kv_heads", {"num_key_value_heads": 1}, "num_key_value_heads 1"),
        ("heads", {"num_attention_heads": 3}, "num_attention_heads 3"),
        ("width", {"intermediate_size": 63}, "63 of model.layers.0.mlp"),
        ("no_plan", {"model_type": "gpt2"}, "model_type gpt2"),
    ]
    for name, change, reason in cases:
        directory = copy_model(model, tmp_path / name, **change)
        answers = pool.run("attempt", 2, model=str(directory), out=str(tmp_path), fsdp=TENSOR)
        assert all(reason in answer["error_message"] for answer in answers), answers
        assert all("fsdp.tensor" in answer["error_message"] for answer in answers), answers


def test_too_few_rows_for_the_data_ranks_are_refused_by_name(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    """Of a width of 2 a tensor rank has one row, and its data ranks cannot share it."""
    model, _ = expected("qwen3", intermediate_size=2)
    for world, reason in ((2, ""), (4, "1 rows of model.layers.0.mlp.gate_proj.weight")):
        answers = pool.run(
            "attempt", world, model=str(model.directory), out=str(tmp_path), fsdp=TENSOR
        )
        assert all(reason in answer["error_message"] for answer in answers), answers
        assert all(bool(reason) == bool(answer["error_message"]) for answer in answers)


def test_ranks_that_check_each_other_find_nothing(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, oracle = expected("qwen3", **EVEN)
    settings = {"fsdp": TENSOR, "trainer": {"ranks": {"check_collectives": True}}, "steps": 2}
    answers = pool.run("parity", 4, model=str(model.directory), out=str(tmp_path), **settings)
    for found, should in zip(answers[0]["steps"], oracle.steps, strict=False):
        assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-4)


@fast
def test_ranks_of_a_layout_wait_for_each_other_as_long_as_a_command_may_take(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3", **EVEN)
    settings = {"fsdp": TENSOR, "trainer": {"ranks": {"command_timeout": 4321.0}}}
    answers = pool.run("waits", 4, model=str(model.directory), out=str(tmp_path), **settings)
    assert answers == [{"data": 4321.0, "tensor": 4321.0}] * 4


def test_places_of_ranks() -> None:
    config = FsdpConfig(tensor=2)
    places = [mesh_of(config, rank, 6) for rank in range(6)]
    assert [place.data_rank for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.reports for place in places] == [True, False] * 3
    assert {(place.data_size, place.tensor_size) for place in places} == {(3, 2)}
    with pytest.raises(LayoutError, match="5 ranks do not divide"):
        mesh_of(config, 0, 5)
