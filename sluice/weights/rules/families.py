"""The families there are, found by the architecture that a `config.json` names."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules.deepseek_v3 import DEEPSEEK_V3
from sluice.weights.rules.glm4 import GLM4
from sluice.weights.rules.llama import LLAMA
from sluice.weights.rules.qwen2 import QWEN2
from sluice.weights.rules.qwen2_5_vl import QWEN2_5_VL
from sluice.weights.rules.qwen3 import QWEN3
from sluice.weights.rules.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_VL, QWEN3_5_VL_MOE
from sluice.weights.rules.qwen3_moe import QWEN3_MOE
from sluice.weights.rules.qwen3_vl import QWEN3_VL
from sluice.weights.rules.rule import Family

FAMILIES = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_VL,
    QWEN3_5_VL_MOE,
    GLM4,
    DEEPSEEK_V3,
)


class UnknownArchitectureError(InvalidCheckpointError):
    """No family knows the architecture of a `config.json`."""


def family_of(config: Mapping[str, object]) -> Family:
    """The family of a parsed `config.json`, by exact architecture name.

    Raises UnknownArchitectureError listing the known ones.
    """
    known = {name: family for family in FAMILIES for name in family.architectures}
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UnknownArchitectureError(
            f"config.json names architectures {architectures!r}; exactly one is needed"
        )
    if architectures[0] not in known:
        raise UnknownArchitectureError(
            f"no weight rules for {architectures[0]!r}; known are {', '.join(sorted(known))}"
        )
    return known[architectures[0]]
