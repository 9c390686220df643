"""GLM-4.5, 4.6 and 4.7: plain attention, shared experts, routers with a bias.

The first layers are dense. A layer of multi-token prediction follows the last one.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.weights.rules.common import (
    ATTENTION,
    EXPERTS,
    GATED_MLP,
    NORMS,
    QK_NORM,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    followed_by_next,
)
from sluice.weights.rules.rule import Family

_QK_NORM = tuple(replace(rule, when=("qk_norm",)) for rule in QK_NORM)  # the large ones have them
_ATTENTION = (*NORMS, *ATTENTION, *_QK_NORM)
_LAYER = (*_ATTENTION, *GATED_MLP, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS)

GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    rules=followed_by_next(_LAYER),
    defaults={"n_shared_experts": 1},
    flags={"attention_bias": "attention_bias", "qk_norm": "use_qk_norm"},
    sizes={"shared_experts": "n_shared_experts"},
    foreign=("model.layers.{layers}.*",),
    full_precision=("*.e_score_correction_bias",),
)
