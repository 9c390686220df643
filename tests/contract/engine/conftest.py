"""Engines under contract, and the models they serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine import Engine, create_engine
from services.rollout.engine_config import EngineConfig
from sluice.weights.store import VersionRecord, WeightStore, import_checkpoint
from tests.contract.engine.cases import Model, StartEngine, build_model


@pytest.fixture(scope="session", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), request.param, seed=0)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=0)


@pytest.fixture
def versions(
    qwen3: Model, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[VersionRecord, Model]]:
    """Two versions of one architecture in a store; the first has the weights of `qwen3`."""
    store = WeightStore(tmp_path / "weights", durable=False)
    other = build_model(tmp_path_factory.mktemp("other"), "qwen3", seed=1)
    return [(import_checkpoint(store, m.directory, None, 0), m) for m in (qwen3, other)]


@pytest.fixture(params=["reference"])
async def start_engine(request: pytest.FixtureRequest) -> AsyncIterator[StartEngine]:
    """Starts engines of one backend with the given settings, and closes them in the end."""
    started: list[Engine] = []

    async def start(**settings: Any) -> Engine:
        config = EngineConfig(backend=request.param, threads=1, **settings)
        engine = create_engine(request.param, config)
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in started:
        await engine.close()
