"""MiniMax-M2: norms over all heads of queries and of keys, routers with a bias, no dense layer."""

from __future__ import annotations

from dataclasses import replace

from sluice.weights.rules.common import (
    ATTENTION,
    ENDS,
    NORMS,
    ROUTER,
    ROUTER_BIAS,
    expert_layers,
)
from sluice.weights.rules.rule import Family, SourceTensor, Stage, WeightRule

_LAYER = "model.layers.{layer}."
_EXPERT = f"{_LAYER}block_sparse_moe.experts.{{expert}}."
_WIDE_NORM = tuple(  # every rank has all of one, and a part of the heads
    WeightRule(
        megatron=f"decoder.layers.{{layer}}.self_attention.{letter}_norm.weight",
        sources=(SourceTensor(f"{_LAYER}self_attn.{letter}_norm.weight", (width,)),),
        stage=Stage.LAYER,
    )
    for letter, width in (("q", "q"), ("k", "kv"))
)


def _named(rule: WeightRule, name: str) -> WeightRule:
    (source,) = rule.sources
    return replace(rule, sources=(replace(source, name=f"{_LAYER}block_sparse_moe.{name}"),))


_EXPERTS = (
    _named(ROUTER, "gate.weight"),
    *(_named(rule, "e_score_correction_bias") for rule in ROUTER_BIAS),
    *expert_layers(
        (
            SourceTensor(f"{_EXPERT}w1.weight", ("moe_ffn", "hidden")),
            SourceTensor(f"{_EXPERT}w3.weight", ("moe_ffn", "hidden")),
        ),
        SourceTensor(f"{_EXPERT}w2.weight", ("hidden", "moe_ffn")),
    ),
)

MINIMAX_M2 = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    rules=(*ENDS, *NORMS, *ATTENTION, *_WIDE_NORM, *_EXPERTS),
    full_precision=("*.e_score_correction_bias",),
    expert_width="intermediate_size",
)
