"""Tiny random checkpoints of each family, and batches of rows with every column a loss may read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from services.trainer.backend import MicroBatch, Row

VOCAB = 131  # no multiple of anything, so that the vocabulary is padded
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],  # one dense layer among sparse ones
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-5,  # other than that of the latents' norms
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# Rows have up to 19 tokens. With so many heads no key has a score of 0, of which any may be taken.
INDEXED: dict[str, Any] = {
    **LATENT,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "index_topk": 4,
    "index_n_heads": 24,
    "index_head_dim": 16,
    "pad_token_id": None,
}
SHARED = ["full", "shared", "full", "shared"]  # layers share what the one before has chosen
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
WIDENED = {name: value for name, value in YARN.items() if not name.startswith("mscale")}
GLM4: dict[str, Any] = {"head_dim": 16, "attention_bias": True, "pad_token_id": None}
GLM4_MOE: dict[str, Any] = {
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "pad_token_id": None,
}
MINIMAX_M2: dict[str, Any] = {
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}
GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,  # rows have up to 19 tokens
    "swiglu_limit": 0.5,  # so that some are clamped
    "swiglu_alpha": 1.3,  # other than Megatron's own
    "pad_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3_tied": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen3_critic": (
        "Qwen3Config",
        "Qwen3ForTokenClassification",
        {"head_dim": 32, "num_labels": 1},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"head_dim": 32, **EXPERTS}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3_yarn": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"head_dim": 32, "rope_parameters": WIDENED},
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", GLM4),
    "glm4_yarn": (  # of a part of each head
        "Glm4Config",
        "Glm4ForCausalLM",
        {**GLM4, "rope_parameters": {**WIDENED, "partial_rotary_factor": 0.5}},
    ),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", GLM4_MOE),
    "glm4_moe_groups": (  # of experts, without norms of heads
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**GLM4_MOE, "use_qk_norm": False, "n_group": 2, "topk_group": 1},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", INDEXED),
    "glm_moe_dsa_shared": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**INDEXED, "indexer_types": SHARED},
    ),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", MINIMAX_M2),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", GPT_OSS),
    "deepseek_v3_yarn": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
}


def build_checkpoint(family: str, directory: Path, seed: int = 0) -> Path:
    """Write a random model of `family`; no two of its tensors are alike, norms included."""
    config_name, model_name, extra = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**SIZES, **extra})
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.03)
    model.save_pretrained(directory)
    return directory


def make_rows(step: int = 0, *, groups: int = 4) -> list[Row]:
    """Rows in groups of two, of uneven lengths, one without a trained token."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = []
    for group in range(groups):
        for index in range(2):
            length = int(torch.randint(3, 20, (), generator=generator))
            prompt = int(torch.randint(1, length, (), generator=generator))
            rows.append(_make_row(f"{group}", index, length, prompt, generator))
    rows[1].loss_mask[:] = False
    return rows


def taught_rows(count: int) -> list[Row]:
    """Rows with `count` tokens that a teacher named at each place, any of the vocabulary."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for row in make_rows():
        length = row.response_length
        ids = torch.rand(length, VOCAB, generator=generator).argsort(1)[:, :count]
        logprobs = torch.randn(length, count + 1, generator=generator).log_softmax(1)[:, :count]
        named = {
            f"teacher_top_ids/{count}": ids.int(),
            f"teacher_top_logprobs/{count}": logprobs,
        }
        rows.append(row._replace(columns={**row.columns, **named}))
    return rows


def _make_row(group: str, index: int, length: int, prompt: int, generator: torch.Generator) -> Row:
    response = length - prompt
    noise = torch.randn((3, response), generator=generator)
    return Row(
        sample_id=f"{group}/{index}",
        group_id=group,
        token_ids=torch.randint(0, VOCAB, (length,), generator=generator),
        prompt_length=prompt,
        loss_mask=torch.rand(response, generator=generator) < 0.8,
        columns={
            "advantages": noise[0],
            "rollout_logprobs": -5.5 + noise[1],
            "reference_logprobs": -5.5 + noise[2],
            "returns": noise[2] - noise[1],
        },
        loss_weight=1.0 + index,
    )


def routed_rows() -> list[Row]:
    """The rows of step 0 with random experts, for every other row none for the last token."""
    generator = torch.Generator().manual_seed(7)
    layers = SIZES["num_hidden_layers"] - len(EXPERTS["mlp_only_layers"])
    choices, experts = EXPERTS["num_experts_per_tok"], EXPERTS["num_experts"]
    rows = []
    for index, row in enumerate(make_rows()):
        scores = torch.rand((len(row.token_ids) - index % 2, layers, experts), generator=generator)
        rows.append(row._replace(routed_experts=scores.topk(choices).indices.to(torch.uint8)))
    return rows


def micro_batches(rows: list[Row], data_rank: int, data_size: int) -> list[MicroBatch]:
    """This data rank's groups in three micro-batches, of which the last is a dummy."""
    mine = [row for row in rows if int(row.group_id) % data_size == data_rank]
    half = (len(mine) + 1) // 2
    return [mine[:half], mine[half:], []]
