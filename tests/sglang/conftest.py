"""Engines on real SGLang, and the models that they serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.sglang.engine import SglangEngine
from sluice.weights.store import StoredVersion, WeightStore
from tests.contract.engine.cases import Model, build_model
from tests.fast_part import items_below
from tests.imported import import_checkpoint
from tests.sglang_servers import PYTHON, SharedServers

Start = Callable[..., Awaitable[SglangEngine]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items_below(Path(__file__).parent, items):
        item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def sglang_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    servers = SharedServers(tmp_path_factory.mktemp("sglang"))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    old, new = (build_model(folder / name, "qwen3", seed) for seed, name in enumerate("ab"))
    return old, new


@pytest.fixture
def versions(models: tuple[Model, Model], tmp_path: Path) -> list[StoredVersion]:
    """Both models in a store."""
    store = WeightStore(tmp_path / "weights", durable=False)
    return [import_checkpoint(store, model.directory, None, 0) for model in models]


@pytest.fixture
async def attach(
    models: tuple[Model, Model], sglang_servers: SharedServers, tmp_path: Path
) -> AsyncIterator[Start]:
    """An engine at a server that runs already, serving the first model."""
    async with _starting({}) as start:

        async def attached(**settings: Any) -> SglangEngine:
            sglang = settings.pop("sglang", None) or {
                "url": sglang_servers.url(models[0].directory)
            }
            return await start(model=str(models[0].directory), sglang=sglang, **settings)

        yield attached


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Start]:
    """An engine with a server of its own."""
    shared = {"python": PYTHON, "stop_seconds": 0.5}
    async with _starting(shared, threads=1) as start:
        yield start


@asynccontextmanager
async def _starting(shared: dict[str, Any], **every: Any) -> AsyncIterator[Start]:
    started: list[SglangEngine] = []

    async def start(*, sglang: dict[str, Any] | None = None, **settings: Any) -> SglangEngine:
        own = SglangConfig(**shared, **(sglang or {}))
        engine = SglangEngine(EngineConfig(backend="sglang", sglang=own, **every, **settings))
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in started:
        await engine.close()
