"""Qwen3-MoE: experts without a shared one, some layers may be dense."""

from __future__ import annotations

from sluice.weights.rules.common import ATTENTION, ENDS, EXPERTS, GATED_MLP, NORMS, QK_NORM
from sluice.weights.rules.rule import Family

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeForTokenClassification",
        "Qwen3MoeForSequenceClassification",
    ),
    rules=(*ENDS, *NORMS, *ATTENTION, *QK_NORM, *GATED_MLP, *EXPERTS),
    flags={"attention_bias": "attention_bias", "output_bias": "attention_bias"},
)
