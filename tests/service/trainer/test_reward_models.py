"""Reward models by the derivative of their loss, against autograd in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.trainer.harness import ACTIVE, RunningTrainer, running_trainer, until
from tests.service.trainer.reward_models import (
    CENTERED,
    TRAINER,
    build_classifier,
    check_reward_model,
)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, classifier: Path) -> Iterator[RunningTrainer]:
    with running_trainer(tmp_path_factory.mktemp("rewards"), classifier, **TRAINER) as running:
        yield running


@pytest.mark.parametrize("margins", [False, True], ids=["plain", "margins"])
@pytest.mark.parametrize("settings", [{}, CENTERED], ids=["free", "centered"])
async def test_steps_are_those_of_a_plain_loop(
    running: RunningTrainer, classifier: Path, settings: dict[str, float], margins: bool
) -> None:
    async with running.client() as client:
        now = await until(client, lambda now: now.state == ACTIVE)
        assert now.head == "reward"
        if not now.checkpoint:
            await client.save_checkpoint("fresh")
        await client.load_checkpoint("checkpoints/fresh")
        await check_reward_model(client, running, classifier, settings, margins=margins)
        assert not (await client.get()).batches


async def test_two_ranks_take_the_steps_of_a_plain_loop(tmp_path: Path, classifier: Path) -> None:
    """Each pair's answers are on either, or on both."""
    with running_trainer(tmp_path, classifier, **TRAINER, ranks={"count": 2}) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await check_reward_model(client, running, classifier)
