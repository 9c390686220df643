"""Preferences on two ranks are those of DPO by autograd in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from tests.fsdp.test_service import SETTINGS
from tests.service.trainer.epochs import OPTIM
from tests.service.trainer.harness import ACTIVE, running_trainer, until
from tests.service.trainer.preferences import check_preferences


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"context": 2}], ids=["data", "tensor", "context"]
)
async def test_steps_are_those_of_a_plain_loop(tmp_path: Path, layout: dict[str, int]) -> None:
    """The answers of a pair may be on either rank, or a token's log-prob on both."""
    model = build_tiny_qwen3(tmp_path / "model", 0)
    settings = SETTINGS | {"fsdp": {"dtype": "float32", **layout}, "optim": OPTIM}
    with running_trainer(tmp_path / "trainer", model, **settings) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await check_preferences(client, running, model, "smoothed")
