"""An HF model and a layout, said in Megatron's words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from services.trainer.backend import LayoutError
from services.trainer.backends.megatron import upstream
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.fit import (
    BANDED,
    BIASED,
    CHOOSING,
    CLAMPED,
    LATENT,
    RECURRENT,
    SANDWICH,
    SEEING,
    WIDE_NORMS,
    check_chosen,
    check_family,
    check_model,
    check_shape,
    expert_groups,
    is_classifier_of,
)
from services.trainer.backends.megatron.upstream import on_cpu
from services.trainer.config import Head
from sluice.model_types import read_config
from sluice.samples.images import ImageRules
from sluice.weights.classifier import CRITIC
from sluice.weights.rules.packing import padded_rows
from sluice.weights.rules.rule import Stage
from sluice.weights.rules.shape import ModelShape, read_shape
from sluice.weights.rules.weight_map import WeightMap, family_of
from sluice.weights.stored_experts import are_stacked, are_straight, tensor_shapes

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TOWER = "vision_model."  # before the names of the tower's parameters


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A checkpoint directory, read as far as its configuration goes."""

    directory: Path
    hf_config: Any  # transformers.PretrainedConfig, of the text alone
    weights: WeightMap
    whole_config: Any  # of all of it
    images: ImageRules | None = None  # of a model that sees

    @property
    def merge_size(self) -> int:
        """0 where the model takes one position a token."""
        return 0 if self.images is None else self.images.merge_size

    @property
    def shape(self) -> ModelShape:
        return self.weights.shape

    @property
    def latent(self) -> bool:
        """Whether attention is over latents."""
        return self.weights.family.name in LATENT

    @property
    def chooses(self) -> bool:
        """Whether attention is to keys that an indexer chooses."""
        return self.weights.family.name in CHOOSING

    @property
    def biased(self) -> bool:
        """Whether experts are chosen by sigmoids with a bias."""
        return self.weights.family.name in BIASED

    @property
    def latent_scale(self) -> float | None:
        """The softmax scale of latent attention, which a stretched context changes."""
        if not self.latent:
            return None
        size = self.hf_config.qk_nope_head_dim + self.hf_config.qk_rope_head_dim
        rope = self.hf_config.rope_parameters
        scale, factor = float(size) ** -0.5, rope.get("mscale_all_dim", 0)
        if rope["rope_type"] == "default" or not factor or rope["factor"] <= 1:
            return scale
        return scale * float(0.1 * factor * math.log(rope["factor"]) + 1.0) ** 2

    @property
    def recurrent(self) -> bool:
        """Whether layers are gated delta nets, attention gated and norms around zero."""
        return self.weights.family.name in RECURRENT

    @property
    def sandwich(self) -> bool:
        """Whether attention and MLP are normalised behind too."""
        return self.weights.family.name in SANDWICH

    @property
    def wide_norms(self) -> bool:
        """Whether queries and keys are normalised over all of their heads at once."""
        return self.weights.family.name in WIDE_NORMS

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer of attention with sinks, how many keys it sees, None for all; else ()."""
        if self.weights.family.name not in BANDED:
            return ()
        window = self.hf_config.sliding_window
        kinds = self.hf_config.layer_types
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    @property
    def clamped(self) -> bool:
        """Whether MLPs clamp their gates, and add one to what is gated."""
        return self.weights.family.name in CLAMPED

    @property
    def rotates_pairs(self) -> bool:
        """Whether the rotary embedding turns neighbours; latent attention parts them itself."""
        return self.weights.family.name in SANDWICH

    @property
    def predicts(self) -> bool:
        """Whether a layer of multi-token prediction is part of the model, to be trained."""
        return "predicts" in self.shape.flags

    @property
    def value_head(self) -> bool:
        return "value_head" in self.shape.flags

    @property
    def value_bias(self) -> bool:
        return "value_bias" in self.shape.flags

    @property
    def tied(self) -> bool:
        """Whether logits are made with the embedding's weight."""
        return "tied" in self.shape.flags and not self.value_head

    def padded_vocab(self, config: MegatronConfig) -> int:
        """Rows of the vocabulary that every layout of `config.tensor` ranks holds."""
        return padded_rows(self.shape.vocab, multiple=config.vocab_multiple, size=config.tensor)


def read_model(directory: Path, head: Head = "policy", *, predicts: bool = False) -> ModelSource:
    """Read `config.json` below `directory`; a classifier of one label has values anyway.

    `predicts`: with its layer of multi-token prediction. Raises UnknownArchitectureError,
    InvalidCheckpointError, MissingFileError or UnsupportedFeatureError.
    """
    config = json.loads((directory / "config.json").read_bytes())
    family = family_of(config)
    check_family(family.name)
    whole_config = read_config(directory)
    hf_config = whole_config.get_text_config()
    check_model(family.name, hf_config, predicts=predicts)
    architecture = config["architectures"][0]
    is_classifier = is_classifier_of(architecture, hf_config, predicts=predicts)
    shapes = tensor_shapes(directory)
    shape = read_shape(
        family,
        config,
        stacked_experts=are_stacked(shapes),
        straight_experts=are_straight(shapes),
        value_head=is_classifier or head != "policy",
        value_bias=head == "value" or (head == "policy" and architecture.endswith(CRITIC)),
        predicts=predicts,
    )
    weights, images = WeightMap(family, shape), None
    if family.name in SEEING:
        # The tower is that of transformers: its tensors are as the checkpoint has them.
        weights, images = weights.plain(Stage.VISION, TOWER), ImageRules.from_directory(directory)
    return ModelSource(
        directory=directory,
        hf_config=hf_config,
        weights=weights,
        whole_config=whole_config,
        images=images,
    )


def transformer_config(
    source: ModelSource,
    config: MegatronConfig,
    *,
    operations: Mapping[str, Any],
) -> TransformerConfig:
    """Megatron's configuration of `source` under the layout `config`.

    operations: what follows from those that were chosen, which wins. Raises UnsupportedModelError
    or LayoutError naming what does not fit.
    """
    shape, hf_config = source.shape, source.hf_config
    every_bias = {"output_bias", "mlp_bias"} <= shape.flags
    check_shape(source.weights.family.name, shape, config)
    names = {binding.megatron for binding in source.weights.bindings()}
    kind = MLATransformerConfig if source.latent else TransformerConfig
    options: dict[str, Any] = {
        **_numerics(config),
        **_parallelism(config),
        **_experts(source, config),
        **_latent(hf_config, source.latent),
        **_choosing(hf_config, source.chooses),
        **_recurrent(source),
        **_gate(source),
        **operations,
    }
    return kind(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        rotary_interleaved=source.rotates_pairs,
        softmax_scale=source.latent_scale,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        add_bias_linear=every_bias,
        add_qkv_bias="attention_bias" in shape.flags,
        qk_layernorm=any(name.endswith("self_attention.q_layernorm.weight") for name in names),
        mrope_section=[shape.head_dim // 2, 0, 0],  # see rotary.py
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,  # every weight is loaded
        **options,
    )


def _gate(source: ModelSource) -> dict[str, Any]:
    if not source.clamped:
        return {"activation_func": torch.nn.functional.silu}
    return {
        "activation_func": partial(_steep_silu, alpha=source.hf_config.swiglu_alpha),
        "activation_func_clamp_value": source.hf_config.swiglu_limit,
        "glu_linear_offset": 1.0,
    }


def _steep_silu(gate: torch.Tensor, *, alpha: float) -> torch.Tensor:
    """Megatron's quick_gelu is this with an alpha of 1.702, and compiled: rounded otherwise, until
    calls of so many kinds were seen that it is compiled no more."""
    return gate * torch.sigmoid(gate * alpha)


def _latent(hf_config: Any, latent: bool) -> dict[str, Any]:
    if not latent:
        return {}
    return {
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
        "rope_type": "rope",  # whose module takes nothing to build; LatentRotary replaces it
    }


def _choosing(hf_config: Any, chooses: bool) -> dict[str, Any]:
    if not chooses:
        return {}
    return {
        "dsa_indexer_n_heads": hf_config.index_n_heads,
        "dsa_indexer_head_dim": hf_config.index_head_dim,
        "dsa_indexer_topk": hf_config.index_topk,
    }


def _recurrent(source: ModelSource) -> dict[str, Any]:
    if not source.recurrent:
        return {}
    shape = source.shape
    return {
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(i in shape.linear_layers) for i in range(shape.layers)],
        "linear_conv_kernel_dim": shape.sizes["linear_kernel"],
        "linear_key_head_dim": shape.sizes["linear_key_dim"],
        "linear_value_head_dim": shape.sizes["linear_value_dim"],
        "linear_num_key_heads": shape.sizes["linear_key_heads"],
        "linear_num_value_heads": shape.sizes["linear_value_heads"],
    }


def _numerics(config: MegatronConfig) -> dict[str, Any]:
    dtype = DTYPES[config.dtype]
    recompute: dict[str, Any] = {}
    if config.recompute == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": config.recompute_layers,
        }
    elif config.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "calculate_per_token_loss": True,  # sums; the backend divides in step()
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        **recompute,
    }


def _parallelism(config: MegatronConfig) -> dict[str, Any]:
    interleaved = config.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": config.tensor,
        "sequence_parallel": config.sequence_parallel,
        "pipeline_model_parallel_size": config.pipeline,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline if interleaved else None,
        "num_layers_in_first_pipeline_stage": config.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": config.last_stage_layers or None,
        "context_parallel_size": config.context,
        "expert_model_parallel_size": config.expert,
        "expert_tensor_parallel_size": config.expert_tensor_size,
        "variable_seq_lengths": config.pipeline > 1,  # packs differ in length
        # Interleaved, the batched exchange of Megatron crosses activations and gradients between
        # two stages that are each other's predecessor and successor, without any error.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # gloo still reads an output that was sent off when Megatron frees it: wrong numbers.
        "deallocate_pipeline_outputs": not (interleaved and on_cpu()),
    }


def _experts(source: ModelSource, config: MegatronConfig) -> dict[str, Any]:
    shape, hf_config = source.shape, source.hf_config
    if not shape.experts:
        return {"moe_token_dispatcher_type": "alltoall"}  # dense models need it to vary lengths
    check_chosen(hf_config)
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.moe_ffn,
        "moe_layer_freq": [int(layer in shape.sparse_layers) for layer in range(shape.layers)],
        "moe_router_topk": hf_config.num_experts_per_tok,
        **(_biased_router(source) if source.biased else _softmax_router(source)),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_enable_routing_replay": config.routing_replay != "off",
    }


def _softmax_router(source: ModelSource) -> dict[str, Any]:
    # Softmax over the chosen experts equals softmax over all, normalised over the chosen.
    options: dict[str, Any] = {
        "moe_router_pre_softmax": not getattr(source.hf_config, "norm_topk_prob", True)
    }
    if shared := source.shape.sizes.get("shared_ffn"):
        options |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}
    return options


def _biased_router(source: ModelSource) -> dict[str, Any]:
    """Sigmoids with a bias that is a buffer and stays as it is (arXiv 2412.19437, 2.1.2)."""
    hf_config = source.hf_config
    groups, chosen = expert_groups(hf_config)
    shared = source.shape.sizes.get("shared_experts", 0) * source.shape.moe_ffn
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": groups if chosen < groups else None,
        "moe_router_group_topk": chosen if chosen < groups else None,
        "moe_router_topk_scaling_factor": getattr(hf_config, "routed_scaling_factor", None),
        "moe_shared_expert_intermediate_size": shared or None,
    }


def _only_local(source: ModelSource) -> str:
    """What of a model's layers TransformerEngine has not, or not right; empty where it has all."""
    if source.recurrent:
        return "gated delta nets"
    if source.chooses:
        return "those with indexers"
    return "those with sinks and biases of experts" if source.windows else ""


def uses_transformer_engine(config: MegatronConfig, source: ModelSource | None = None) -> bool:
    """Says whether layers are built on TransformerEngine; LayoutError where it is missing."""
    if source is not None and (what := _only_local(source)):
        if config.layer_spec == "transformer_engine":
            raise LayoutError(f"layer_spec transformer_engine: {what} are local layers")
        return False
    if config.layer_spec == "local":
        return False
    available = upstream.has_transformer_engine()
    if config.layer_spec == "transformer_engine" and not available:
        raise LayoutError("layer_spec transformer_engine: TransformerEngine is not installed")
    return available
