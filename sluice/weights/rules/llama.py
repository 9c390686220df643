"""Llama 2 and 3, and models that keep its tensor names (Mistral without a sliding window)."""

from __future__ import annotations

from sluice.weights.rules.common import ATTENTION, ENDS, GATED_MLP, NORMS
from sluice.weights.rules.rule import Family

LLAMA = Family(
    name="llama",
    architectures=(
        "LlamaForCausalLM",
        "LlamaForTokenClassification",
        "LlamaForSequenceClassification",
    ),
    rules=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP),
    flags={
        "attention_bias": "attention_bias",
        "output_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
)
