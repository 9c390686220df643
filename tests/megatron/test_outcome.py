"""Non-finite gradients never reach the weights: in every dtype, on every rank alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import Pool

fast = pytest.mark.fast
PLAIN = {"distributed_optimizer": False}


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        pytest.param("qwen3", 2, {"dtype": "float32", **PLAIN}, id="DP2-float32"),
        pytest.param(
            "qwen3", 2, {"dtype": "float32"}, id="DP2-distributed", marks=pytest.mark.fast
        ),
        pytest.param("qwen3", 2, {"dtype": "bfloat16", "tensor": 2, **PLAIN}, id="TP2-bfloat16"),
        pytest.param("qwen3", 2, {"dtype": "bfloat16"}, id="DP2-bfloat16-distributed"),
        pytest.param("qwen3", 2, {"dtype": "float16"}, id="DP2-float16"),
        pytest.param("qwen3", 2, {"dtype": "float32", "pipeline": 2}, id="PP2-float32"),
        pytest.param("qwen3_moe", 2, {"dtype": "float32", "expert": 2, **PLAIN}, id="EP2"),
        pytest.param("qwen3_moe", 2, {"dtype": "float32", "expert": 2}, id="EP2-distributed"),
    ],
)
def test_a_poisoned_step_is_skipped_by_all(
    family: str, world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    model = str(expected(family).directory)
    answers = pool.run("poisoned_step", world, model=model, layout=layout, out=str(tmp_path))
    for answer in answers:
        assert answer["bad"] == "non-finite gradient norm"
        assert not answer["bad_norm_is_finite"]
        assert answer["unchanged"]
        assert answer["good"] == ""
        assert answer["moved"]
