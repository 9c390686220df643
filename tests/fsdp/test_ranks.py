"""Several ranks are one process of plain transformers, however the model is cut and computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.config import OptimConfig
from tests.contract.training_backend.cases import NAMED, Oracle, divergence_from_teacher
from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.jobs import NORMALIZER, OPTIM, rows_of
from tests.fsdp.oracle import gradient_difference, logprob_difference, read_ranks
from tests.rank_pool import Pool

NAMES = f"teacher_top_ids/{NAMED}"
fast = pytest.mark.fast
CONTEXT = {"context": 2}
OFFLOADED = {"activation_checkpointing": True, "activation_offload": True}
CASES = [
    pytest.param("qwen3", 1, {}, id="one rank"),
    pytest.param("qwen3", 2, {}, id="two ranks", marks=fast),
    pytest.param("qwen3", 4, {}, id="four ranks"),
    pytest.param("llama", 2, {}, id="tied"),
    pytest.param("llama", 4, {}, id="tied, four ranks"),
    pytest.param("qwen3_moe", 2, {}, id="experts", marks=fast),
    pytest.param("qwen3_moe", 4, {}, id="experts, four ranks"),
    pytest.param("qwen3", 2, {"reduce": "call"}, id="reduced once a call"),
    pytest.param("qwen3_moe", 2, {"reshard_after_forward": False}, id="kept gathered"),
    pytest.param("qwen3", 2, {"activation_checkpointing": True}, id="activations run again"),
    pytest.param("qwen3_moe", 2, {"activation_checkpointing": True}, id="experts run again"),
    pytest.param("qwen3", 2, OFFLOADED, id="run again from the host", marks=fast),
    pytest.param("qwen3_moe", 4, {**OFFLOADED, **CONTEXT}, id="DP2 x CP2, from the host"),
    pytest.param("qwen3", 2, {"replicas": 2}, id="two whole replicas"),
    pytest.param("qwen3", 4, {"replicas": 2}, id="two replicas", marks=fast),
    pytest.param("llama", 4, {"replicas": 2, "reduce": "call"}, id="tied, two replicas"),
    pytest.param("qwen3_moe", 4, {"replicas": 2, **OFFLOADED}, id="experts, two replicas"),
    pytest.param("qwen3_moe", 4, {"replicas": 2, **CONTEXT}, id="DP2 x CP2, two replicas"),
    pytest.param("qwen3", 4, {"replicas": 2, "context": 4}, id="CP4, two replicas"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, id="EP2", marks=fast),
    pytest.param("qwen3_moe", 4, {"expert": 2}, id="EP2 of four", marks=fast),
    pytest.param("qwen3_moe", 4, {"expert": 4, "reduce": "call"}, id="EP4"),
    pytest.param("qwen3_moe", 4, {"expert": 2, "replicas": 2}, id="EP2, two replicas"),
    pytest.param("qwen3_moe", 4, {"expert": 2, **CONTEXT, **OFFLOADED}, id="EP2 beside CP2"),
    pytest.param("qwen3_moe", 4, {"expert": 4, "context": 4}, id="EP4 over CP4"),
    pytest.param(
        "qwen3_moe", 2, {"expert": 2, "activation_checkpointing": True}, id="EP2, run again"
    ),
    pytest.param("qwen3_moe", 4, {"expert": 2, "reshard_after_forward": False}, id="EP2, kept"),
    pytest.param("qwen3", 2, CONTEXT, id="CP2", marks=fast),
    pytest.param("qwen3", 2, {**CONTEXT, "cp_layout": "contiguous"}, id="CP2, contiguous"),
    pytest.param("qwen3", 4, {"context": 4}, id="CP4"),
    pytest.param("llama", 4, CONTEXT, id="DP2 x CP2, tied"),
    pytest.param("qwen3_moe", 4, CONTEXT, id="DP2 x CP2, experts"),
    pytest.param(
        "qwen3_moe",
        4,
        {**CONTEXT, "activation_checkpointing": True, "reduce": "call"},
        id="DP2 x CP2, run again, reduced once a call",
    ),
]


@pytest.mark.parametrize(
    ("world", "fsdp"), [pytest.param(2, {}, marks=fast), (2, CONTEXT), (4, CONTEXT)]
)
def test_what_a_teacher_names_is_learned_over_ranks_as_by_one_process(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, world: int, fsdp: Any
) -> None:
    """Every data rank has rows of its own."""
    model, _ = expected("qwen3")
    answers = pool.run("taught", world, model=str(model.directory), out=str(tmp_path), fsdp=fsdp)
    assert all(answer["rows"] for answer in answers)
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
    other = [
        row._replace(columns={**row.columns, NAMES: row.columns[NAMES].flip(1)}) for row in rows
    ]
    assert divergence_from_teacher(oracle, other).item() != pytest.approx(loss.item(), rel=1e-2)


@pytest.mark.parametrize(
    ("family", "world", "fsdp"),
    [
        pytest.param("qwen3", 2, {}, marks=fast),
        ("llama", 4, {}),
        ("qwen3_moe", 2, {}),
        ("llama", 4, CONTEXT),
    ],
)
def test_likeliest_tokens_are_those_of_one_process(
    family: str, world: int, fsdp: Any, pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected(family)
    answers = pool.run("named", world, model=str(model.directory), out=str(tmp_path), fsdp=fsdp)
    assert not answers[-1]["rows"], "one rank is to have none"
    named, oracle = read_ranks(tmp_path, "named"), Oracle(model.load().double())
    rows = rows_of(0)
    assert len(named) == 3 * len(rows)
    for row in rows:
        table = oracle.table(row, 0.8).detach()
        best, ids = table.topk(NAMED, dim=1)
        assert torch.equal(named[f"{row.sample_id}/ids"].long(), ids)
        found = named[f"{row.sample_id}/top"].double()
        torch.testing.assert_close(found, best, atol=2e-5, rtol=1e-5)
        given = table.gather(1, row.token_ids[row.prompt_length :, None])[:, 0]
        found = named[f"{row.sample_id}/logprobs"].double()
        torch.testing.assert_close(found, given, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "world", "fsdp"), CASES)
def test_numbers_are_those_of_one_process(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, family: str, world: int, fsdp: Any
) -> None:
    model, oracle = expected(family)
    answers = pool.run("parity", world, model=str(model.directory), out=str(tmp_path), fsdp=fsdp)
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
    parts = world // fsdp.get("replicas", 1)
    if parts > 1:
        assert max(answer["held"] for answer in answers) < 0.6 * answers[0]["whole"] * 2 / parts


@pytest.mark.parametrize("reduce", ["micro_batch", "call"])
def test_replicas_hold_the_same_to_the_bit(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, reduce: str
) -> None:
    model, _ = expected("qwen3")
    settings = {"replicas": 2, "reduce": reduce}
    first, second, *others = pool.run(
        "replicas", 4, model=str(model.directory), out=str(tmp_path), steps=3, fsdp=settings
    )
    assert [first, second] == others
    assert first != second  # they have a part each


@fast
@pytest.mark.parametrize("offload", [False, True])
def test_what_layers_are_run_again_on_waits_on_the_host(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, offload: bool
) -> None:
    model, _ = expected("qwen3")
    settings = {"activation_checkpointing": True, "activation_offload": offload}
    (answer,) = pool.run(
        "kept_inputs", 1, model=str(model.directory), out=str(tmp_path), fsdp=settings
    )
    assert answer["layers"] >= 2
    assert answer["kept"] == (0 if offload else answer["layers"])
