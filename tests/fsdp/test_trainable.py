"""A part of the weights is trained as by one process of plain transformers, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.oracle import expect, gradient_difference, read_ranks
from tests.fsdp.test_checkpoints import resume, save
from tests.rank_pool import Pool

fast = pytest.mark.fast
LAST, HEAD = {"allow": ["*.layers.1.*"]}, {"allow": ["lm_head.weight"]}
FIRST = {"allow": ["*.layers.0.*", "*.embed_tokens.*"]}
MIXED = {"deny": ["*.q_proj.*", "*.down_proj.*", "*norm*"]}
EXPERTS, DEEP = {"allow": ["*.experts.*"]}, {"allow": ["*.layers.1.mlp.experts.*"]}
AGAIN = {"activation_checkpointing": True}
CASES = [
    pytest.param("qwen3", 2, {}, MIXED, id="mixed", marks=fast),
    pytest.param("qwen3", 2, {}, HEAD, id="head"),
    pytest.param("qwen3", 2, AGAIN, LAST, id="last, run again", marks=fast),
    pytest.param("qwen3", 2, {"reduce": "call"}, FIRST, id="first, reduced once a call"),
    pytest.param("qwen3", 2, {"reshard_after_forward": False}, LAST, id="last, kept gathered"),
    pytest.param("qwen3", 2, {"tensor": 2}, MIXED, id="TP2", marks=fast),
    pytest.param("qwen3", 2, {"tensor": 2}, HEAD, id="TP2, head"),
    pytest.param("qwen3", 2, {"context": 2}, LAST, id="CP2"),
    pytest.param("llama", 2, {}, {"deny": ["lm_head.weight"]}, id="tied"),
    pytest.param("qwen3_moe", 2, {}, {"allow": ["*.mlp.gate.*"]}, id="routers"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, {"allow": ["*.mlp.gate.*"]}, id="EP2, routers"),
    pytest.param("qwen3_moe", 4, {"expert": 2}, {"deny": ["*.experts.*"]}, id="EP2, no experts"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, EXPERTS, id="EP2, experts", marks=fast),
    pytest.param("qwen3_moe", 2, {"expert": 2, **AGAIN}, EXPERTS, id="EP2, experts, run again"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, DEEP, id="EP2, experts of the last layer"),
    pytest.param("qwen3_moe", 4, {"tensor": 2}, {"deny": ["*.experts.*"]}, id="TP2, no experts"),
]


@pytest.mark.parametrize(("family", "world", "fsdp", "trainable"), CASES)
def test_parts_are_trained_as_by_one_process(
    pool: Pool,
    expected: ExpectedByModel,
    tmp_path: Path,
    family: str,
    world: int,
    fsdp: Any,
    trainable: Any,
) -> None:
    model, _ = expected(family)
    oracle = expect(model, trainable=trainable)
    answers = pool.run(
        "parity",
        world,
        model=str(model.directory),
        out=str(tmp_path),
        fsdp=fsdp,
        trainer={"trainable": trainable},
    )
    gradients = read_ranks(tmp_path, "gradients")
    assert gradient_difference(gradients, oracle.gradients) <= 5e-5
    assert not any(g.any() for name, g in gradients.items() if name not in oracle.gradients)
    for answer in answers:
        for found, should in zip(answer["steps"], oracle.steps, strict=True):
            assert found["loss"] == pytest.approx(should["loss"], rel=1e-4, abs=1e-4)
            assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-4)
    weights, start = (
        read_ranks(tmp_path, "weights"),
        load_file(model.directory / "model.safetensors"),
    )
    assert weights.keys() == oracle.weights.keys()
    for name, tensor in oracle.weights.items():
        if name in oracle.gradients:
            assert (weights[name] - tensor).abs().max() < 2e-4, name
        else:
            assert torch.equal(weights[name], start[name]), f"{name} is frozen"


@pytest.mark.parametrize(("world", "fsdp"), [pytest.param(2, {}, marks=fast), (4, {"tensor": 2})])
def test_a_resumed_run_is_the_same_to_the_bit_and_of_the_same_parts(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, world: int, fsdp: Any
) -> None:
    model, _ = expected("qwen3")
    shared = {"fsdp": fsdp, "trainer": {"trainable": MIXED}}
    saved = save(pool, tmp_path, model.directory, world, **shared)
    resumed = resume(pool, tmp_path, model.directory, world, **shared)
    for before, after in zip(saved, resumed, strict=True):
        assert after["steps"] == before["steps"]
    before, after = (read_ranks(tmp_path / part, "weights") for part in ("saved", "resumed"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    for other, text in (({}, "had frozen model.layers.0."), (LAST, "had trained ")):
        more = {"fsdp": fsdp, "trainer": {"trainable": other}}
        for answer in resume(pool, tmp_path, model.directory, world, **more):
            assert text in answer["error"]
