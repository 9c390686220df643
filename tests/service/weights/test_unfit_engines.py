"""Engines that cannot take part in a transfer, or stop in the middle of one, deny it to nobody.

The tests share the processes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.client import EngineClient, TrainerClient
from tests.patience import PATIENCE
from tests.service.trainer.harness import ACTIVE, RunningTrainer, poll, running_trainer, until
from tests.service.weights.harness import RunningEngine, running_engines, serves

SECONDS = 8  # of a transfer, and of an answer: the test of one that stops waits for both
SMALL = {"threads": 1, "max_running": 8, "max_model_length": 64}


@pytest.fixture(scope="module")
def sending(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    settings = {
        "ranks": {"count": 1, "command_timeout": PATIENCE},
        "transfer": {
            "enabled": True,
            "timeout_seconds": SECONDS,
            "answer_seconds": SECONDS,
            "bucket_bytes": 40_000,
        },
    }
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, sending: RunningTrainer
) -> Iterator[dict[str, RunningEngine]]:
    """Two that are well, one without a model and one with another."""
    root = tmp_path_factory.mktemp("engines")
    wide = build_tiny_qwen3(root / "model", 0, hidden_size=32)
    models = {"first": model, "second": model, "empty": None, "wide": wide}
    each = [
        {"engine_id": name, "engine": {**SMALL, "model": str(path) if path else None}}
        for name, path in models.items()
    ]
    with running_engines(
        root, model, sending.store, sending.security, len(models), each=each
    ) as running:
        yield {engine.engine_id: engine for engine in running}


@pytest.fixture
async def client(
    sending: RunningTrainer, engines: dict[str, RunningEngine]
) -> AsyncIterator[TrainerClient]:
    for name in engines.keys() - {"empty"}:
        async with engines[name].client() as starting:
            await poll(lambda starting=starting: serves(starting))
    async with sending.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        yield client


async def has(engine: RunningEngine, version: int) -> bool:
    async with engine.client() as client:
        return version in (await client.get()).prepared_versions


async def test_the_unfit_are_left_out_by_their_own_causes_and_the_others_receive(
    client: TrainerClient, engines: dict[str, RunningEngine]
) -> None:
    published = await client.publish_weights([engine.target for engine in engines.values()])
    causes = {o.engine_id: o.error.message for o in published.engines if o.HasField("error")}
    assert set(causes) == {"empty", "wide"}
    assert "no model yet" in causes["empty"]
    assert "has shape" in causes["wide"]
    for name in ("first", "second"):
        assert await has(engines[name], published.weights.version)


async def test_an_engine_that_stops_midway_is_named_and_the_others_receive(
    client: TrainerClient, engines: dict[str, RunningEngine]
) -> None:
    well, victim = engines["first"], engines["second"]
    victim.kill_at("transfer.received", 2, signal.SIGSTOP)
    began = time.monotonic()
    published = await client.publish_weights([well.target, victim.target])
    assert time.monotonic() - began >= SECONDS  # it was in the middle of it
    causes = {o.engine_id: o.error.message for o in published.engines if o.HasField("error")}
    victim.signal(signal.SIGCONT)
    assert "does not answer" in causes["second"]
    async with EngineClient(well.address, well.security) as left:
        if "first" in causes:  # the second try was too slow as well: it has the store
            assert "second" in causes["first"]
            await left.prepare_weights(published.weights)
        await left.commit_weights(published.weights)
        assert (await left.get()).weights == published.weights
