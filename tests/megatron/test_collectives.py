"""`ranks.check_collectives`: a rank that differs is named, with what it was about to exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron.comparison import LOSS_TOLERANCE
from tests.rank_pool import Pool

CHECKED = {"ranks": {"check_collectives": True}}


@pytest.mark.parametrize(
    ("world", "layout", "named"),
    [
        pytest.param(2, {"context": 2}, [1, 1], id="CP2", marks=pytest.mark.fast),
        pytest.param(4, {"tensor": 2, "context": 2}, [2, 3, 2, 3], id="TP2xCP2"),
    ],
)
def test_a_rank_of_other_rows_is_named(
    world: int, layout: Any, named: list[int], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    """The last context rank is given one row, the others two; before, all ran the same steps."""
    qwen3 = expected("qwen3")
    arguments = {"model": str(qwen3.directory), "layout": layout, "out": str(tmp_path)}
    answers = pool.run("checked", world, trainer=CHECKED, **arguments)
    for answer, rank in zip(answers, named, strict=True):
        assert answer["error_rank"] == rank
        assert (
            f"rank {rank} differs at collective 0: it is at 'all_gather" in answer["error_message"]
        )
        for found, step in zip(answer["steps"], qwen3.steps, strict=False):
            assert found["loss"] == pytest.approx(step.loss, abs=LOSS_TOLERANCE)


@pytest.mark.fast
def test_a_rank_of_the_reference_backend_with_another_model_is_named(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    qwen3, other = str(expected("qwen3").directory), str(expected("qwen3_tied").directory)
    same = pool.run("checked_reference", 2, models=[qwen3, qwen3], out=str(tmp_path))
    assert same[0] == same[1]
    assert same[0]["grad_norm"] > 0
    for answer in pool.run("checked_reference", 2, models=[qwen3, other], out=str(tmp_path)):
        assert answer["error_rank"] == 1
        assert "all_reduce sum" in answer["error_message"]


@pytest.mark.fast
def test_ranks_wait_for_each_other_as_long_as_a_command_may_take(
    pool: Pool, expected: Any, tmp_path: Path
) -> None:
    arguments = {"model": str(expected("qwen3").directory), "layout": {"tensor": 2}}
    trainer = {"ranks": {"command_timeout": 4321.0}}
    answers = pool.run("waits", 2, trainer=trainer, out=str(tmp_path), **arguments)
    assert answers == [{"tensor": 4321.0, "experts": 4321.0}] * 2
