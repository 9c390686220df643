"""GLM-4 (0414), dense: norms before and after attention and MLP, gate and up in one HF tensor."""

from __future__ import annotations

from dataclasses import replace

from sluice.weights.rules.common import ATTENTION, ENDS, GATED_MLP, NORMS
from sluice.weights.rules.rule import Family, Pack, SourceTensor, Stage, WeightRule

_HF = "model.layers.{layer}."


def _fused(rule: WeightRule) -> WeightRule:
    """Gate and up as the two halves of `gate_up_proj`."""
    if rule.pack is not Pack.GATED:
        return rule
    kind, rest = rule.megatron.rpartition(".")[2], rule.sources[0].shape[1:]
    source = SourceTensor(
        f"{_HF}mlp.gate_up_proj.{kind}", ("2*ffn", *rest), sections=("ffn", "ffn")
    )
    return replace(rule, sources=(source,))


_AFTER = tuple(
    WeightRule(
        megatron=f"decoder.layers.{{layer}}.{name}.weight",
        sources=(SourceTensor(f"{_HF}{name}.weight", ("hidden",)),),
        stage=Stage.LAYER,
    )
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
)

GLM4 = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM", "Glm4ForSequenceClassification"),
    rules=(*ENDS, *NORMS, *_AFTER, *ATTENTION, *map(_fused, GATED_MLP)),
    defaults={"head_dim": 128},
    flags={"attention_bias": "attention_bias"},
)
