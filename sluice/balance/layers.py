"""What the layers of a model are, and how many weights a token meets in them, by its config.json.

Published configurations tell of layers in as many ways as there are families; transformers saves
most as `layer_types`. A recurrent layer costs its matrices and its state, whatever comes before a
token: two operations, forward, for each weight and for what is multiplied into the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

# Of a layer: attention to all keys before, or to those within a window; a mixer that attends to
# none; attention and a mixer beside each other; or feed-forward alone.
Kind = Literal["full", "window", "mixer", "both", "none"]
Config = Mapping[str, Any]

_KINDS: dict[str, Kind] = {
    "sliding_attention": "window",
    **dict.fromkeys(("linear_attention", "mamba", "conv"), "mixer"),
    **dict.fromkeys(("moe", "mlp"), "none"),
}
_PATTERN: dict[str, Kind] = {"M": "mixer", "*": "full", "-": "none", "E": "none"}  # Nemotron-H
MAMBA_MADDS, DELTA_MADDS = 3, 4  # for each number of a state: see `_mixer`


def layer_kinds(config: Config) -> list[Kind]:
    """Return what each layer is, by whichever setting tells."""
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        return [_PATTERN.get(kind, "full") for kind in pattern]
    if named := config.get("layer_types") or config.get("layers_block_type"):
        kinds = [_KINDS.get(kind, "full") for kind in named]
    else:
        layers = range(config["num_hidden_layers"])
        kinds = _mixed(config, layers) or _windowed(config, layers) or ["full" for _ in layers]
    if not config.get("sliding_window"):
        kinds = ["full" if kind == "window" else kind for kind in kinds]
    return ["both"] * len(kinds) if config.get("mamba_d_ssm") else kinds  # Falcon-H1


def _mixed(config: Config, layers: Sequence[int]) -> list[Kind]:
    """Where some layers attend and others are recurrent; [] where nothing says so."""
    attending: set[int] | None = None
    if period := config.get("attn_layer_period"):  # Jamba
        attending = {i for i in layers if i % period == config.get("attn_layer_offset", 0)}
    elif "attn_layer_indices" in config:  # Bamba
        attending = set(config["attn_layer_indices"] or ())
    elif "full_attn_idxs" in config:  # LFM2
        attending = set(config["full_attn_idxs"] or ())
    elif period := config.get("full_attention_interval"):  # Qwen3-Next
        attending = {i for i in layers if (i + 1) % period == 0}
    elif told := config.get("linear_attn_config"):  # Kimi Linear, from one on
        attending = {i - 1 for i in told["full_attn_layers"]}
    return [] if attending is None else ["full" if i in attending else "mixer" for i in layers]


def _windowed(config: Config, layers: Sequence[int]) -> list[Kind]:
    """Where keys are within a window in some layers; [] where nothing says so."""
    if not config.get("sliding_window"):
        return []
    pattern = config.get("sliding_window_pattern") or config.get("global_attn_every_n_layers")
    if told := config.get("hybrid_layer_pattern"):  # MiMo-V2
        wide = {i for i in layers if not told[i]}
    elif isinstance(pattern, str):  # EXAONE 4
        wide = {i for i in layers if pattern[i % len(pattern)] != "L"}
    elif pattern or config.get("model_type") == "gemma2":
        wide = {i for i in layers if (i + 1) % (pattern or 2) == 0}
    elif "use_sliding_window" in config:  # Qwen2
        from_layer = config.get("max_window_layers") or 0
        wide = {i for i in layers if not config["use_sliding_window"] or i < from_layer}
    else:  # Mistral, Phi-3, StarCoder2
        wide = set()
    return ["full" if i in wide else "window" for i in layers]


def other_weights(config: Config, kinds: Sequence[Kind]) -> int:
    """Count what a token meets in all layers beside attention and feed-forward."""
    mixers = sum(kind in ("mixer", "both") for kind in kinds)
    gates = sum(kind not in ("mixer", "none") for kind in kinds) * _attention_gate(config)
    sparse = sum(_is_sparse(config, index, kinds) for index in range(len(kinds)))
    gate = config["hidden_size"] if config.get("shared_expert_intermediate_size") else 0
    router = config["hidden_size"] * (_experts(config) or 0) + gate
    return (mixers * _mixer(config) if mixers else 0) + gates + sparse * router


def _attention_gate(config: Config) -> int:
    """Weights of what gates the heads of a layer of attention, in families that have it."""
    if not config.get("model_type", "").startswith(("qwen3_next", "qwen3_5", "afmoe")):
        return 0
    return int(config["hidden_size"] * config["num_attention_heads"] * _head_size(config))


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _mixer(config: Config) -> int:
    """Weights that a token meets in one layer, and multiplications into its state.

    Of Mamba a state decays, takes a token in and is read: three for each of its numbers. A delta
    rule reads what is there of a key first, and takes in the difference: four.
    """
    hidden = config["hidden_size"]
    if told := config.get("linear_attn_config"):  # Kimi Linear as published
        return _kimi(hidden, told["num_heads"], told["head_dim"], told["short_conv_kernel_size"])
    if heads := config.get("linear_num_heads"):  # and as transformers has it
        return _kimi(hidden, heads, config["linear_head_dim"], config["linear_conv_kernel_dim"])
    if heads := config.get("linear_num_value_heads"):  # Qwen3-Next
        key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
        keys, values = config["linear_num_key_heads"] * key_size, heads * value_size
        matrices = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
        convolution = config["linear_conv_kernel_dim"] * (2 * keys + values)
        return int(matrices + convolution + DELTA_MADDS * heads * key_size * value_size)
    if kernel := config.get("conv_L_cache"):  # LFM2
        return int(4 * hidden * hidden + kernel * hidden)
    if config.get("ssm_state_size") or config.get("mamba_d_state"):
        return _mamba(config)
    heads = config["num_attention_heads"]  # of one that is not known, as attention has them
    kv_heads = config.get("num_key_value_heads") or heads
    return int(2 * hidden * _head_size(config) * (heads + kv_heads))


def _kimi(hidden: int, heads: int, size: int, kernel: int) -> int:
    inner = heads * size
    gates = 2 * (hidden * size + size * inner) + hidden * heads
    return 4 * hidden * inner + gates + 3 * kernel * inner + DELTA_MADDS * heads * size * size


def _mamba(config: Config) -> int:
    hidden: int = config["hidden_size"]
    state: int = config.get("ssm_state_size") or config["mamba_d_state"]
    kernel = config.get("conv_kernel") or config.get("mamba_d_conv") or 4
    heads = config.get("mamba_num_heads") or config.get("mamba_n_heads")
    inner: int = (config.get("mamba_expand") or config.get("expand") or 2) * hidden
    if heads:  # Mamba-2
        size = config.get("mamba_head_dim") or config.get("mamba_d_head")
        inner = heads * size if isinstance(size, int) else config.get("mamba_d_ssm") or inner
        groups = config.get("mamba_n_groups") or config.get("n_groups") or 1
        into = hidden * (2 * inner + 2 * groups * state + heads)
        convolved = inner + 2 * groups * state
    else:
        rank = config.get("mamba_dt_rank")
        rank = rank if isinstance(rank, int) else math.ceil(hidden / 16)
        into = 2 * hidden * inner + inner * (rank + 2 * state) + rank * inner
        convolved = inner
    return int(into + inner * hidden + kernel * convolved + MAMBA_MADDS * inner * state)


def feed_forward_size(config: Config, kinds: Sequence[Kind]) -> float:
    """Return the mean over layers of how wide what a token visits is.

    Raises KeyError for a size that is absent.
    """
    sizes = [_layer_size(config, index, kinds) for index in range(len(kinds))]
    return sum(sizes) / len(sizes) if any(size != sizes[0] for size in sizes) else sizes[0]


def _layer_size(config: Config, index: int, kinds: Sequence[Kind]) -> float:
    if _is_sparse(config, index, kinds):
        return _sparse_size(config)
    if _has_own_feed_forward(config) and kinds[index] != "none":
        return 0  # Nemotron-H has layers of it by themselves
    size = int(config.get("shared_intermediate_size") or config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim"):
        return size
    size = int(int(2 * size / 3) * (config.get("block_ffn_dim_multiplier") or 1))  # LFM2
    multiple = int(config.get("block_multiple_of") or 256)
    return -(-size // multiple) * multiple


def _has_own_feed_forward(config: Config) -> bool:
    named = config.get("hybrid_override_pattern") or config.get("layers_block_type") or ()
    return any(_PATTERN.get(kind, _KINDS.get(kind)) == "none" for kind in named)


def _sparse_size(config: Config) -> float:
    size = of_a_layer(config.get("moe_intermediate_size")) or config["intermediate_size"]
    routed = of_a_layer(config["num_experts_per_tok"]) * size
    if latent := config.get("moe_latent_size"):  # Nemotron 3: experts of what is smaller
        routed = routed * latent / config["hidden_size"] + latent
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if config.get(name) is not None:
            return float(routed + config[name])
    own = config.get("moe_shared_expert_intermediate_size") or size
    return float(routed + (config.get("n_shared_experts") or 0) * own)


def _is_sparse(config: Config, index: int, kinds: Sequence[Kind]) -> bool:
    """Whether a layer has experts, by whichever setting tells."""
    if not of_a_layer(config.get("num_experts_per_tok")) or _experts(config) in (0, 1):
        return False
    if named := config.get("mlp_layer_types"):
        return bool(named[index] == "sparse")
    if _has_own_feed_forward(config):
        named = config.get("hybrid_override_pattern") or config["layers_block_type"]
        return bool(named[index] in ("E", "moe"))
    if period := config.get("expert_layer_period"):  # Jamba
        return bool(index % period == config.get("expert_layer_offset", 0))
    if index in (config.get("mlp_only_layers") or ()):
        return False
    dense = config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0
    step = config.get("decoder_sparse_step") or 1
    return bool(index >= dense and (index + 1) % step == 0)


def _experts(config: Config) -> int | None:
    """Of a layer; None where nothing tells."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    found = (of_a_layer(config.get(name)) for name in names)
    return next((int(count) for count in found if count is not None), None)


def of_a_layer(value: Any) -> Any:
    """Of what Hunyuan-A13B says of every layer, that of the first."""
    return value[0] if isinstance(value, list) and value else value
