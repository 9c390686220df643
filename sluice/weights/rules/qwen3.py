"""Qwen3, dense: a norm on every query and key head."""

from __future__ import annotations

from sluice.weights.rules.common import ATTENTION, ENDS, GATED_MLP, NORMS, QK_NORM
from sluice.weights.rules.rule import Family

QWEN3 = Family(
    name="qwen3",
    architectures=(
        "Qwen3ForCausalLM",
        "Qwen3ForTokenClassification",
        "Qwen3ForSequenceClassification",
    ),
    rules=(*ENDS, *NORMS, *ATTENTION, *QK_NORM, *GATED_MLP),
    defaults={"head_dim": 128},
    flags={"attention_bias": "attention_bias", "output_bias": "attention_bias"},
)
