"""The layers of a GPTModel: Megatron's specs with this backend's attention put in."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from services.trainer.backends.megatron.attention import PackAttention
from services.trainer.backends.megatron.norm import RMSNorm


def decoder_spec(
    config: TransformerConfig, *, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Layers of one model chunk. Attention is PackAttention with either kind of layer."""
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization="RMSNorm",
        vp_stage=vp_stage,
    )
    for layer in block.layer_specs:
        _adapt_layer(layer.submodules, config, transformer_engine)
    if not transformer_engine:
        block.layer_norm = RMSNorm
    return block


def _adapt_layer(layer: Any, config: TransformerConfig, transformer_engine: bool) -> None:
    attention = layer.self_attention.submodules
    attention.core_attention = PackAttention
    if transformer_engine:
        return
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if layer.mlp.module is MoELayer:
        # Checkpoints keep the names of TransformerEngine's layers. There the norm is fused into
        # the first linear layer, except before experts, where the stock table is wrong.
        layer.sharded_state_dict_keys_map = {
            name: key
            for name, key in layer.sharded_state_dict_keys_map.items()
            if name != "pre_mlp_layernorm."
        }
