"""Reward models on two ranks are those of autograd in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fsdp.test_service import SETTINGS
from tests.service.trainer.harness import ACTIVE, running_trainer, until
from tests.service.trainer.reward_models import TRAINER, build_classifier, check_reward_model


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"context": 2}], ids=["data", "tensor", "context"]
)
async def test_steps_are_those_of_a_plain_loop(tmp_path: Path, layout: dict[str, int]) -> None:
    """The answers of a pair may be on either rank, or a text on both."""
    classifier = build_classifier(tmp_path)
    settings = SETTINGS | TRAINER | {"fsdp": {"dtype": "float32", **layout}}
    with running_trainer(tmp_path / "trainer", classifier, **settings) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await check_reward_model(client, running, classifier)
