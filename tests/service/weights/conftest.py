"""A model, and the clients of a module's `trainer` and `engines`: processes its tests share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.client import EngineClient, TrainerClient
from tests.service.trainer.harness import ACTIVE, RunningTrainer, poll, until
from tests.service.weights.harness import RunningEngine, running_engines, serves


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, trainer: RunningTrainer
) -> Iterator[list[RunningEngine]]:
    root = tmp_path_factory.mktemp("engines")
    with running_engines(root, model, trainer.store, trainer.security, 2) as running:
        yield running


@pytest.fixture
async def client(trainer: RunningTrainer) -> AsyncIterator[TrainerClient]:
    async with trainer.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        yield client


@pytest.fixture
async def clients(engines: list[RunningEngine]) -> AsyncIterator[list[EngineClient]]:
    """One for each engine; those that have died are started again, and all serve."""
    for engine in engines:
        engine.revive()
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(engine.client()) for engine in engines]
        for client in opened:
            await poll(partial(serves, client))
        yield opened
