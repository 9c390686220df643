"""A tiny model, a store, and an engine on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.rollout.process import RolloutProcess
from sluice.client import EngineClient
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint
from tests.service.rollout.harness import (
    Episodes,
    Models,
    Store,
    running_episodes,
    running_rollout,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return Models(build_tiny_qwen3(root / "a", 0), build_tiny_qwen3(root / "b", 1))


def create_store(root: Path, models: Models) -> Store:
    weights = WeightStore(root / "store" / "weights", durable=False)
    first = import_checkpoint(weights, models.first, None, 0)
    second = import_checkpoint(weights, models.second, first.version, 1)
    return Store(root / "store", weights, first, second)


@pytest.fixture
def store(tmp_path: Path, models: Models) -> Store:
    return create_store(tmp_path, models)


@pytest.fixture
async def engine_process(store: Store) -> AsyncIterator[RolloutProcess]:
    """An engine without weights and without router."""
    async with running_rollout(store, roles=["engine"], engine_id="rollout-0") as process:
        yield process


@pytest.fixture
async def engine(engine_process: RolloutProcess) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine_process.server.address) as client:
        yield client


@pytest.fixture
async def refusing(store: Store, models: Models) -> AsyncIterator[Episodes]:
    """An episode worker for requests that are refused before anything runs."""
    async with running_episodes(store, models.first) as episodes:
        yield episodes
