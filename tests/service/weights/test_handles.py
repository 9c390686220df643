"""A trainer of two ranks whose engines take weights out of its memory, by handles."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from services.trainer.config import TrainerConfig
from sluice import faults
from sluice.client import RemoteError, TrainerClient
from sluice.config import ConfigError, parse_config
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    RESTART_SECONDS,
    RunningTrainer,
    make_groups,
    poll,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.weights.harness import RunningEngine, running_engines, serves
from tests.service.weights.test_transfer import failures, score

BY_HANDLES = {"enabled": True, "medium": "handles", "timeout_seconds": PATIENCE / 2}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    settings = {
        "ranks": {"count": 2, "restart_backoff": RESTART_SECONDS},
        "transfer": {**BY_HANDLES, "bucket_bytes": 40_000},
    }
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, trainer: RunningTrainer
) -> Iterator[list[RunningEngine]]:
    root = tmp_path_factory.mktemp("engines")
    with running_engines(root, model, trainer.store, trainer.security, 3) as running:
        yield running


async def test_engines_take_what_the_store_has_and_go_on_without_one_that_dies(
    trainer: RunningTrainer, client: TrainerClient, engines: list[RunningEngine]
) -> None:
    """The third reads the store; one of those that take dies meanwhile, and the rank after it."""
    async with engines[0].client() as first, engines[2].client() as other:
        for engine in engines:
            async with engine.client() as each:
                await poll(partial(serves, each), interval=0.05)
        before = await score(first)
        batch = await upload(client, "one", make_groups("one"))
        await train_step(client, batch)
        targets = [engine.target for engine in engines[:2]]
        published = await client.publish_weights(targets)
        assert failures(published) == {}
        assert (await other.get()).prepared_versions == []
        for c in (first, other):
            await c.prepare_weights(published.weights)
            await c.commit_weights(published.weights)
        assert await score(first) == await score(other) != before

        engines[1].kill_at("transfer.received", passing=3)
        async with asyncio.timeout(PATIENCE / 2):  # nobody waits for the deadline
            published = await client.publish_weights(targets)
        assert set(failures(published)) == {engines[1].engine_id}
        assert published.weights.version in (await first.get()).prepared_versions

        armed = trainer.store.parent / "faults"
        faults.arm(armed, "transfer.sent")
        with pytest.raises(RemoteError) as lost:
            await client.publish_weights(targets[:1])
        assert lost.value.reason == "RANK_LOST"
        await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
        published = await client.publish_weights(targets[:1])
        assert failures(published) == {}
        await first.prepare_weights(published.weights)
        await first.commit_weights(published.weights)
        assert (await first.get()).weights == published.weights


@pytest.mark.parametrize(
    ("transfer", "what"),
    [
        ({"medium": "handles"}, "transfer: medium has no effect without enabled"),
        ({**BY_HANDLES, "host": "10.0.0.1"}, "transfer.host has no effect"),
        ({**BY_HANDLES, "medium": "pigeons"}, "medium"),
    ],
)
def test_settings_without_effect_are_refused(
    model: Path, tmp_path: Path, transfer: dict, what: str
) -> None:
    values = {"model": str(model), "store": str(tmp_path), "transfer": transfer}
    with pytest.raises(ConfigError, match=what):
        parse_config(TrainerConfig, values)
