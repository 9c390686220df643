"""MiMo-7B: the layers of Qwen2, and one of multi-token prediction, named apart."""

from __future__ import annotations

from sluice.weights.rules.common import ATTENTION, ENDS, GATED_MLP, NORMS, predicted
from sluice.weights.rules.rule import Family

_LAYER = (*NORMS, *ATTENTION, *GATED_MLP)
_NEXT = "model.mtp_layers.0."

MIMO = Family(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    rules=(
        *ENDS,
        *_LAYER,
        *predicted(
            _LAYER,
            _NEXT,
            embedding=f"{_NEXT}token_layernorm.weight",
            hidden=f"{_NEXT}hidden_layernorm.weight",
            join=f"{_NEXT}input_proj.weight",
            last=f"{_NEXT}final_layernorm.weight",
            hidden_first=True,
        ),
    ),
    flags={"attention_bias": True},
    foreign=("model.mtp_layers.*",),
)
