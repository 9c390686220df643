"""Megatron-Core under parallel layouts, shown images, against plain transformers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.megatron.comparison import read_ranks
from tests.megatron.settings import NORMALIZER
from tests.models.proof import Proof, Summary, short_name
from tests.rank_pool import JobError, Pool
from tests.vision.cases import (
    MAX_GRADIENT_DIFF,
    MAX_LOGPROB_DIFF,
    Model,
    Oracle,
    build_model,
    mixed_rows,
    record,
    relative_distances,
    stored_tensors,
)

fast = pytest.mark.fast
SP = {"tensor": 2, "sequence_parallel": True}
LAYOUTS = [
    pytest.param("qwen3_vl", 1, {}, id="single"),
    pytest.param("qwen3_vl", 2, SP, id="TP2+SP"),
    pytest.param("qwen3_vl", 2, {"tensor": 2}, id="TP2"),
    pytest.param("qwen3_vl", 2, {"context": 2}, id="CP2-zigzag", marks=fast),
    pytest.param("qwen3_vl", 2, {"context": 2, "cp_layout": "contiguous"}, id="CP2-contiguous"),
    pytest.param("qwen3_vl", 2, {"pipeline": 2}, id="PP2", marks=fast),
    pytest.param("qwen3_vl", 2, {}, id="DP2-one-without-images"),
    pytest.param("qwen3_vl", 2, {"distributed_optimizer": True}, id="DP2-distributed"),
    pytest.param(
        "qwen3_vl",
        2,
        {"distributed_optimizer": True, "optimizer_offload": 0.5},
        id="DP2-offloaded",
    ),
    pytest.param("qwen3_vl", 4, {**SP, "pipeline": 2}, id="TP2+SPxPP2"),
    pytest.param("qwen3_vl", 4, {"tensor": 2, "pipeline": 2}, id="TP2xPP2"),
    pytest.param("qwen3_vl", 4, {"tensor": 2, "context": 2}, id="TP2xCP2"),
    pytest.param("qwen3_vl", 2, {"pipeline": 2, "recompute": "full"}, id="PP2-recompute"),
    pytest.param("qwen3_vl_moe", 1, {}, id="MoE-single"),
    pytest.param("qwen3_vl_moe", 2, SP, id="MoE-TP2+SP"),
    pytest.param("qwen3_vl_moe", 2, {"pipeline": 2, "first_stage_layers": 3}, id="MoE-PP2"),
    pytest.param("qwen3_vl_moe", 2, {"expert": 2}, id="MoE-EP2", marks=fast),
    pytest.param("qwen3_vl_moe", 2, {"context": 2}, id="MoE-CP2"),
    pytest.param("qwen3_vl_moe", 4, {**SP, "expert": 2}, id="MoE-TP2+SPxEP2"),
    pytest.param("qwen3_vl_moe", 4, {**SP, "tensor": 4}, id="MoE-TP4+SP"),
    pytest.param("qwen2_5_vl", 1, {}, id="2.5-single"),
    pytest.param("qwen2_5_vl", 2, SP, id="2.5-TP2+SP", marks=fast),
    pytest.param("qwen2_5_vl", 2, {"context": 2}, id="2.5-CP2"),
    pytest.param("qwen3_5", 1, {}, id="3.5-single"),
    pytest.param("qwen3_5", 2, SP, id="3.5-TP2+SP"),
    pytest.param("qwen3_5", 2, {"pipeline": 2}, id="3.5-PP2"),
    pytest.param("qwen3_5_moe", 2, {"expert": 2}, id="3.5-MoE-EP2", marks=fast),
    pytest.param("qwen3_5_moe", 2, SP, id="3.5-MoE-TP2+SP"),
    pytest.param(
        "qwen2_5_vl", 2, {"pipeline": 2, "virtual_pipeline": 2}, id="2.5-PP2xVPP2-no-deepstack"
    ),
]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Expected:
    model: Model
    logprobs: Tensors
    gradients: Tensors


class ExpectedByFamily:
    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, Expected]()

    def __call__(self, family: str) -> Expected:
        if family not in self._made:
            torch.set_num_threads(1)
            model = build_model(self._root / family, family)
            oracle, rows = Oracle(model), mixed_rows(model.rules)
            logprobs = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
            gradients = stored_tensors(oracle.model, oracle.gradients(rows))
            self._made[family] = Expected(model, logprobs, gradients)
        return self._made[family]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> ExpectedByFamily:
    return ExpectedByFamily(tmp_path_factory.mktemp("models"))


def check_logprobs(found: Tensors, expected: Tensors, layout: str) -> float:
    """The largest difference."""
    assert found.keys() == expected.keys()
    differences = {n: (found[n] - logprobs).abs().max().item() for n, logprobs in expected.items()}
    for name, difference in differences.items():
        assert record("logprob", difference, layout) <= MAX_LOGPROB_DIFF, name
    return max(differences.values())


@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS)
def test_a_layout_gives_what_transformers_gives(
    pool: Pool,
    expected: ExpectedByFamily,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    summary: Summary,
    family: str,
    world: int,
    layout: dict[str, Any],
) -> None:
    want, name = expected(family), request.node.callspec.id
    short = short_name(world, layout)
    layout = {"distributed_optimizer": False, **layout}
    answers = pool.run(
        "vision", world, model=str(want.model.directory), out=str(tmp_path), layout=layout
    )
    logprob = check_logprobs(read_ranks(tmp_path, "logprobs"), want.logprobs, name)
    gradient, norm_off = 0.0, 0.0
    norm = sum(float(g.double().square().sum()) for g in want.gradients.values()) ** 0.5
    for answer in answers:
        off = abs(answer["grad_norm"] * NORMALIZER / norm - 1)
        norm_off = max(norm_off, off)
        assert record("gradient", off, name) <= MAX_GRADIENT_DIFF
    if not layout["distributed_optimizer"]:  # else every rank has a share of the sum
        gradients = read_ranks(tmp_path, "gradients")
        for part, difference in relative_distances(gradients, want.gradients).items():
            gradient = max(gradient, difference)
            assert record("gradient", difference, name) <= MAX_GRADIENT_DIFF, part
    # What it has learnt is what the published weights say.
    folder = shutil.copytree(want.model.directory, tmp_path / "trained")
    save_file(read_ranks(tmp_path, "weights"), folder / "model.safetensors", {"format": "pt"})
    oracle, rows = Oracle(Model(folder)), mixed_rows(want.model.rules)
    trained = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    reloaded = check_logprobs(read_ranks(tmp_path, "trained"), trained, name)
    summary.megatron.append(
        Proof(family, world, logprob, gradient, norm_off, reloaded, layout=short)
    )
    moved = max((trained[key] - want.logprobs[key]).abs().max() for key in trained)
    assert moved > 1e-3


@pytest.mark.fast
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_checkpoint_goes_over_to_another_layout(
    pool: Pool, expected: ExpectedByFamily, tmp_path: Path, family: str
) -> None:
    directory = str(expected(family).model.directory)
    pool.run("vision", 2, model=directory, out=str(tmp_path), layout={"tensor": 2})
    pool.run(
        "vision_resumed",
        2,
        model=directory,
        out=str(tmp_path),
        checkpoint=str(tmp_path / "checkpoint"),
        layout={"pipeline": 2},
    )
    check_logprobs(read_ranks(tmp_path, "resumed"), read_ranks(tmp_path, "trained"), "TP2 to PP2")


def test_a_first_chunk_that_is_too_short_is_refused_by_name(
    pool: Pool, expected: ExpectedByFamily, tmp_path: Path
) -> None:
    directory = str(expected("qwen3_vl").model.directory)
    layout = {"pipeline": 2, "virtual_pipeline": 2}
    with pytest.raises(JobError, match="first chunk of the pipeline holds 1"):
        pool.run("vision", 2, model=directory, out=str(tmp_path), layout=layout)


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        pytest.param("qwen3_vl", 1, {}, id="critic-single", marks=pytest.mark.fast),
        pytest.param("qwen3_vl", 2, SP, id="critic-TP2+SP"),
        pytest.param("qwen3_vl", 2, {"context": 2}, id="critic-CP2"),
        pytest.param("qwen3_vl", 4, {"tensor": 2, "pipeline": 2}, id="critic-TP2xPP2"),
        pytest.param("qwen3_vl_moe", 2, SP, id="MoE-critic-TP2+SP"),
    ],
)
def test_a_critic_has_the_values_and_gradients_of_transformers(
    pool: Pool,
    expected: ExpectedByFamily,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    family: str,
    world: int,
    layout: dict[str, Any],
) -> None:
    """Of the weights that two steps of the value loss have made: a new head says zero."""
    model, name = expected(family).model, request.node.callspec.id
    answers = pool.run(
        "vision_critic",
        world,
        model=str(model.directory),
        out=str(tmp_path),
        layout={"distributed_optimizer": False, **layout},
    )
    assert answers[0]["before"] == 0
    found = read_ranks(tmp_path, "weights")
    weight, bias = (found.pop(f"score.{kind}").requires_grad_() for kind in ("weight", "bias"))
    untrained = load_file(model.directory / "model.safetensors")["lm_head.weight"]
    folder = shutil.copytree(model.directory, tmp_path / "trained")
    save_file(
        {**found, "lm_head.weight": untrained}, folder / "model.safetensors", {"format": "pt"}
    )
    oracle, total = Oracle(Model(folder)), torch.zeros(())
    values = read_ranks(tmp_path, "values")
    for row in mixed_rows(model.rules):
        wanted = oracle.values(row, weight, bias)
        difference = (values[row.sample_id] - wanted).abs().max().item()
        assert record("logprob", difference, name) <= MAX_LOGPROB_DIFF, row.sample_id
        squares = (wanted - row.columns["returns"])[row.loss_mask].square()
        total = total + 0.5 * row.loss_weight * squares.sum()
    assert max(float(each.abs().max()) for each in values.values()) > 0.01
    assert answers[0]["loss"] == pytest.approx(total.item(), rel=1e-5)
    oracle.model.zero_grad()
    total.backward()
    named = {n: p for n, p in oracle.model.named_parameters() if n != "lm_head.weight"}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    wanted_gradients = stored_tensors(oracle.model, gradients)
    assert weight.grad is not None and bias.grad is not None
    wanted_gradients |= {"score.weight": weight.grad, "score.bias": bias.grad}
    parts = relative_distances(read_ranks(tmp_path, "gradients"), wanted_gradients)
    assert parts.keys() == {"text", "tower", "merger", "deepstack"}
    for part, difference in parts.items():
        assert record("gradient", difference, name) <= MAX_GRADIENT_DIFF, part
