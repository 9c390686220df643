"""DeepSeek-V3, R1 and GLM-4.7-Flash: latent attention, shared experts, routers with a bias.

The first layers are dense. A layer of multi-token prediction follows the last one.
"""

from __future__ import annotations

from sluice.weights.rules.common import (
    EXPERTS,
    GATED_MLP,
    NORMS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    followed_by_next,
)
from sluice.weights.rules.rule import Family, ShardAxis, SourceTensor, Stage, WeightRule

_HF = "model.layers.{layer}.self_attn."
_MEGATRON = "decoder.layers.{layer}.self_attention."


def _rule(
    name: str,
    hf: str,
    shape: tuple[str, ...],
    cut: ShardAxis = ShardAxis.NONE,
    when: tuple[str, ...] = (),
) -> WeightRule:
    return WeightRule(
        megatron=_MEGATRON + name,
        sources=(SourceTensor(_HF + hf, shape),),
        stage=Stage.LAYER,
        cut=cut,
        when=when,
    )


_QUERY, _LATENT = "heads*nope+heads*rope", ("q_latent",)
LATENT_ATTENTION = (
    _rule(
        "linear_q_proj.weight", "q_proj.weight", (_QUERY, "hidden"), ShardAxis.ROWS, ("!q_latent",)
    ),
    _rule(  # every rank has all of what leads into a latent
        "linear_q_down_proj.weight",
        "q_a_proj.weight",
        ("q_latent", "hidden"),
        when=_LATENT,
    ),
    _rule("q_layernorm.weight", "q_a_layernorm.weight", ("q_latent",), when=_LATENT),
    _rule(
        "linear_q_up_proj.weight", "q_b_proj.weight", (_QUERY, "q_latent"), ShardAxis.ROWS, _LATENT
    ),
    _rule("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", ("kv_latent+rope", "hidden")),
    _rule("kv_layernorm.weight", "kv_a_layernorm.weight", ("kv_latent",)),
    _rule(
        "linear_kv_up_proj.weight",
        "kv_b_proj.weight",
        ("heads*nope+heads*value_dim", "kv_latent"),
        ShardAxis.ROWS,
    ),
    _rule("linear_proj.weight", "o_proj.weight", ("hidden", "heads*value_dim"), ShardAxis.COLUMNS),
)

LATENT_SIZES = {
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "kv_latent": "kv_lora_rank",
    "q_latent": "q_lora_rank",
}

_LAYER = (*NORMS, *LATENT_ATTENTION, *GATED_MLP, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=(
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForSequenceClassification",
        "Glm4MoeLiteForCausalLM",
    ),
    rules=followed_by_next(_LAYER),
    defaults={"n_shared_experts": 1, "q_lora_rank": None},
    flags={"q_latent": "has:q_lora_rank"},
    sizes={**LATENT_SIZES, "shared_experts": "n_shared_experts"},
    foreign=("model.layers.{layers}.*",),
    full_precision=("*.e_score_correction_bias",),
)
