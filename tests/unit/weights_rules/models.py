"""Shapes for the tests, and what a checkpoint of them holds."""

from __future__ import annotations

from typing import Any

import torch

from sluice.weights.rules import ModelShape, WeightMap, family_of, read_shape

BASE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 13,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"]},
    "llama_biased": {
        **BASE,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {**BASE, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**BASE, "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_tied": {
        **BASE,
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **BASE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [1],
    },
}


def weight_map(name: str, **changes: Any) -> WeightMap:
    config = {**CONFIGS[name], **changes}
    family = family_of(config)
    return WeightMap(family, read_shape(family, config))


def shape_of(name: str, **changes: Any) -> ModelShape:
    return weight_map(name, **changes).shape


def checkpoint(weights: WeightMap, seed: int = 0) -> dict[str, torch.Tensor]:
    """A tensor of distinct numbers for every name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in weights.hf_tensors().items()
    }
