"""Preferences as a policy gradient, against DPO by autograd in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.algo.spec import AdvantageSpec
from sluice.client import RemoteError
from tests.service.trainer.epochs import OPTIM
from tests.service.trainer.harness import (
    ACTIVE,
    RunningTrainer,
    make_group,
    running_trainer,
    until,
)
from tests.service.trainer.preferences import SETTINGS, check_preferences


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    with running_trainer(tmp_path_factory.mktemp("preferences"), model, optim=OPTIM) as running:
        yield running


@pytest.mark.parametrize("kind", SETTINGS)
async def test_steps_are_those_of_a_plain_loop(
    running: RunningTrainer, model: Path, kind: str
) -> None:
    async with running.client() as client:
        now = await until(client, lambda now: now.state == ACTIVE)
        if not now.checkpoint:
            await client.save_checkpoint("fresh")
        await client.load_checkpoint("checkpoints/fresh")
        await check_preferences(client, running, model, kind)
        assert not (await client.get()).batches


async def test_two_ranks_take_the_steps_of_a_plain_loop(tmp_path: Path, model: Path) -> None:
    """Each pair's answers are on either, or on both."""
    with running_trainer(tmp_path, model, optim=OPTIM, ranks={"count": 2}) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await check_preferences(client, running, model)


@pytest.mark.parametrize("size", [1, 3])
async def test_what_is_no_pair_is_refused(running: RunningTrainer, size: int) -> None:
    async with running.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        samples = make_group(f"odd-{size}", size=size)
        batch = (await client.upload_batch(f"odd-{size}", size, samples=samples)).batch
        await client.compute_logprobs(batch)
        spec = AdvantageSpec(name="dpo", settings={"reference": False})
        with pytest.raises(RemoteError) as caught:
            await client.compute_advantages(batch, spec)
        assert caught.value.reason == "INVALID_FIELD"
        assert f"two answers to a prompt, and a group has {size}" in str(caught.value)
        await client.delete_batch(batch)
