"""Negative control of all parity: with any one weight rule wrong, it is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron.comparison import LOGPROB_TOLERANCE
from tests.rank_pool import Pool


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {"tensor": 2}),
        ("qwen3_moe", {"tensor": 2, "sequence_parallel": True}),
        ("qwen2", {"tensor": 2}),
        ("glm4", {"tensor": 2}),
        ("glm4_moe", {"tensor": 2, "sequence_parallel": True}),
        ("deepseek_v3", {"tensor": 2, "sequence_parallel": True}),
        ("minimax_m2", {"tensor": 2, "sequence_parallel": True}),
        (
            "gpt_oss",
            {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1},
        ),
        ("glm_moe_dsa_shared", {"tensor": 2, "sequence_parallel": True}),
    ],
)
def test_any_wrong_rule_is_noticed(
    family: str, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    model = str(expected(family).directory)
    for answer in pool.run("mutated_rules", 2, model=model, layout=layout, out=str(tmp_path)):
        assert answer.pop("as it is") == 0.0
        unnoticed = [
            label
            for label, effect in answer.items()
            if not isinstance(effect, str) and effect <= 10 * LOGPROB_TOLERANCE
        ]
        if layout.get("expert_tensor") == 1:  # no layout cuts those with biases
            unnoticed = [x for x in unnoticed if not (".local_experts." in x and "cut" in x)]
        assert unnoticed == []
        assert len(answer) > 15
