"""Every parallel layout gives the numbers of the reference backend: log-probs, gradients, steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.comparison import (
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    LOSS_TOLERANCE,
    Summary,
    logprob_difference,
    read_ranks,
    relative_difference,
)
from tests.rank_pool import Pool

fast = pytest.mark.fast
SCATTERED: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
LAYOUTS = [
    pytest.param("qwen3", 1, {}, id="single", marks=fast),
    pytest.param("qwen3", 2, {"tensor": 2}, id="TP2", marks=fast),
    pytest.param("qwen3", 2, {"tensor": 2, "sequence_parallel": True}, id="TP2+SP"),
    pytest.param("qwen3", 2, {"pipeline": 2}, id="PP2", marks=fast),
    pytest.param("qwen3", 2, {"pipeline": 2, "virtual_pipeline": 2}, id="PP2xVPP2"),
    pytest.param("qwen3", 2, {"pipeline": 2, "first_stage_layers": 1}, id="PP2-1+3"),
    pytest.param("qwen3_tied", 2, {"pipeline": 2, "last_stage_layers": 1}, id="tied-PP2-3+1"),
    pytest.param("qwen3", 2, {"context": 2}, id="CP2-zigzag", marks=fast),
    pytest.param("qwen3", 2, {"context": 2, "cp_layout": "contiguous"}, id="CP2-contiguous"),
    pytest.param("qwen3", 4, {"context": 4}, id="CP4-zigzag"),
    pytest.param("qwen3", 4, {"context": 4, "cp_layout": "contiguous"}, id="CP4-contiguous"),
    pytest.param("qwen3", 2, {}, id="DP2"),
    pytest.param("qwen3", 4, {"tensor": 2, "context": 2}, id="TP2xCP2"),
    pytest.param("qwen3", 4, {"tensor": 2, "pipeline": 2}, id="TP2xPP2"),
    pytest.param("qwen3", 4, {"context": 2, "pipeline": 2}, id="CP2xPP2"),
    pytest.param("qwen3", 4, {"context": 2}, id="DP2xCP2"),
    pytest.param(
        "qwen3",
        4,
        {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "virtual_pipeline": 2},
        id="TP2+SPxPP2xVPP2",
    ),
    pytest.param("qwen3_moe", 1, {}, id="MoE-single"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, id="EP2", marks=fast),
    pytest.param("qwen3_moe", 2, {"pipeline": 2}, id="MoE-PP2"),
    pytest.param(
        "qwen3_moe",
        4,
        {"pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 1},
        id="MoE-PP4",
    ),
    pytest.param(
        "qwen3_moe",
        4,
        {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1},
        id="EP2xTP2+SP",
    ),
    pytest.param(
        "qwen3_moe",
        4,
        {"tensor": 2, "sequence_parallel": True, "expert": 2},
        id="EP2xETP2+SP",
    ),
    pytest.param("qwen3_moe", 4, {"context": 2, "expert": 4}, id="EP4xCP2"),
    pytest.param("qwen3_moe", 2, {"tensor": 2, "sequence_parallel": True}, id="MoE-TP2+SP"),
    pytest.param(
        "qwen3_moe",
        4,
        {"expert": 2, "pipeline": 2, "virtual_pipeline": 2},
        id="EP2xPP2xVPP2",
    ),
    pytest.param("qwen3_tied", 1, {}, id="tied-single"),
    pytest.param("qwen3_tied", 4, {"tensor": 2, "pipeline": 2}, id="tied-TP2xPP2"),
    pytest.param("qwen2", 2, {"tensor": 2}, id="qwen2-TP2"),
    pytest.param("qwen2", 4, {"tensor": 4}, id="qwen2-TP4-of-2-groups"),
    pytest.param("llama", 2, {"pipeline": 2}, id="llama-PP2"),
    pytest.param("glm4", 1, {}, id="glm4-single"),
    pytest.param("glm4", 2, {"tensor": 2, "sequence_parallel": True}, id="glm4-TP2+SP"),
    pytest.param("glm4", 4, {"context": 2, "pipeline": 2}, id="glm4-CP2xPP2"),
    pytest.param("glm4_yarn", 1, {}, id="glm4-yarn-single", marks=fast),
    pytest.param("qwen3_yarn", 2, {"tensor": 2}, id="qwen3-yarn-TP2"),
    pytest.param("glm4_moe", 1, {}, id="glm4-moe-single", marks=fast),
    pytest.param("glm4_moe", 2, {"tensor": 2, "sequence_parallel": True}, id="glm4-moe-TP2+SP"),
    pytest.param("glm4_moe", 2, {"expert": 2, "context": 2}, id="glm4-moe-EP2xCP2"),
    pytest.param(
        "glm4_moe_groups",
        4,
        {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        id="glm4-moe-groups-TP2+SPxPP2xEP2",
    ),
    pytest.param("glm4_moe_lite", 2, {"expert": 2}, id="glm4-moe-lite-EP2"),
    pytest.param("minimax_m2", 1, {}, id="minimax-single"),
    pytest.param(
        "minimax_m2", 2, {"tensor": 2, "sequence_parallel": True}, id="minimax-TP2+SP", marks=fast
    ),
    pytest.param("minimax_m2", 2, {"expert": 2, "context": 2}, id="minimax-EP2xCP2"),
    pytest.param(
        "minimax_m2",
        4,
        {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        id="minimax-TP2+SPxPP2xEP2",
    ),
    pytest.param("gpt_oss", 1, {}, id="gpt-oss-single"),
    pytest.param(
        "gpt_oss",
        2,
        {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1},
        id="gpt-oss-TP2+SPxEP2",
        marks=fast,
    ),
    pytest.param("gpt_oss", 2, {"expert": 2, "context": 2}, id="gpt-oss-EP2xCP2"),
    pytest.param(
        "gpt_oss",
        4,
        {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        id="gpt-oss-TP2+SPxPP2xEP2",
    ),
    pytest.param("deepseek_v3", 1, {}, id="deepseek-single"),
    pytest.param("deepseek_v3", 2, {"tensor": 2, "sequence_parallel": True}, id="deepseek-TP2+SP"),
    pytest.param("deepseek_v3", 2, {"expert": 2, "context": 2}, id="deepseek-EP2xCP2"),
    pytest.param(
        "deepseek_v3",
        4,
        {
            "tensor": 2,
            "sequence_parallel": True,
            "pipeline": 2,
            "expert": 2,
            "expert_tensor": 1,
        },
        id="deepseek-TP2+SPxPP2xEP2",
    ),
    pytest.param("deepseek_v3_yarn", 2, {"pipeline": 2}, id="deepseek-yarn-PP2"),
    pytest.param("glm_moe_dsa", 1, {}, id="glm5-single", marks=fast),
    pytest.param("glm_moe_dsa", 2, SCATTERED, id="glm5-TP2+SP"),
    pytest.param("glm_moe_dsa", 2, {"context": 2}, id="glm5-CP2-zigzag"),
    pytest.param(
        "glm_moe_dsa", 2, {"context": 2, "cp_layout": "contiguous"}, id="glm5-CP2-contiguous"
    ),
    pytest.param("glm_moe_dsa", 2, {"pipeline": 2, "virtual_pipeline": 2}, id="glm5-PP2xVPP2"),
    pytest.param("glm_moe_dsa_shared", 2, {"pipeline": 2}, id="glm5-shared-PP2", marks=fast),
    pytest.param("glm_moe_dsa_shared", 2, {"expert": 2, "context": 2}, id="glm5-shared-EP2xCP2"),
    pytest.param(
        "glm_moe_dsa_shared",
        4,
        {**SCATTERED, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        id="glm5-shared-TP2+SPxPP2xEP2",
    ),
    pytest.param("glm_moe_dsa_shared", 4, {**SCATTERED, "context": 2}, id="glm5-shared-TP2+SPxCP2"),
    pytest.param(
        "deepseek_v3_yarn",
        2,
        {"tensor": 2, "sequence_parallel": True},
        id="deepseek-yarn-TP2+SP",
    ),
]
OPTIMIZERS = [
    pytest.param("qwen3", 2, {"distributed_optimizer": True}, id="DP2-distributed"),
    pytest.param(
        "qwen3",
        4,
        {"tensor": 2, "sequence_parallel": True, "distributed_optimizer": True},
        id="TP2+SPxDP2-distributed",
    ),
    pytest.param("qwen3_moe", 4, {"expert": 2, "distributed_optimizer": True}, id="EP2xDP4"),
    pytest.param("qwen3", 2, {"tensor": 2, "recompute": "full"}, id="TP2-recompute"),
    pytest.param("qwen3", 2, {"pipeline": 2, "recompute": "selective"}, id="PP2-recompute"),
    pytest.param("glm_moe_dsa", 2, {}, id="glm5-DP2-distributed"),
    pytest.param("glm_moe_dsa", 2, {"pipeline": 2, "recompute": "full"}, id="glm5-PP2-recompute"),
    pytest.param("glm_moe_dsa", 1, {"recompute": "selective"}, id="glm5-recompute"),
    *(
        pytest.param("glm_moe_dsa_shared", 1, recompute, id=f"glm5-shared-recompute-{index}")
        for index, recompute in enumerate(
            (
                {"recompute": "selective"},
                {"recompute": "full"},
            )
        )
    ),
]


@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS)
def test_layout_equals_the_reference(
    family: str,
    world: int,
    layout: dict[str, Any],
    pool: Pool,
    expected: Any,
    summary: Summary,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    oracle = expected(family)
    layout = {"distributed_optimizer": False, **layout}
    answers = pool.run(
        "parity", world, model=str(oracle.directory), layout=layout, out=str(tmp_path)
    )

    logprob = logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs)
    gradient = relative_difference(read_ranks(tmp_path, "gradients"), oracle.gradients)
    summary.layouts.add(request.node.callspec.id)
    summary.logprob = max(summary.logprob, logprob)
    summary.gradient = max(summary.gradient, gradient)
    assert logprob <= LOGPROB_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE
    _check_curve(answers, oracle, read_ranks(tmp_path, "weights"))


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, {}, id="single", marks=fast),
        pytest.param(2, {"pipeline": 2, "virtual_pipeline": 2}, id="PP2xVPP2"),
        pytest.param(2, {"context": 2}, id="CP2"),
    ],
)
def test_passes_that_copy_beside_the_one_before_give_the_same(
    world: int,
    layout: dict[str, Any],
    expected: Any,
    pool: Pool,
    tmp_path: Path,
) -> None:
    model, found = str(expected("qwen3").directory), []
    for job in ("parity", "copied_beside"):
        (out := tmp_path / job).mkdir()
        answers = pool.run(job, world, model=model, layout=layout, out=str(out))
        found.append([answer["steps"] for answer in answers])
        names = sorted(path.name for path in out.iterdir() if path.suffix == ".safetensors")
        found[-1].append([(name, (out / name).read_bytes()) for name in names])
    assert found[0] == found[1] and len(found[0][-1]) >= 3
    for answer in answers:
        journal = answer["journal"]
        assert journal.index("begin 1") < journal.index("await 0")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("family", "world", "layout", "text"),
    [
        ("qwen3", 2, {"expert": 2}, "without experts"),
        ("qwen3", 1, {"routing_replay": "recorded"}, "without experts"),
        ("qwen3", 2, {"pipeline": 2, "virtual_pipeline": 4}, "do not divide into 8"),
        ("qwen3", 2, {"pipeline": 2, "first_stage_layers": 4}, "4 of them in stages"),
        (
            "qwen3",
            2,
            {"pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 2},
            "1 and 2 of them in stages",
        ),
        (
            "qwen3",
            2,
            {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 1},
            "do not divide into 4",
        ),
        ("qwen3", 1, {"layer_spec": "transformer_engine"}, "is not installed"),
        ("qwen3", 1, {"recompute": "full", "recompute_layers": 3}, "divide the 4 layers"),
        (
            "qwen3",
            2,
            {
                **{"pipeline": 2, "first_stage_layers": 3},
                **{"recompute": "full", "recompute_layers": 3},
            },
            "recompute_layers 3 do not divide the 1 layers of a pipeline chunk",
        ),
        ("qwen3_moe", 2, {"tensor": 2}, "need sequence_parallel"),
        ("deepseek_v3", 2, {"tensor": 2}, "sequence_parallel"),
        ("qwen3_moe", 3, {"expert": 3}, "do not divide over 3"),
        ("glm_moe_dsa", 2, {"tensor": 2}, "sequence_parallel"),
        ("glm_moe_dsa", 1, {"layer_spec": "transformer_engine"}, "indexers are local layers"),
        ("gpt_oss", 1, {"layer_spec": "transformer_engine"}, "biases of experts are local layers"),
        (
            "glm_moe_dsa_shared",
            2,
            {"pipeline": 2, "first_stage_layers": 1},
            "layer 1 shares the keys",
        ),
        (
            "glm_moe_dsa_shared",
            2,
            {"pipeline": 2, "last_stage_layers": 1},
            "layer 3 shares the keys",
        ),
        (
            "glm_moe_dsa_shared",
            2,
            {"pipeline": 2, "virtual_pipeline": 2},
            "layer 1 shares the keys that a layer before it chooses, and a pipeline chunk begins",
        ),
    ],
)
def test_a_layout_that_the_model_does_not_fit_is_refused(
    family: str,
    world: int,
    layout: dict[str, Any],
    text: str,
    pool: Pool,
    expected: Any,
    tmp_path: Path,
) -> None:
    model = str(expected(family).directory)
    for answer in pool.run("open_error", world, model=model, layout=layout, out=str(tmp_path)):
        assert text in answer["text"]


@pytest.mark.fast
def test_interleaved_stages_neither_batch_nor_free_what_they_send(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """Batched, two stages take each other's tensors; freed, gloo may still be reading them. The
    second is a race that parity seldom meets."""
    model = str(expected("qwen3").directory)
    for layout, wanted in (
        ({"pipeline": 2, "virtual_pipeline": 2}, {"batched": False, "freed": False}),
        ({"pipeline": 2}, {"batched": True, "freed": True}),
    ):
        answers = pool.run("schedule", 2, model=model, layout=layout, out=str(tmp_path))
        assert answers == [wanted] * 2


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        pytest.param("qwen3", 2, {"tensor": 2, "sequence_parallel": True}, id="TP2+SP"),
        pytest.param("qwen3_tied", 2, {"tensor": 2}, id="tied-TP2", marks=fast),
        pytest.param("qwen3_tied", 4, {"context": 2, "pipeline": 2}, id="tied-CP2xPP2"),
    ],
)
def test_large_packs_never_have_all_logits(
    family: str, world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    oracle = expected(family)
    layout = {"distributed_optimizer": False, **layout}
    model = str(oracle.directory)
    trainer = {"operations": {"logprobs": "chunked"}}
    pool.run("parity", world, model=model, layout=layout, out=str(tmp_path), trainer=trainer)
    logprob = logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs)
    gradient = relative_difference(read_ranks(tmp_path, "gradients"), oracle.gradients)
    assert logprob <= LOGPROB_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE


@pytest.mark.parametrize(("family", "world", "layout"), OPTIMIZERS)
def test_optimizer_and_recompute_change_no_number(
    family: str, world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    oracle = expected(family)
    answers = pool.run(
        "parity", world, model=str(oracle.directory), layout=layout, out=str(tmp_path)
    )
    _check_curve(answers, oracle, read_ranks(tmp_path, "weights"))


HEADS = [({}, 0.0, 1e-5), ({"float32_head": False}, 1e-3, 0.1)]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, {"tensor": 2, "sequence_parallel": True}, id="TP2+SP"),
        pytest.param(2, {"pipeline": 2, "distributed_optimizer": False}, id="PP2-plain"),
        pytest.param(2, {}, id="DP2-distributed"),
    ],
)
def test_bfloat16_gathers_gradients_in_float32(
    world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    oracle = expected("qwen3")
    layout = {"dtype": "bfloat16", **layout}
    model = str(oracle.directory)
    for answer in pool.run("parity", world, model=model, layout=layout, out=str(tmp_path)):
        assert answer["parameters"] == ["torch.bfloat16"]
        assert answer["gradients"] == ["torch.float32"]
        for step, wanted in zip(answer["steps"], oracle.steps, strict=True):
            assert step["loss"] == pytest.approx(wanted.loss, abs=0.05)
            assert step["grad_norm"] == pytest.approx(wanted.grad_norm, rel=0.05)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, {"dtype": "bfloat16"}, id="bfloat16", marks=fast),
        pytest.param(1, {"dtype": "float16"}, id="float16"),
        pytest.param(2, {"dtype": "bfloat16", "pipeline": 2}, id="PP2-bfloat16"),
    ],
)
def test_a_narrow_reference_scores_as_the_policy_that_it_is(
    world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """It takes no gradients, so that Megatron wraps it otherwise than the policy."""
    oracle = expected("qwen3")
    pool.run("scored_by_both", world, model=str(oracle.directory), layout=layout, out=str(tmp_path))
    policy, reference = read_ranks(tmp_path, "policy"), read_ranks(tmp_path, "reference")
    assert policy.keys() == reference.keys()
    assert all(torch.equal(reference[name], tensor) for name, tensor in policy.items())
    assert logprob_difference(reference, oracle.logprobs) <= 0.05


def test_stock_latent_attention_gives_other_gradients(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """Why the down projections are ours: forward all is well, and no error is raised."""
    oracle = expected("deepseek_v3")
    layout = {"tensor": 2, "sequence_parallel": True, "distributed_optimizer": False}
    pool.run("stock_latent", 2, model=str(oracle.directory), layout=layout, out=str(tmp_path))
    assert (
        logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs) <= LOGPROB_TOLERANCE
    )
    gradients = read_ranks(tmp_path, "gradients")
    assert relative_difference(gradients, oracle.gradients) > 10 * GRADIENT_TOLERANCE


def test_biases_of_routers_stay_float32_in_a_bfloat16_model(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    oracle = expected("deepseek_v3")
    layout = {"dtype": "bfloat16", "tensor": 2, "sequence_parallel": True}
    pool.run("parity", 2, model=str(oracle.directory), layout=layout, out=str(tmp_path))
    weights = read_ranks(tmp_path, "weights")
    biases = {name for name in weights if name.endswith("e_score_correction_bias")}
    assert len(biases) == 3
    for name in biases:
        assert torch.equal(weights[name], oracle.weights[name])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_interleave": False}, "rope_interleave"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_experts_per_tok": 6}, "not two a group"),
        ({"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok is 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "mscale",
        ),
    ],
)
def test_latent_models_that_would_be_computed_otherwise_are_refused(
    changes: dict[str, Any], text: str, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(expected("deepseek_v3").directory, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (answer,) = pool.run("open_error", 1, model=str(directory), layout={}, out=str(tmp_path))
    assert text in answer["text"]


@pytest.mark.parametrize(("settings", "least", "most"), HEADS)
def test_the_head_of_a_bfloat16_model_is_float32_unless_told_not_to(
    settings: dict[str, Any], least: float, most: float, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    layout = {"dtype": "bfloat16", "tensor": 2, "sequence_parallel": True}
    model = str(expected("qwen3").directory)
    for answer in pool.run(
        "head_gap", 2, model=model, layout=layout, trainer=settings, out=str(tmp_path)
    ):
        assert least <= answer["gap"] <= most


def _check_curve(answers: list[dict[str, Any]], oracle: Any, weights: dict[str, Any]) -> None:
    for answer in answers:  # every rank tells the same
        for step, wanted in zip(answer["steps"], oracle.steps, strict=True):
            assert step["skipped"] == ""
            assert step["loss"] == pytest.approx(wanted.loss, abs=LOSS_TOLERANCE)
            assert step["grad_norm"] == pytest.approx(wanted.grad_norm, rel=GRADIENT_TOLERANCE)
    assert relative_difference(weights, oracle.weights) <= 5e-3
