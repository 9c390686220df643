"""Tiny models of every family: head ratios, biases, ties and kinds of layers as the real ones have.

What each is made after stands beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sluice.weights.rules.shape import ModelShape, read_shape
from sluice.weights.rules.weight_map import WeightMap, family_of

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


TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}
IMAGES = {"image_token_id": 57, "video_token_id": 58}
MARKS = {"vision_start_token_id": 59, "vision_end_token_id": 60}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
LINEAR = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
Described = tuple[str, str, dict[str, Any]]

HUGGING_FACE: dict[str, Described] = {  # name -> (config class, model class, arguments)
    "llama": (  # Llama-3.1-8B: 32 heads on 8, no bias, untied
        "LlamaConfig",
        "LlamaForCausalLM",
        {**TEXT, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "llama_tied": (  # Llama-3.2-1B: tied
        "LlamaConfig",
        "LlamaForCausalLM",
        {**TEXT, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen2": (  # Qwen2.5-0.5B: 14 heads on 2, biases on q, k and v, tied
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            **TEXT,
            "hidden_size": 56,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": (  # Qwen3-8B: 32 heads on 8, wider than the hidden size in small ones, untied
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**TEXT, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
    ),
    "qwen3_moe": (  # Qwen3-30B-A3B: 32 heads on 4
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **TEXT,
            **SPARSE,
            "num_experts": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_30b": (  # Qwen3-30B-A3B: every layer has experts
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **TEXT,
            **SPARSE,
            "num_experts": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
    ),
    "qwen2_5_vl": (  # Qwen2.5-VL-7B: 28 heads on 4; the tower's MLP is gated, with biases
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "hidden_size": 56,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 0, 1]},
            },
            "vision_config": {**VISION, "out_hidden_size": 56, "fullatt_block_indexes": [1]},
            **IMAGES,
            **MARKS,
        },
    ),
    "qwen3_vl": (  # Qwen3-VL-4B: 32 heads on 8, tied; LayerNorm and plain MLP in the tower
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                **VISION,
                "deepstack_visual_indexes": [0, 1],
                "num_position_embeddings": 16,
            },
            "tie_word_embeddings": True,
            **IMAGES,
            **MARKS,
        },
    ),
    "qwen3_vl_moe": (  # Qwen3-VL-30B-A3B: 32 heads on 4, untied; every layer of experts
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **SPARSE,
                "num_experts": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                **VISION,
                "deepstack_visual_indexes": [0, 1],
                "num_position_embeddings": 16,
            },
            "tie_word_embeddings": False,
            **IMAGES,
            **MARKS,
        },
    ),
    "qwen3_next": (  # Qwen3-Next-80B-A3B: 16 heads on 2, 16 key and 32 value heads; one layer dense
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **TEXT,
            **LINEAR,
            **SPARSE,
            "num_experts": 4,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "linear_num_value_heads": 4,
        },
    ),
    "qwen3_5": (  # Qwen3.5-27B: 24 heads on 4, 16 key and 48 value heads in linear attention
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **TEXT,
            **LINEAR,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "linear_num_value_heads": 6,
        },
    ),
    "qwen3_5_vl": (
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **LINEAR,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "linear_num_value_heads": 6,
            },
            "vision_config": {**VISION, "num_position_embeddings": 16},
            **IMAGES,
            **MARKS,
        },
    ),
    "qwen3_5_vl_moe": (  # Qwen3.5-397B-A17B: 32 heads on 2, 16 key and 64 value heads
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": {
                **{k: v for k, v in TEXT.items() if k != "intermediate_size"},
                **LINEAR,
                **SPARSE,
                "num_experts": 4,
                "shared_expert_intermediate_size": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "linear_num_value_heads": 8,
            },
            "vision_config": {**VISION, "num_position_embeddings": 16},
            **IMAGES,
            **MARKS,
        },
    ),
    "glm4": (  # GLM-4-9B-0414: 32 heads on 2, biases on q, k and v, untied
        "Glm4Config",
        "Glm4ForCausalLM",
        {
            **TEXT,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": True,
        },
    ),
    "glm4_moe": (  # 96 heads and 8 of keys, norms on them in the large one; 1 shared expert
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **TEXT,
            **SPARSE,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "minimax_m2": (  # 48 heads on 8, norms over all of them; 256 experts in every layer
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {
            **TEXT,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rotary_dim": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (  # 128 heads; the first 3 of 61 layers dense; 1 shared expert
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **TEXT,
            **SPARSE,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
    "glm_moe_dsa": (  # 64 heads; the first 3 of 78 layers dense; indexers in all, or some
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {
            **TEXT,
            **SPARSE,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "rms_norm_eps": 1e-6,  # as of latents
            "index_n_heads": 3,
            "index_head_dim": 8,
            "index_topk": 64,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "gpt_oss": (  # 64 heads on 8 with sinks, every other layer with a window; 128 experts
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **TEXT,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 3,
            "swiglu_limit": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "deepseek_v3_direct": (  # Moonlight: no latent for queries
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **TEXT,
            **SPARSE,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
}


def build_model(name: str, seed: int = 0) -> Any:
    """A random model of transformers; no two of its numbers alike, those of norms near one."""
    import transformers

    config_name, model_name, arguments = HUGGING_FACE[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**arguments)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            if parameter.is_floating_point() and parameter.dim():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def save_model(name: str, directory: Path, seed: int = 0) -> Path:
    """Write `build_model` as such models are published."""
    return write_model(build_model(name, seed), directory)


def write_model(model: Any, directory: Path) -> Path:
    """Write a model as transformers does, but for experts of Qwen3-VL-MoE as they are published."""
    model.save_pretrained(directory)
    if model.config.model_type == "qwen3_vl_moe":
        path = directory / "model.safetensors"
        save_file(exchanged(load_file(path)), path, {"format": "pt"})
    return directory


def exchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exchange the last two axes of tensors of all experts."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in tensors.items()
    }
