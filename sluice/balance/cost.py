"""Floating-point operations of a transformer over one sequence: linear plus attention terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes that decide how expensive a token and a pair of tokens are."""

    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    feed_forward_size: int  # of one dense layer, or of all experts one token visits
    vocabulary_size: int
    gated: bool = True  # SwiGLU has three matrices, a plain MLP two
    window: int | None = None  # sliding-window layers see at most this many tokens
    windowed_layer_count: int = 0
    linear_attention_layer_count: int = 0  # no quadratic term

    @property
    def flops_per_token(self) -> float:
        """Matrix products of one token, forward: two per weight."""
        attention = self.hidden_size * self.head_size * 2 * (self.head_count + self.kv_head_count)
        feed_forward = self.hidden_size * self.feed_forward_size * (3 if self.gated else 2)
        layers = self.layer_count * (attention + feed_forward)
        return 2.0 * (layers + self.hidden_size * self.vocabulary_size)

    @property
    def flops_per_pair(self) -> float:
        """Scores and weighted values of one query and key, forward, in one layer."""
        return 4.0 * self.head_count * self.head_size


def forward_flops(shape: TransformerShape, length: int, cached: int = 0) -> float:
    """Counts FLOPs of the tokens `cached`..`length` of a causal sequence, the others cached.

    An estimate to balance by: a training step costs three times as much, on every row alike.
    Follows the count of Narayanan et al. 2021 (Megatron-LM), causal attention at its half.
    """
    full = shape.layer_count - shape.windowed_layer_count - shape.linear_attention_layer_count
    pairs = full * (_causal_pairs(length) - _causal_pairs(cached))
    if shape.window is not None:
        windowed = _causal_pairs(length, shape.window) - _causal_pairs(cached, shape.window)
        pairs += shape.windowed_layer_count * windowed
    return (length - cached) * shape.flops_per_token + pairs * shape.flops_per_pair


def row_costs(
    shape: TransformerShape, lengths: Sequence[int], prompt_lengths: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Returns (`costs`, `prompt_costs`) of PlanRows: whole rows, and what siblings save."""
    return (
        [forward_flops(shape, length) for length in lengths],
        [forward_flops(shape, prompt) for prompt in prompt_lengths],
    )


def shape_from_config(config: Mapping[str, Any]) -> TransformerShape:
    """Reads the shape from a HF `config.json`, also of a vision-language model's text part.

    Raises KeyError naming a size that is absent.
    """
    config = config.get("text_config", config)
    layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    head_count = config["num_attention_heads"]
    window = config.get("sliding_window") or None
    return TransformerShape(
        hidden_size=config["hidden_size"],
        layer_count=config["num_hidden_layers"],
        head_count=head_count,
        kv_head_count=config.get("num_key_value_heads") or head_count,
        head_size=config.get("head_dim") or config["hidden_size"] // head_count,
        feed_forward_size=_feed_forward_size(config),
        vocabulary_size=config["vocab_size"],
        gated=config.get("hidden_act", "silu") in ("silu", "swish", "gelu_pytorch_tanh"),
        window=window,
        windowed_layer_count=layer_types.count("sliding_attention") if window else 0,
        linear_attention_layer_count=layer_types.count("linear_attention"),
    )


def _feed_forward_size(config: Mapping[str, Any]) -> int:
    experts_per_token = config.get("num_experts_per_tok")
    if not experts_per_token:
        return int(config["intermediate_size"])
    expert_size = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size")
    if shared is None:
        shared = (config.get("n_shared_experts") or 0) * expert_size
    return int(experts_per_token * expert_size + shared)


def _causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key not after it, and less than `window` before it."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
