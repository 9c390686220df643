"""Rollout processes on free ports, with a tiny Qwen3 in their store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.rollout.config import RolloutConfig
from services.rollout.process import RolloutProcess
from sluice.api.common.v1 import sample_pb2
from sluice.client import EngineClient
from sluice.config import parse_config
from sluice.weights.store import VersionRecord, WeightStore, import_checkpoint


@dataclass(frozen=True)
class Models:
    """Two tiny models of one architecture."""

    first: Path
    second: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return Models(build_tiny_qwen3(root / "a", 0), build_tiny_qwen3(root / "b", 1))


@dataclass(frozen=True)
class Store:
    """A shared store with two weight versions."""

    root: Path
    weights: WeightStore
    first: VersionRecord
    second: VersionRecord

    def named(self, record: VersionRecord) -> sample_pb2.WeightVersion:
        return sample_pb2.WeightVersion(version=record.version, digest=record.digest)


@pytest.fixture
def store(tmp_path: Path, models: Models) -> Store:
    weights = WeightStore(tmp_path / "store" / "weights", durable=False)
    first = import_checkpoint(weights, models.first, None, 0)
    second = import_checkpoint(weights, models.second, first.version, 1)
    return Store(tmp_path / "store", weights, first, second)


@dataclass(frozen=True)
class EngineUnderTest:
    process: RolloutProcess
    client: EngineClient
    store: Store

    async def load(self, record: VersionRecord) -> None:
        await self.client.prepare_weights(self.store.named(record))
        await self.client.commit_weights(self.store.named(record))


@pytest.fixture
async def engine(store: Store) -> AsyncIterator[EngineUnderTest]:
    """An engine without weights."""
    values = {
        "roles": ["engine"],
        "engine_id": "rollout-0",
        "store": str(store.root),
        "store_sync": False,
        "engine": {"max_running": 16, "max_model_length": 64, "threads": 1},
        "server": {"drain_seconds": 0.2},
    }
    process = RolloutProcess(parse_config(RolloutConfig, values))
    await process.start()
    client = EngineClient(process.server.address)
    yield EngineUnderTest(process, client, store)
    await client.close()
    await process.server.stop()
    await process.close()
