"""One trainer of one rank for a whole session, and clients to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.client import TrainerClient
from tests import warm
from tests.service.trainer.harness import ACTIVE, RunningTrainer, running_trainer, until


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    """As a user starts it, and without the libraries of its ranks."""
    with ExitStack() as stack:
        with warm.cold():
            root = tmp_path_factory.mktemp("trainer")
            running = stack.enter_context(running_trainer(root, model))
        yield running


@pytest.fixture
async def client(trainer: RunningTrainer) -> AsyncIterator[TrainerClient]:
    """A client of the shared trainer; leaves neither gradients nor batches behind."""
    async with trainer.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        yield client
        await client.discard_gradients()
        for batch in (await client.get()).batches:
            await client.delete_batch(batch)
