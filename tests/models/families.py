"""A tiny random model of every family: config and weights in which no two tensors are alike."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.contract.training_backend.cases import SIZES, Model

WINDOW = 16  # rows are longer
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# Rows have up to 81 tokens. With so many heads no key has a score of 0, of which transformers would
# take some or others.
INDEXED = {
    "index_topk": 6,
    "index_n_heads": 24,
    "index_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 3,
    "n_group": 1,
}
# Rows are of several chunks; groups have several heads.
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
RECURRENT_TYPES = {
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
GRANITE = {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
WHOLE_HEADS = {"num_key_value_heads": 4, "head_dim": 8}  # of families that know no others
CAPPED = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5}  # as they matter here
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

GEMMA_4 = {
    **ALTERNATING,
    "final_logit_softcapping": 2.0,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
}


@dataclass(frozen=True)
class Case:
    """One line of the table. `of` says which variant of a family it is.

    `runs`: the model_type whose code it runs by, which transformers knows, and its architecture's
    name in its own words.
    """

    model_type: str
    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    of: str = ""
    runs: tuple[str, str] = ()  # type: ignore[assignment]

    @property
    def known(self) -> str:
        """The model_type that transformers knows."""
        return self.runs[0] if self.runs else self.model_type

    @property
    def name(self) -> str:
        return f"{self.model_type}-{self.of}" if self.of else self.model_type


CASES = [
    Case("llama", "Llama 2 and 3"),
    Case("llama", "Llama, tied", {"tie_word_embeddings": True}, of="tied"),
    Case("qwen2", "Qwen2, Qwen2.5"),
    Case("qwen2", "Qwen2 with a window", {"use_sliding_window": True, **ALTERNATING}, of="window"),
    Case("qwen2_moe", "Qwen1.5-MoE", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    Case("qwen3", "Qwen3"),
    Case("qwen3", "Qwen3 with biases", {"attention_bias": True}, of="bias"),
    Case("qwen3_moe", "Qwen3-MoE", EXPERTS),
    Case(
        "qwen3_next",
        "Qwen3-Next",
        {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    Case("qwen3_5_text", "Qwen3.5, text", RECURRENT),
    Case(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE, text",
        {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    Case("glm", "GLM-4 9B (2024)", {"partial_rotary_factor": 0.5}),
    Case("glm4", "GLM-4 (0414)", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    Case("glm4_moe", "GLM-4.5", {**GROUPED, "partial_rotary_factor": 0.5}),
    Case("glm4_moe_lite", "GLM-4.7-Flash", {**LATENT, **GROUPED}),
    Case("glm_moe_dsa", "GLM-5", {**LATENT, **GROUPED, **INDEXED}),
    Case(
        "glm_moe_dsa",
        "GLM-5.2, where layers share what one has chosen",
        {**LATENT, **GROUPED, **INDEXED, "indexer_types": ["full", "shared"]},
        of="shared",
    ),
    Case(
        "deepseek_v2", "DeepSeek-V2", {**LATENT, **GROUPED, "topk_method": "group_limited_greedy"}
    ),
    Case("deepseek_v3", "DeepSeek-V3, R1", {**LATENT, **GROUPED}),
    Case(
        "kimi_k2",
        "Kimi K2",
        {**LATENT, **GROUPED, "n_group": 1},
        runs=("deepseek_v3", "DeepseekV3ForCausalLM"),
    ),
    Case("mimo", "MiMo", runs=("qwen2", "MiMoForCausalLM")),
    Case("gemma", "Gemma"),
    Case("gemma2", "Gemma 2", {**ALTERNATING, **CAPPED}),
    Case("gemma3_text", "Gemma 3, text", ALTERNATING),
    Case("gemma4_text", "Gemma 4, text", GEMMA_4),
    Case(
        "gemma4_text",
        "Gemma 4, text, mixtures of experts",
        {
            **GEMMA_4,
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
        of="moe",
    ),
    Case(
        "gemma4_text",
        "Gemma 4, text, with inputs of each layer and shared keys",
        {
            **GEMMA_4,
            "final_logit_softcapping": 4.0,  # with less, five steps make much of little
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 53,
            "use_double_wide_mlp": True,
        },
        of="shared",
    ),
    Case("mistral", "Mistral", {"sliding_window": None}),
    Case("mistral", "Mistral with a window", {"sliding_window": WINDOW}, of="window"),
    Case("ministral", "Ministral", ALTERNATING),
    Case("mixtral", "Mixtral", {**LOCAL_EXPERTS, "sliding_window": None}),
    Case("phi", "Phi-1, 1.5, 2", {"partial_rotary_factor": 0.5}),
    Case("phi3", "Phi-3, 3.5, 4", {"sliding_window": None}),
    Case("phimoe", "Phi-3.5-MoE", {**LOCAL_EXPERTS, "sliding_window": None}),
    Case("gpt_oss", "gpt-oss", {**LOCAL_EXPERTS, **ALTERNATING}),
    Case("olmo", "OLMo"),
    Case("olmo2", "OLMo 2"),
    Case("olmo3", "OLMo 3", ALTERNATING),
    Case("granite", "Granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    Case("granitemoe", "Granite MoE", {**LOCAL_EXPERTS, "logits_scaling": 4.0}),
    Case("cohere", "Command R", {"logit_scale": 0.5}),
    Case("cohere2", "Command A", {"logit_scale": 0.5, **ALTERNATING}),
    Case("starcoder2", "StarCoder2", {"sliding_window": None}),
    Case(
        "smollm3", "SmolLM3", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}
    ),
    Case("seed_oss", "Seed-OSS"),
    Case("ernie4_5", "ERNIE 4.5"),
    Case("exaone4", "EXAONE 4", ALTERNATING),
    Case("nemotron", "Nemotron"),
    Case("arcee", "AFM"),
    Case("hunyuan_v1_dense", "Hunyuan dense"),
    Case(
        "minimax",
        "MiniMax-Text",
        {**LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    ),
    Case("lfm2", "LFM2", {"layer_types": ["conv", "full_attention"]}),
    Case("nemotron_h", "Nemotron 3 Nano", NEMOTRON),
    Case(
        "nemotron_h",
        "Nemotron 3, experts of a latent",
        {**NEMOTRON, "moe_latent_size": 16, "n_group": 2, "topk_group": 1},
        of="latent",
    ),
    Case(
        "granitemoehybrid",
        "Granite 4",
        {
            **MAMBA,
            **HYBRID,
            **LOCAL_EXPERTS,
            **GRANITE,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.1,
            "position_embedding_type": "nope",
        },
    ),
    Case(
        "granitemoehybrid",
        "Granite 4, dense and rotated",
        {
            **MAMBA,
            **HYBRID,
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.1,
            "position_embedding_type": "rope",
        },
        of="dense",
    ),
    Case(
        "falcon_h1",
        "Falcon-H1",
        {
            **MAMBA,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "lm_head_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.5,
            "attention_out_multiplier": 1.5,
            "ssm_in_multiplier": 0.75,
            "ssm_out_multiplier": 1.25,
            "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 0.9],
            "mlp_multipliers": [0.8, 1.2],
        },
    ),
    Case(
        "lfm2_moe",
        "LFM2, mixtures of experts",
        {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    Case(
        "jamba",
        "Jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    Case("bamba", "Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    Case(
        "kimi_linear",
        "Kimi Linear",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    Case(
        "longcat_flash",
        "LongCat-Flash",
        {
            **LATENT,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 4,
            "routed_scaling_factor": 2.5,
        },
    ),
    Case(
        "mimo_v2_flash",
        "MiMo-V2-Flash",
        {
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
    ),
    Case("hunyuan_v1_moe", "Hunyuan-A13B", {"num_experts": 4, "moe_topk": 2}),
    Case(
        "granitemoeshared",
        "Granite MoE with shared experts",
        {**LOCAL_EXPERTS, **GRANITE, "shared_intermediate_size": 48},
    ),
    Case(
        "afmoe",
        "Trinity",
        {
            **EXPERTS,
            **ALTERNATING,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "route_scale": 2.5,
            "mup_enabled": True,
        },
    ),
    Case(
        "laguna",
        "Laguna",
        {
            **EXPERTS,
            **ALTERNATING,
            "num_attention_heads_per_layer": [4, 8],
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 2.5,
        },
    ),
    Case("cwm", "Code World Model", {**ALTERNATING, "bos_token_id": 0}),
    Case("olmo_hybrid", "OLMo Hybrid", {**RECURRENT, **WHOLE_HEADS}),
    Case("exaone_moe", "K-EXAONE", {**EXPERTS, **ALTERNATING, "num_shared_experts": 1}),
    Case(
        "solar_open",
        "Solar Open",
        {**GROUPED, "n_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 3},
    ),
    Case("hy_v3", "Hunyuan 3", {**EXPERTS, "num_shared_experts": 1}),
    Case("flex_olmo", "FlexOlmo", {**WHOLE_HEADS, "num_experts": 4, "num_experts_per_tok": 2}),
    Case("minimax_m2", "MiniMax-M2", {**LOCAL_EXPERTS, "rotary_dim": 8}),
    Case(
        "ernie4_5_moe",
        "ERNIE 4.5 MoE",
        {
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 32,
        },
    ),
    Case("olmoe", "OLMoE", {**EXPERTS, **WHOLE_HEADS}),
    Case("dots1", "dots.llm1", {**GROUPED, "n_routed_experts": 4, "sliding_window": None}),
    Case("apertus", "Apertus"),
    Case("ministral3", "Ministral 3"),
    Case("gpt2", "GPT-2", {**WHOLE_HEADS, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    Case("opt", "OPT", {**WHOLE_HEADS, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    Case("bloom", "BLOOM", {"n_head": 4, "n_layer": 2}),
]


def build(case: Case, directory: Path) -> Model:
    """Write the model of a case. Whatever transformers raises for one that cannot be flies."""
    torch.manual_seed(0)
    settings = {**SIZES, "tie_word_embeddings": False, **case.settings}
    config = AutoConfig.for_model(case.known, **settings)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.08)
        for name, buffer in model.named_buffers():
            if any(part in name for part in ("correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)
    model.save_pretrained(directory)
    if not case.runs:
        return Model(directory)
    rename_type(case, directory)
    return Model(directory, config)


def rename_type(case: Case, directory: Path) -> None:
    """Have config.json say its own type, and where its own code would be."""
    path = directory / "config.json"
    said = {**json.loads(path.read_text()), "model_type": case.model_type}
    said["architectures"] = [case.runs[1]]
    said["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
    path.write_text(json.dumps(said))


MTP = {  # some of the names of layers of multi-token prediction, by case
    "qwen3_next": ("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "mtp.norm.weight"),
    "deepseek_v3": ("model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"),
    "glm4_moe": ("model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"),
    "glm_moe_dsa": ("model.layers.2.eh_proj.weight", "model.layers.2.self_attn.indexer.wk.weight"),
    "nemotron_h": ("mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight"),
    "mimo": ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.token_layernorm.weight"),
}


def add_tensors(
    model: Model, names: tuple[str, ...], directory: Path
) -> tuple[Model, dict[str, torch.Tensor]]:
    """A copy of the model with more tensors in its checkpoint, of other types and shapes."""
    shutil.copytree(model.directory, directory)
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(5)
    more = {
        name: torch.randn((2 + index, 33), generator=generator).bfloat16()
        for index, name in enumerate(names)
    }
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    return Model(directory, model.config), more
