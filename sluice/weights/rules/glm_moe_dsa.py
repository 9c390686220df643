"""GLM-5: latent attention to keys that an indexer chooses, shared experts, routers with a bias.

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
from sluice.weights.rules.deepseek_v3 import LATENT_ATTENTION, LATENT_SIZES
from sluice.weights.rules.rule import Family, Layers, SourceTensor, Stage, WeightRule

_INDEXER = tuple(  # every rank has all of it
    WeightRule(
        megatron=f"decoder.layers.{{layer}}.self_attention.core_attention.indexer.{megatron}",
        sources=(SourceTensor(f"model.layers.{{layer}}.self_attn.indexer.{hf}", shape),),
        stage=Stage.LAYER,
        layers=Layers.INDEXED,
    )
    for megatron, hf, shape in (
        ("linear_wq_b.weight", "wq_b.weight", ("index_heads*index_dim", "q_latent")),
        ("linear_wk.weight", "wk.weight", ("index_dim", "hidden")),
        ("k_norm.weight", "k_norm.weight", ("index_dim",)),
        ("k_norm.bias", "k_norm.bias", ("index_dim",)),
        ("linear_weights_proj.weight", "weights_proj.weight", ("index_heads", "hidden")),
    )
)
_ATTENTION = (*NORMS, *LATENT_ATTENTION, *_INDEXER)
_LAYER = (*_ATTENTION, *GATED_MLP, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS)

GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    rules=followed_by_next(_LAYER),
    defaults={"n_shared_experts": 1},
    flags={"q_latent": True},
    sizes={
        **LATENT_SIZES,
        "shared_experts": "n_shared_experts",
        "index_heads": "index_n_heads",
        "index_dim": "index_head_dim",
    },
    foreign=("model.layers.{layers}.*",),
    full_precision=("*.e_score_correction_bias",),
)
