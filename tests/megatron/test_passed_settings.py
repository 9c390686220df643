"""Settings of Megatron's that are passed on to it, over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.comparison import (
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    logprob_difference,
    read_ranks,
    relative_difference,
)
from tests.rank_pool import Pool


def test_masters_keep_steps_that_a_bfloat16_weight_would_lose(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """A step moves a weight by a fifth of what bfloat16 tells apart; twelve move nearly all."""
    rate = 2e-4
    pool.run(
        "small_steps",
        1,
        model=str(expected("qwen3").directory),
        out=str(tmp_path),
        layout={"dtype": "bfloat16"},
        rate=rate,
        steps=12,
    )
    start, first, last = (
        load_file(tmp_path / f"{name}.safetensors") for name in ("start", "first", "last")
    )
    large = {name: w.abs() > 0.125 for name, w in start.items() if w.ndim == 2 and "layers" in name}
    assert sum(int(mask.sum()) for mask in large.values()) > 100

    def moved(weights: dict[str, torch.Tensor]) -> float:
        changed = [(weights[name] != start[name])[mask] for name, mask in large.items()]
        return float(torch.cat(changed).float().mean())

    assert moved(first) < 0.3 < 0.6 < moved(last)


@pytest.mark.parametrize(
    "operations", [{"swiglu": "megatron_swiglu"}, {"rms_norm": "plain"}], ids=str
)
def test_operations_that_are_asked_for_change_rounding_alone(
    operations: dict[str, str], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    oracle = expected("qwen3")
    pool.run(
        "parity",
        1,
        model=str(oracle.directory),
        layout={},
        out=str(tmp_path),
        trainer={"operations": operations},
    )
    logprob = logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs)
    gradient = relative_difference(read_ranks(tmp_path, "gradients"), oracle.gradients)
    assert logprob <= LOGPROB_TOLERANCE and gradient <= GRADIENT_TOLERANCE
