"""Tensor-parallel ranks publish deltas, send what each owns to an engine, and write it behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.client import EngineClient, RemoteError
from tests.behind_run import check_run
from tests.megatron.test_service import SETTINGS
from tests.service.trainer.harness import (
    ACTIVE,
    make_groups,
    poll,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.weights.harness import running_engines


async def serves(client: EngineClient) -> bool:
    try:
        return (await client.get()).HasField("weights")
    except RemoteError:
        return False


@pytest.mark.fast
def test_a_run_survives_a_rank_lost_while_it_writes_behind(tmp_path: Path) -> None:
    check_run(tmp_path, {"backend": "megatron", "megatron": SETTINGS["megatron"]})


async def test_an_engine_receives_what_the_ranks_published_as_deltas(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    settings = SETTINGS | {
        "publish": {"delta": True},
        "transfer": {"enabled": True, "timeout_seconds": 20.0},
        "optim": {"learning_rate": 1e-5},
    }
    with (
        running_trainer(tmp_path / "trainer", model, **settings) as trainer,
        running_engines(tmp_path, model, trainer.store, trainer.security, 1) as (engine,),
    ):
        async with trainer.client() as client, engine.client() as served:
            await until(client, lambda now: now.state == ACTIVE)
            await poll(lambda: serves(served), 60)
            batch = await upload(client, "sent", make_groups("sent", seed=8))
            await train_step(client, batch)
            published = await client.publish_weights([engine.target])
            assert not published.engines[0].HasField("error"), published.engines[0].error
            assert published.byte_count < 0.2 * published.full_byte_count  # as before
            assert await served.prepare_weights(published.weights) == 0.0
            await served.commit_weights(published.weights)
            assert (await served.get()).weights == published.weights
