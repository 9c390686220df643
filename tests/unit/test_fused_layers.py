"""Layers of every family with fused operations against the same layers of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sluice.fused_layers import GATED_MLPS, JOINED_MLPS, NORMS, TURNED, adapt, heads_of, used_by
from tests.contract.training_backend.cases import SIZES
from tests.fused_stand_ins import CALLS, place_all
from tests.models.families import CASES as FAMILIES
from tests.models.families import EXPERTS, Case

TEXTS = [  # of models that see, whose towers are left alone
    Case("qwen3_vl_text", "Qwen3-VL, text", {"rope_parameters": {"mrope_section": [4, 2, 2]}}),
    Case(
        "qwen3_vl_moe_text",
        "Qwen3-VL-MoE, text, a dense layer",
        {**EXPERTS, "mlp_only_layers": [0], "rope_parameters": {"mrope_section": [4, 2, 2]}},
    ),
    Case(
        "qwen2_5_vl_text",
        "Qwen2.5-VL, text",
        {"head_dim": 8, "rope_parameters": {"mrope_section": [2, 1, 1]}},
    ),
]
DENSE = Case(
    "qwen3_moe", "Qwen3-MoE, a dense layer", {**EXPERTS, "mlp_only_layers": [0]}, of="dense"
)
# variants of a family, and types that run by its code, have the layers of the first
CASES = [*{case.known: case for case in reversed(FAMILIES)}.values(), DENSE]
KNOWN = NORMS | GATED_MLPS | JOINED_MLPS | TURNED
FUSED = {"rms_norm": "liger", "rotary": "liger", "swiglu": "liger"}
COUNTED = {"rms_norm": "liger_rms_norm", "rotary": "liger_rope", "swiglu": "liger_swiglu"}


def build(case: Case) -> Any:
    torch.manual_seed(0)
    settings = {**SIZES, "tie_word_embeddings": False, **case.settings}
    if "rope_parameters" in settings:
        settings["rope_parameters"] = {"rope_type": "default", **settings["rope_parameters"]}
        settings["rope_parameters"]["rope_theta"] = 1e4
    config = AutoConfig.for_model(case.model_type, **settings)
    config._attn_implementation = "eager"
    kind = AutoModel if case in TEXTS else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.08)
    return model


def run(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a model gives, and the gradients of a fixed sum of it."""
    tokens = torch.arange(24).view(2, 12) % SIZES["vocab_size"]
    output = model(input_ids=tokens, use_cache=False)
    made = output.logits if "logits" in output else output.last_hidden_state
    (made * torch.linspace(-1, 1, made.shape[-1])).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return made.detach(), gradients


def assert_rounding_alone(
    expected: torch.Tensor,
    gradients: dict[str, torch.Tensor],
    found: torch.Tensor,
    changed: dict[str, torch.Tensor],
) -> None:
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert changed.keys() == gradients.keys()
    for name, gradient in changed.items():
        distance = (gradient - gradients[name]).norm()
        assert distance <= 1e-4 * gradients[name].norm() + 1e-6, name


def names_in(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()} & KNOWN


@pytest.mark.parametrize("case", [*CASES, *TEXTS], ids=lambda case: case.name)
def test_fused_operations_change_rounding_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_all(monkeypatch)
    model = build(case)
    used = used_by(model)
    expected, gradients = run(model)
    assert not CALLS
    adapt(model, FUSED)
    found, fused = run(model)
    for operation, name in COUNTED.items():
        assert (CALLS[name] > 0) == (operation in used), operation
    assert_rounding_alone(expected, gradients, found, fused)


@pytest.mark.parametrize("case", [*CASES, *TEXTS], ids=lambda case: case.name)
def test_gradients_in_closed_form_change_rounding_alone(case: Case) -> None:
    model = build(case)
    expected, gradients = run(model)
    adapt(model, {"rms_norm": "closed_form", "rotary": "closed_form"})
    found, closed = run(model)
    assert_rounding_alone(expected, gradients, found, closed)


def test_every_layer_of_the_table_is_in_a_model_here() -> None:
    found: set[str] = set()
    for case in (*CASES, *TEXTS):
        with torch.device("cpu" if case.model_type == "gemma4_text" else "meta"):  # it computes
            settings = {**SIZES, **case.settings}
            settings.pop("rope_parameters", None)
            config = AutoConfig.for_model(case.model_type, **settings)
            kind = AutoModel if case in TEXTS else AutoModelForCausalLM
            found |= names_in(kind.from_config(config))
    assert KNOWN - found == set()


def test_layers_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that is not silu, a class of the same name, and models of the same class beside."""
    place_all(monkeypatch)
    gelu = build(Case("llama", "", {"hidden_act": "gelu"}))
    assert used_by(gelu) == {"rms_norm", "rotary"}
    foreign = type("LlamaRMSNorm", (torch.nn.Identity,), {})()
    assert used_by(foreign) == set()
    adapted, beside = build(Case("llama", "")), build(Case("llama", ""))
    adapt(adapted, FUSED)
    CALLS.clear()
    run(beside)
    assert not CALLS
    run(adapted)
    assert CALLS["liger_rope"] == SIZES["num_hidden_layers"]


def test_experts_run_in_a_loop_where_that_is_chosen() -> None:
    case = next(case for case in FAMILIES if case.model_type == "qwen3_moe")
    model = build(case)
    assert "experts" in used_by(model) and "experts" not in used_by(build(FAMILIES[0]))
    expected, gradients = run(model)
    assert model.config._experts_implementation == "grouped_mm"
    adapt(model, {"experts": "loop"})
    assert model.config._experts_implementation == "eager"
    found, looped = run(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for name, gradient in looped.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-4)


def test_sizes_of_heads_are_read() -> None:
    latent = next(case for case in CASES if case.model_type == "deepseek_v3")
    assert heads_of(build(latent).config) == (24, 16)
    assert heads_of(AutoConfig.for_model("qwen3", head_dim=128)) == (128, 128)
    mimo = AutoConfig.for_model("mimo_v2_flash", head_dim=192, v_head_dim=128)
    assert heads_of(mimo) == (192, 128)
    gemma = AutoConfig.for_model("gemma4_text", head_dim=16, global_head_dim=24)
    assert heads_of(gemma) == (24, 24)  # the largest
    config = AutoConfig.for_model("qwen2", hidden_size=64, num_attention_heads=4)
    assert heads_of(config) == (16, 16)
