"""Qwen2 and Qwen2.5, dense: biases on query, key and value, none elsewhere."""

from __future__ import annotations

from sluice.weights.rules.common import ATTENTION, ENDS, GATED_MLP, NORMS
from sluice.weights.rules.rule import Family

QWEN2 = Family(
    name="qwen2",
    architectures=(
        "Qwen2ForCausalLM",
        "Qwen2ForTokenClassification",
        "Qwen2ForSequenceClassification",
    ),
    rules=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP),
    flags={"attention_bias": True},
)
