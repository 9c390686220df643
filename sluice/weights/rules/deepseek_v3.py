"""DeepSeek-V3 and R1: latent attention, experts with a bias in the router and shared ones.

The first layers are dense. A layer of multi-token prediction follows the last one; checkpoints have
the embedding and the output layer beside it once more.
"""

from __future__ import annotations

from sluice.weights.rules.common import (
    ENDS,
    EXPERTS,
    GATED_MLP,
    NORMS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    predicted,
    repeated,
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

_LAYER = (*NORMS, *LATENT_ATTENTION, *GATED_MLP, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS)
_NEXT = "model.layers.{layers}."

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    rules=(
        *repeated(
            ENDS,
            {
                "model.embed_tokens.weight": f"{_NEXT}embed_tokens.weight",
                "lm_head.weight": f"{_NEXT}shared_head.head.weight",
            },
        ),
        *_LAYER,
        *predicted(
            _LAYER,
            _NEXT,
            embedding=f"{_NEXT}enorm.weight",
            hidden=f"{_NEXT}hnorm.weight",
            join=f"{_NEXT}eh_proj.weight",
            last=f"{_NEXT}shared_head.norm.weight",
        ),
    ),
    defaults={"n_shared_experts": 1, "q_lora_rank": None},
    flags={"q_latent": "has:q_lora_rank"},
    sizes={
        "nope": "qk_nope_head_dim",
        "rope": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
        "kv_latent": "kv_lora_rank",
        "q_latent": "q_lora_rank",
        "shared_experts": "n_shared_experts",
    },
    foreign=("model.layers.{layers}.*",),
    full_precision=("*.e_score_correction_bias",),
)
