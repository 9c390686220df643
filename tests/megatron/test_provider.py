"""Every kind of model provider gives the same model; Megatron's own classes run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from services.trainer.backend import Mesh
from services.trainer.backends.reference.backend import ReferenceBackend
from sluice.algo.spec import LossSpec
from tests.megatron.comparison import (
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    logprob_difference,
    read_ranks,
    relative_difference,
)
from tests.megatron.models import build_checkpoint, make_rows
from tests.megatron.oracle import reference_config
from tests.megatron.settings import NORMALIZER, OPTIM
from tests.rank_pool import Pool

fast = pytest.mark.fast
HERE = "tests.megatron.providers"
PROVIDERS = [
    pytest.param("test-factory", ["factory"], id="registered"),
    pytest.param(f"{HERE}:spec", ["spec"], id="spec"),
    pytest.param(f"{HERE}:staged", ["staged"], id="staged"),
    pytest.param(f"{HERE}:maker", ["maker", "spec"], id="maker-of-specs"),
    pytest.param(f"{HERE}:open_ended", ["open_ended"], id="keywords"),
    pytest.param(f"{HERE}:nested", ["nested"], id="nested", marks=fast),
]


@pytest.mark.parametrize(("provider", "calls"), PROVIDERS)
def test_provider_gives_the_model(
    provider: str, calls: list[str], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    qwen3 = expected("qwen3")
    layout = {"model_provider": provider, "pipeline": 2, "distributed_optimizer": False}
    answers = pool.run("provided", 2, model=str(qwen3.directory), layout=layout, out=str(tmp_path))
    assert all(answer["calls"] == calls for answer in answers)
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), qwen3.logprobs) < LOGPROB_TOLERANCE
    gradients = read_ranks(tmp_path, "gradients")
    assert relative_difference(gradients, qwen3.gradients) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("provider", "text"),
    [
        ("nowhere", "registered factory (test-factory"),
        (f"{HERE}:absent", "cannot be imported"),
        (f"{HERE}:number", "gave int"),
        (f"{HERE}:NOT_CALLABLE", "gave int"),
        (f"{HERE}:demanding", "asks for 'args'"),
        (f"{HERE}:two_heads", "no rule|not expected|one output_layer"),
    ],
)
def test_bad_providers_are_refused(
    provider: str, text: str, pool: Pool, expected: Any, tmp_path: Path
) -> None:
    model, layout = str(expected("qwen3").directory), {"model_provider": provider}
    (answer,) = pool.run("open_error", 1, model=model, layout=layout, out=str(tmp_path))
    assert any(part in answer["text"] for part in text.split("|")), answer


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, {"model_provider": f"{HERE}:nested"}, id="nested", marks=fast),
        pytest.param(2, {"tensor": 2, "sequence_parallel": True}, id="TP2+SP"),
        pytest.param(2, {"context": 2}, id="CP2"),
        pytest.param(4, {"context": 4, "cp_layout": "contiguous"}, id="CP4-contiguous"),
        pytest.param(2, {"pipeline": 2}, id="PP2"),
    ],
)
def test_critic_has_the_values_of_transformers(
    world: int, layout: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    directory = build_checkpoint("qwen3_critic", tmp_path / "critic")
    layout = {"distributed_optimizer": False, **layout}
    answers = pool.run("critic", world, model=str(directory), layout=layout, out=str(tmp_path))

    model = AutoModelForTokenClassification.from_pretrained(directory, dtype=torch.float32)
    wanted, total = {}, torch.zeros(())
    for row in make_rows():
        values = model(row.token_ids[None]).logits[0, row.prompt_length - 1 : -1, 0]
        wanted[row.sample_id] = values.detach()
        squares = 0.5 * (values - row.columns["returns"])[row.loss_mask].square()
        total = total + row.loss_weight * squares.sum()
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), wanted) < LOGPROB_TOLERANCE
    assert answers[0]["loss"] == pytest.approx(total.item(), rel=1e-5)
    total.backward()
    named = model.named_parameters()
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    assert relative_difference(read_ranks(tmp_path, "gradients"), gradients) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, {}, id="single", marks=fast),
        pytest.param(4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2}, id="TP2+SPxPP2"),
        pytest.param(2, {"context": 2}, id="CP2"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied"])
def test_a_new_head_on_a_language_model_learns_as_on_the_reference(
    family: str, world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    directory, spec = expected(family).directory, LossSpec(name="value")
    answers = pool.run("new_critic", world, model=str(directory), layout=layout, out=str(tmp_path))
    assert answers[0]["before"] == 0
    config = reference_config(directory, OPTIM).model_copy(update={"head": "value"})
    reference = ReferenceBackend(config, Mesh(rank=0, world_size=1))
    for step in range(3):
        reference.forward_backward([make_rows(step)], spec)
        reference.step(normalizer=NORMALIZER, learning_rate=None)
    wanted = reference.compute_values([make_rows()])
    assert max(float(values.abs().max()) for values in wanted.values()) > 0.01
    found = read_ranks(tmp_path, "values")
    assert logprob_difference(found, wanted) < LOGPROB_TOLERANCE


@pytest.mark.fast
def test_everything_comes_from_megatron_core(pool: Pool, expected: Any, tmp_path: Path) -> None:
    for layout in ({}, {"distributed_optimizer": False}):
        model = str(expected("qwen3").directory)
        (answer,) = pool.run("origins", 1, model=model, layout=layout, out=str(tmp_path))
        assert all(origin.startswith("megatron.core.") for origin in answer.values()), answer
    assert answer["model"] == "megatron.core.models.gpt.gpt_model.GPTModel"
