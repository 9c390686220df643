"""Which models this backend trains, and over which ranks. Imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Any

from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.mesh import LayoutError
from sluice.weights.classifier import CRITIC, REWARD_MODEL
from sluice.weights.rules.shape import ModelShape

# whose layers this backend builds
NEXT = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}  # of text alone
RECURRENT = {*NEXT, "qwen3_5_vl", "qwen3_5_vl_moe"}  # gated delta nets in most of their layers
PLAIN = {
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "llama",
    "mimo",
    "minimax_m2",
    "qwen2",
    "qwen3",
    "qwen3_moe",
}
# by the towers of `sluice.vision`
SEEING = {"qwen2_5_vl", "qwen3_5_vl", "qwen3_5_vl_moe", "qwen3_vl", "qwen3_vl_moe"}
FAMILIES = {*PLAIN, *RECURRENT, *SEEING}
LATENT = {"deepseek_v3", "glm_moe_dsa"}  # whose attention is over latents
CHOOSING = {"glm_moe_dsa"}  # keys that are attended to, by indexers
# whose routers are sigmoids with a bias
BIASED = {"deepseek_v3", "glm4_moe", "glm_moe_dsa", "minimax_m2"}
PREDICTING = {"deepseek_v3", "glm4_moe", "glm_moe_dsa", "mimo", *NEXT}  # have a layer that does
NORMALISING = {"qwen3_vl_moe"}  # routers that transformers knows one kind of
SANDWICH = {"glm4"}  # norms before and behind attention and MLP, rotated by pairs
WIDE_NORMS = {"minimax_m2"}  # over all heads of queries, and of keys
BANDED = {"gpt_oss"}  # attention has sinks, and windows in some layers
PARTIAL = {"glm4", "glm4_moe", "minimax_m2", *RECURRENT, *LATENT}  # may rotate a part of each head
CLAMPED = {"gpt_oss"}  # MLPs whose gates are clamped


class UnsupportedFeatureError(ValueError):
    """The model asks for something that this backend does not compute."""


def check_family(family: str) -> None:
    """Raises UnsupportedFeatureError for one that has rules of weights, and no layers here."""
    if family not in FAMILIES:
        raise UnsupportedFeatureError(f"models of family {family!r} are converted, not trained")


def check_model(family: str, hf_config: Any, *, predicts: bool) -> None:
    """Raises UnsupportedFeatureError for what this backend computes otherwise, or not.

    hf_config: transformers' configuration of the text. predicts: whether its layer of multi-token
    prediction is to be trained.
    """
    if hf_config.hidden_act != "silu":
        raise UnsupportedFeatureError(f"hidden_act {hf_config.hidden_act!r} is not silu")
    if getattr(hf_config, "use_sliding_window", False):
        raise UnsupportedFeatureError("sliding-window attention is not supported")
    if predicts and family not in PREDICTING:
        raise UnsupportedFeatureError(
            f"mtp_loss_scaling_factor: of models of family {family!r} no layer of multi-token "
            f"prediction is trained, but of {', '.join(sorted(PREDICTING))}"
        )
    if family in LATENT and not getattr(hf_config, "rope_interleave", True):
        raise UnsupportedFeatureError("latent attention rotates pairs: rope_interleave is false")
    if family in BIASED:
        _check_biased(hf_config)
    if family in BANDED:
        _check_banded(hf_config)
    rotated = hf_config.rope_parameters.get("partial_rotary_factor", 1.0)
    if rotated != 1.0 and family not in PARTIAL:
        raise UnsupportedFeatureError(
            f"partial_rotary_factor is {rotated}, and transformers rotates whole heads in models "
            f"of {family!r}"
        )
    if family in NORMALISING and not getattr(hf_config, "norm_topk_prob", True):
        raise UnsupportedFeatureError(
            f"norm_topk_prob is false, and transformers normalises in models of {family!r}"
        )


def is_classifier_of(architecture: str, hf_config: Any, *, predicts: bool) -> bool:
    """Whether a model ends in values. Raises UnsupportedFeatureError for several a token."""
    is_classifier = architecture.endswith((CRITIC, REWARD_MODEL))
    if is_classifier and hf_config.num_labels != 1:
        raise UnsupportedFeatureError(f"a critic has 1 label, not {hf_config.num_labels}")
    if is_classifier and predicts:
        raise UnsupportedFeatureError("mtp_loss_scaling_factor: a critic predicts no tokens")
    return is_classifier


def check_chosen(hf_config: Any) -> None:
    """Raises UnsupportedFeatureError for routers, of a mixture, whose weights have no gradient."""
    if hf_config.num_experts_per_tok == 1 and getattr(hf_config, "norm_topk_prob", True):
        # One weight, normalised, is 1. Megatron has a sigmoid as it is, and refuses a softmax.
        raise UnsupportedFeatureError(
            "routers that normalise choose two experts or more: num_experts_per_tok is 1"
        )


def check_shape(family: str, shape: ModelShape, config: MegatronConfig) -> None:
    """Raises UnsupportedFeatureError, and LayoutError for ranks that a model cannot be cut over."""
    attention, mlp = (name in shape.flags for name in ("output_bias", "mlp_bias"))
    if attention != mlp:
        raise UnsupportedFeatureError(
            f"attention_bias is {str(attention).lower()} in config.json, and MLPs have "
            f"{'' if mlp else 'no '}biases: Megatron has them in all linear layers or in none; "
            "train it with backend: fsdp"
        )
    _check_layout(shape, config)
    if family in LATENT and config.tensor > 1 and not config.sequence_parallel:
        raise LayoutError("latent attention with tensor > 1 needs sequence_parallel")
    if family in RECURRENT:
        _check_recurrent(shape, config)
    if family in CHOOSING:
        _check_choosing(shape, config)
    if shape.experts and "mlp_bias" in shape.flags and config.expert_tensor_size > 1:
        raise LayoutError(
            "experts have biases, which tensor ranks cannot share: tensor > 1 needs expert > 1 and "
            "expert_tensor 1"
        )
    if family in WIDE_NORMS and shape.kv_heads % config.tensor:
        raise LayoutError(
            f"norms over all heads: {shape.kv_heads} key heads do not divide over "
            f"{config.tensor} tensor ranks"
        )


def _check_banded(hf_config: Any) -> None:
    kinds, window = set(hf_config.layer_types), hf_config.sliding_window
    if other := sorted(kinds - {"sliding_attention", "full_attention"}):
        raise UnsupportedFeatureError(
            f"layer_types has {other[0]!r}, which is neither sliding_attention nor full_attention"
        )
    if "sliding_attention" in kinds and (window is None or window < 1):
        raise UnsupportedFeatureError(
            f"sliding_window is {window}, and layer_types has sliding_attention"
        )


def _check_biased(hf_config: Any) -> None:
    """Refuse what Megatron's routers of sigmoids compute otherwise."""
    if not getattr(hf_config, "norm_topk_prob", True):
        raise UnsupportedFeatureError("sigmoid routers normalise: norm_topk_prob is false")
    groups, chosen = expert_groups(hf_config)
    if chosen < groups and hf_config.num_experts_per_tok // chosen != 2:
        raise UnsupportedFeatureError(
            f"groups of experts are chosen by their two best: {hf_config.num_experts_per_tok} "
            f"experts of {chosen} groups are not two a group"
        )


def expert_groups(hf_config: Any) -> tuple[int, int]:
    """How many groups the experts are in, and of how many of those some are chosen."""
    return getattr(hf_config, "n_group", 1), getattr(hf_config, "topk_group", 1)


def _check_choosing(shape: ModelShape, config: MegatronConfig) -> None:
    """What an indexer chooses is shared within a chunk of layers."""
    for first in _chunk_starts(shape, config):
        if first not in shape.indexed_layers:
            raise LayoutError(
                f"layer {first} shares the keys that a layer before it chooses, and a pipeline "
                f"chunk begins with it: those with an indexer are {sorted(shape.indexed_layers)}; "
                "see first_stage_layers and last_stage_layers"
            )


def _chunk_starts(shape: ModelShape, config: MegatronConfig) -> list[int]:
    """The first layer of every pipeline chunk."""
    chunks = [count // config.virtual_pipeline for count in stage_layers(shape.layers, config)]
    sizes = chunks * config.virtual_pipeline
    return [sum(sizes[:index]) for index in range(len(sizes))]


def stage_layers(layers: int, config: MegatronConfig) -> list[int]:
    """How many layers each pipeline stage has, of a layout in which they divide."""
    first = [config.first_stage_layers] if config.first_stage_layers else []
    last = [config.last_stage_layers] if config.last_stage_layers else []
    others = config.pipeline - len(first) - len(last)
    each = (layers - sum(first + last)) // others if others else 0
    return [*first, *[each] * others, *last]


def _check_recurrent(shape: ModelShape, config: MegatronConfig) -> None:
    if config.context > 1:
        raise LayoutError("gated delta nets know no context parallelism: context must be 1")
    keys, values = shape.sizes["linear_key_heads"], shape.sizes["linear_value_heads"]
    if not keys or values % keys:
        raise UnsupportedFeatureError(f"{values} value heads are no multiple of {keys} key heads")
    if keys % config.tensor:
        raise LayoutError(f"{keys} key heads do not divide over {config.tensor} tensor ranks")


def _check_layout(shape: ModelShape, config: MegatronConfig) -> None:
    named = [count for count in (config.first_stage_layers, config.last_stage_layers) if count]
    stages, rest = config.pipeline - len(named), shape.layers - sum(named)
    fits = rest == 0 if stages == 0 else rest > 0 and rest % (stages * config.virtual_pipeline) == 0
    if not fits or any(count % config.virtual_pipeline for count in named):
        apart = f", {' and '.join(map(str, named))} of them in stages of their own" if named else ""
        chunks = config.pipeline * config.virtual_pipeline
        raise LayoutError(
            f"{shape.layers} layers do not divide into {chunks} pipeline chunks{apart}"
        )
    if config.recompute == "full":
        for count in stage_layers(shape.layers, config):
            if count // config.virtual_pipeline % config.recompute_layers:
                raise LayoutError(
                    f"recompute_layers {config.recompute_layers} do not divide the "
                    f"{count // config.virtual_pipeline} layers of a pipeline chunk"
                )
    if config.expert > 1 and not shape.experts:
        raise LayoutError(f"expert {config.expert} for a model without experts")
    if shape.experts % config.expert:
        raise LayoutError(f"{shape.experts} experts do not divide over {config.expert} ranks")
    if shape.experts and config.tensor > 1 and not config.sequence_parallel:
        raise LayoutError("experts with tensor > 1 need sequence_parallel")
    if config.routing_replay != "off" and not shape.experts:
        raise LayoutError("routing_replay has no effect on a model without experts")
