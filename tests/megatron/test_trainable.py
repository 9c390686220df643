"""A part of the weights is trained as by the reference backend, however the model is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.config import TrainerConfig
from tests.megatron.comparison import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    read_ranks,
    relative_difference,
)
from tests.megatron.models import make_rows
from tests.megatron.oracle import Oracle
from tests.megatron.settings import NORMALIZER, OPTIM, SPEC, STEPS
from tests.rank_pool import Pool

fast = pytest.mark.fast
LAST = {"allow": ["*.layers.3.*"]}  # nothing of the first stage
FIRST = {"allow": ["*.layers.0.*", "*.embed_tokens.*"]}  # nothing of the last
MIXED = {"deny": ["*.[qkv]_proj.*", "*.layers.2.*", "*embed_tokens*"]}
HEAD = {"allow": ["lm_head.weight"]}
ROUTERS = {"allow": ["*.mlp.gate.*", "*.layers.2.mlp.experts.*"]}
PIPELINE, SEQUENCE = {"pipeline": 2}, {"tensor": 2, "sequence_parallel": True}
CASES = [
    pytest.param("qwen3", 2, PIPELINE, LAST, id="PP2-last", marks=fast),
    pytest.param("qwen3", 2, PIPELINE, FIRST, id="PP2-first", marks=fast),
    pytest.param("qwen3", 2, {**PIPELINE, "virtual_pipeline": 2}, LAST, id="VPP2-last"),
    pytest.param("qwen3", 2, PIPELINE, HEAD, id="PP2-head"),
    pytest.param("qwen3", 1, {"recompute": "full"}, LAST, id="recompute-last", marks=fast),
    pytest.param("qwen3", 2, {**PIPELINE, "recompute": "full"}, LAST, id="PP2-recompute-last"),
    pytest.param("qwen3", 2, SEQUENCE, MIXED, id="TP2+SP-mixed", marks=fast),
    pytest.param("qwen3", 2, SEQUENCE, HEAD, id="TP2+SP-head"),
    pytest.param("qwen3", 2, {"tensor": 2}, LAST, id="TP2-last"),
    pytest.param("qwen3", 2, {"context": 2}, MIXED, id="CP2-mixed"),
    pytest.param("qwen3", 2, {"distributed_optimizer": True}, MIXED, id="DP2-distributed"),
    pytest.param("qwen3_tied", 2, PIPELINE, {"deny": ["lm_head.weight"]}, id="tied-PP2"),
    pytest.param("qwen3_tied", 2, PIPELINE, {"allow": ["lm_head.weight"]}, id="tied-alone-PP2"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, ROUTERS, id="EP2-routers", marks=fast),
    pytest.param("qwen3_moe", 2, {"expert": 2}, {"deny": ["*.experts.*"]}, id="EP2-no-experts"),
    pytest.param("qwen3_moe", 4, {**SEQUENCE, "expert": 2}, ROUTERS, id="EP2xTP2+SP-routers"),
    pytest.param("deepseek_v3", 2, PIPELINE, {"deny": ["*.self_attn.*"]}, id="deepseek-PP2"),
    pytest.param("glm_moe_dsa_shared", 2, PIPELINE, LAST, id="glm5-shared-PP2"),
    pytest.param("glm4", 2, SEQUENCE, {"deny": ["*layernorm*", "*.bias"]}, id="glm4-TP2+SP"),
]


@pytest.mark.parametrize(("family", "world", "layout", "trainable"), CASES)
def test_parts_are_trained_as_by_the_reference(
    family: str,
    world: int,
    layout: dict[str, Any],
    trainable: dict[str, Any],
    pool: Pool,
    expected: Any,
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    directory = expected.directory(family)
    layout = {"distributed_optimizer": False, **layout}
    answers = pool.run(
        "parity",
        world,
        model=str(directory),
        layout=layout,
        out=str(tmp_path),
        trainer={"trainable": trainable},
    )
    oracle = Oracle(
        TrainerConfig(
            model=str(directory),
            store=tmp_path,
            optim=OPTIM,
            durable=False,
            trainable=trainable,
        )
    )
    gradients = read_ranks(tmp_path, "gradients")
    exact = oracle.gradients(make_rows(), SPEC, NORMALIZER)
    if layout["distributed_optimizer"]:  # whose ranks have a part of each
        assert gradients.keys() == exact.keys()
    else:
        assert relative_difference(gradients, exact) <= GRADIENT_TOLERANCE
    steps = [oracle.step(make_rows(step), SPEC, NORMALIZER) for step in range(STEPS)]
    for answer in answers:
        for found, should in zip(answer["steps"], steps, strict=True):
            assert found["loss"] == pytest.approx(should.loss, rel=LOSS_TOLERANCE, abs=1e-6)
            assert found["grad_norm"] == pytest.approx(should.grad_norm, rel=LOSS_TOLERANCE)
    start, moved = load_file(directory / "model.safetensors"), oracle.weights()
    weights = read_ranks(tmp_path, "weights")
    for name, tensor in weights.items():
        if name in exact:
            assert (tensor - moved[name]).abs().max() < 2e-4, name
            assert not torch.equal(tensor, start[name]), name
        else:
            assert torch.equal(tensor, start[name]), f"{name} is frozen"


@fast
@pytest.mark.parametrize(
    ("family", "trainable", "text"),
    [
        ("qwen3", {"deny": ["*.q_proj.*"]}, "backend megatron has "),
        ("qwen3", {"allow": ["*.gate_proj.*"]}, "mlp.linear_fc1.weight, which is trained or"),
        ("qwen3_moe", {"deny": ["*.experts.1.*"]}, "local_experts.*.linear_fc1.weight"),
        ("deepseek_v3", {"deny": ["*.e_score_correction_bias"]}, "no parameter is called"),
        ("glm_moe_dsa_shared", {"allow": ["*.indexer.w*"]}, "which no gradient reaches"),
    ],
)
def test_half_of_a_tensor_and_what_is_no_parameter_are_refused(
    family: str, trainable: dict[str, Any], text: str, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    model, trainer = str(expected.directory(family)), {"trainable": trainable}
    (answer,) = pool.run(
        "open_error", 1, model=model, layout={}, out=str(tmp_path), trainer=trainer
    )
    assert text in answer["text"]


@pytest.mark.parametrize(
    ("family", "world", "layout", "trainable"),
    [
        pytest.param("qwen3", 2, PIPELINE, LAST, id="PP2", marks=fast),
        pytest.param("qwen3", 2, {}, MIXED, id="DP2-distributed"),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit_and_of_the_same_parts(
    family: str, world: int, layout: Any, trainable: Any, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    (tmp_path / "saved/checkpoint").mkdir(parents=True)
    (tmp_path / "resumed").mkdir()
    shared = {"model": str(expected.directory(family)), "layout": layout}
    resumed = {
        **shared,
        "out": str(tmp_path / "resumed"),
        "checkpoint": str(tmp_path / "saved/checkpoint"),
    }
    trainer = {"trainable": trainable}
    saved = pool.run("save_midway", world, **shared, out=str(tmp_path / "saved"), trainer=trainer)
    assert pool.run("resume", world, **resumed, trainer=trainer) == saved
    before, after = (read_ranks(tmp_path / part, "weights") for part in ("saved", "resumed"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = {"trainable": {"deny": ["*.layers.1.*"]}}
    for answer in pool.run("resume_error", world, **resumed, trainer=other):
        assert "had frozen other parameters" in answer["error_message"]
