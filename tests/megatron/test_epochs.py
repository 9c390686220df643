"""Several epochs of mini-batches on two ranks of Megatron are those of plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from tests.megatron.test_service import SETTINGS
from tests.service.trainer.epochs import OPTIM, SIZES, check_epochs
from tests.service.trainer.harness import ACTIVE, running_trainer, until


@pytest.mark.parametrize(
    ("layout", "mini_batches"),
    [
        ({}, 2),
        ({}, len(SIZES)),
        ({"distributed_optimizer": False}, 2),
        ({"tensor": 2}, 2),
        ({"pipeline": 2}, 2),
        ({"context": 2}, 2),
    ],
    ids=["data", "data-each", "whole", "tensor", "pipeline", "context"],
)
async def test_epochs_are_those_of_a_plain_loop(
    tmp_path: Path, layout: dict[str, int], mini_batches: int
) -> None:
    """With a mini-batch for each group: some have fewer rows than ranks, one teaches nothing."""
    model = build_tiny_qwen3(tmp_path / "model", 0)
    settings = SETTINGS | {"megatron": {"dtype": "float32", **layout}, "optim": OPTIM}
    with running_trainer(tmp_path / "trainer", model, **settings) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await check_epochs(
                client, running, model, "passes", mini_batches=mini_batches, epochs=2
            )
