"""What a row costs in a model of several kinds of layers, against its own modules, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sluice.balance.planner import forward_flops, shape_from_config
from tests.contract.training_backend.cases import SIZES
from tests.models.families import CASES

LENGTHS = (1, 16, 17, 50)
WINDOWED = {"num_hidden_layers": 6, "sliding_window": 16, "num_experts_per_tok": None}

# As their directories tell of layers, where transformers says `layer_types`
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": ("qwen3_next", {"num_hidden_layers": 8, "full_attention_interval": 4}),
    "Kimi Linear": (
        "kimi_linear",
        {
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
            "first_k_dense_replace": 1,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
        },
    ),
    "Nemotron-H": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "MEM*EM-",
            "mlp_hidden_act": "relu2",
            "n_shared_experts": 1,
        },
    ),
    "Jamba": (
        "jamba",
        {
            "num_hidden_layers": 8,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "Bamba": ("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [2]}),
    "Granite 4": (
        "granitemoehybrid",
        {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "LFM2": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "full_attn_idxs": [2],
            "conv_L_cache": 3,
            "block_ff_dim": 500,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.5,
            "block_multiple_of": 8,
        },
    ),
    "Falcon-H1": ("falcon_h1", {"num_hidden_layers": 3}),
    "Gemma 2": ("gemma2", WINDOWED),
    "Gemma 3": ("gemma3_text", {**WINDOWED, "sliding_window_pattern": 3}),
    "Command A": ("cohere2", {**WINDOWED, "sliding_window_pattern": 3}),
    "Mistral": ("mistral", WINDOWED),
    "StarCoder2": ("starcoder2", WINDOWED),
    "Qwen2": ("qwen2", {**WINDOWED, "use_sliding_window": True, "max_window_layers": 4}),
    "Qwen2.5": ("qwen2", {**WINDOWED, "use_sliding_window": False, "max_window_layers": 4}),
    "Trinity": (
        "afmoe",
        {"num_hidden_layers": 4, "sliding_window": 16, "global_attn_every_n_layers": 4},
    ),
}
SAID_OTHERWISE = ("layer_types", "layers_block_type", "mlp_layer_types")


def config_of(name: str) -> dict[str, Any]:
    """A config.json without what transformers would add."""
    family, own = PUBLISHED[name]
    settings = next(case.settings for case in CASES if case.name == family)
    kept = {k: v for k, v in settings.items() if k not in SAID_OTHERWISE}
    return {**SIZES, **kept, **own, "model_type": family}


def multiply_adds(config: dict[str, Any], length: int) -> float:
    """Of each module that transformers builds, and each query and key that it sees."""
    given = {name: value for name, value in config.items() if name != "model_type"}
    made: Any = AutoConfig.for_model(config["model_type"], **given)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(made)
    total = 0.0
    for name, parameter in model.named_parameters():
        if "embed" in name or parameter.ndim < 2 or name.endswith("A_log"):
            continue
        if ".experts." in name:
            chosen = getattr(made, "num_experts_per_tok", None) or made.num_experts_per_token
            total += length * parameter.numel() / len(parameter) * chosen
        else:
            total += length * parameter.numel()
    if made.tie_word_embeddings:
        total += length * made.vocab_size * made.hidden_size
    for kind, module in kinds_of(model):
        total += module_adds(kind, module, made, length)
    return total


def kinds_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for module in model.modules():
        name = type(module).__name__
        if "Delta" in name:
            yield "delta", module
        elif hasattr(module, "in_proj") and hasattr(module, "A_log"):
            yield "mamba", module
        elif hasattr(module, "k_proj") or hasattr(module, "kv_b_proj"):
            yield "attention", module


def module_adds(kind: str, module: Any, config: Any, length: int) -> float:
    """Beside its matrices: into a state with each token, or of pairs."""
    if kind == "mamba":  # decays, takes in, is read
        inner = module.A_log.shape[0] * (getattr(module, "head_dim", None) or 1)
        state = getattr(module, "ssm_state_size", None) or module.A_log.shape[1]
        return float(3 * length * inner * state)
    if kind == "delta":  # decays, is read by the key, takes the difference in, is read
        heads = getattr(module, "num_v_heads", None) or module.num_heads
        key = getattr(module, "head_k_dim", None) or module.head_dim
        value = getattr(module, "head_v_dim", None) or module.head_dim
        return float(4 * length * heads * key * value)
    own = None if getattr(config, "layer_types", None) else config.to_dict().get("sliding_window")
    window = getattr(module, "sliding_window", own) or length
    pairs = sum(min(query + 1, window) for query in range(length))
    if hasattr(module, "kv_b_proj"):
        each = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        each = 2 * module.head_dim
    return float(pairs * config.num_attention_heads * each)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_costs_what_its_layers_do(name: str) -> None:
    config = config_of(name)
    shape = shape_from_config(config)
    for length in LENGTHS:
        expected = 2 * multiply_adds(config, length)
        assert forward_flops(shape, length) == pytest.approx(expected, rel=1e-12), length


SAVED = [
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid", "jamba"),
    *("bamba", "falcon_h1", "granitemoehybrid", "granitemoehybrid-dense", "lfm2", "lfm2_moe"),
    *("nemotron_h", "nemotron_h-latent", "gemma2", "gemma3_text", "afmoe", "mistral-window"),
    *("qwen2-window", "glm4_moe", "deepseek_v3", "qwen3_moe", "llama"),
]


@pytest.mark.parametrize("name", SAVED)
def test_so_it_does_as_transformers_tells_of_them(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    settings = {**SIZES, "tie_word_embeddings": False, **case.settings}
    config = AutoConfig.for_model(case.known, **settings).to_dict()
    for length in LENGTHS:
        expected = 2 * multiply_adds(config, length)
        found = forward_flops(shape_from_config(config), length)
        assert found == pytest.approx(expected, rel=1e-12), length
