"""gpt-oss: sinks of attention, biases everywhere, experts in one tensor, columns in turns."""

from __future__ import annotations

from sluice.weights.rules.common import ATTENTION, ENDS, NORMS, expert_layers
from sluice.weights.rules.rule import (
    Family,
    Layers,
    Pack,
    ShardAxis,
    SourceTensor,
    Stage,
    WeightRule,
)

_HF, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."
_EXPERT = f"{_MEGATRON}mlp.experts.local_experts.{{expert}}."
_GATED = ("moe_ffn", "moe_ffn")

_SINKS = WeightRule(
    megatron=f"{_MEGATRON}self_attention.core_attention.softmax_offset",
    sources=(SourceTensor(f"{_HF}self_attn.sinks", ("heads",)),),
    stage=Stage.LAYER,
    cut=ShardAxis.ROWS,
)
_ROUTER = tuple(
    WeightRule(
        megatron=f"{_MEGATRON}mlp.router.{part}",
        sources=(SourceTensor(f"{_HF}mlp.router.{part}", shape),),
        stage=Stage.LAYER,
        layers=Layers.SPARSE,
    )
    for part, shape in (("weight", ("experts", "hidden")), ("bias", ("experts",)))
)
_EXPERTS = (
    *expert_layers(
        (
            SourceTensor(
                f"{_HF}mlp.experts.gate_up_proj",
                ("2*moe_ffn", "hidden"),
                sections=_GATED,
                stacked=True,
                transposed=True,
                alternating=True,
            ),
        ),
        SourceTensor(
            f"{_HF}mlp.experts.down_proj", ("hidden", "moe_ffn"), stacked=True, transposed=True
        ),
    ),
    WeightRule(
        megatron=f"{_EXPERT}linear_fc1.bias",
        sources=(
            SourceTensor(
                f"{_HF}mlp.experts.gate_up_proj_bias",
                ("2*moe_ffn",),
                sections=_GATED,
                stacked=True,
                alternating=True,
            ),
        ),
        stage=Stage.LAYER,
        layers=Layers.SPARSE,
        pack=Pack.GATED,
        cut=ShardAxis.ROWS,
    ),
    WeightRule(
        megatron=f"{_EXPERT}linear_fc2.bias",
        sources=(SourceTensor(f"{_HF}mlp.experts.down_proj_bias", ("hidden",), stacked=True),),
        stage=Stage.LAYER,
        layers=Layers.SPARSE,
    ),
)

GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    rules=(*ENDS, *NORMS, *ATTENTION, _SINKS, *_ROUTER, *_EXPERTS),
    defaults={"attention_bias": True},
    flags={"attention_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": True},
    expert_width="intermediate_size",
)
