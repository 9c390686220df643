"""Engines under contract, and the models they serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.interface import Engine, create_engine
from sluice.weights.store import StoredVersion, WeightStore
from tests.contract.engine.cases import Model, StartEngine, build_model, family_of
from tests.imported import import_checkpoint
from tests.sglang_servers import PYTHON, SharedServers


@pytest.fixture(scope="session", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), request.param, seed=0)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=0)


@pytest.fixture(scope="session")
def family_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a server is started with; an engine gives it its own weights."""
    folder = tmp_path_factory.mktemp("families")
    return {
        family: build_model(folder / family, family, seed=2).directory
        for family in ("qwen3", "llama")
    }


@pytest.fixture
def versions(
    qwen3: Model, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[StoredVersion, Model]]:
    """Two versions of one architecture in a store; the first has the weights of `qwen3`."""
    store = WeightStore(tmp_path / "weights", durable=False)
    other = build_model(tmp_path_factory.mktemp("other"), "qwen3", seed=1)
    return [(import_checkpoint(store, m.directory, None, 0), m) for m in (qwen3, other)]


@pytest.fixture(scope="session")
def sglang_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    servers = SharedServers(tmp_path_factory.mktemp("sglang"))
    yield servers
    servers.close()


@pytest.fixture(params=["reference", pytest.param("sglang", marks=pytest.mark.sglang)])
async def start_engine(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[StartEngine]:
    """Starts engines of one backend with the given settings, and closes them in the end.

    An SGLang engine with a model gives it to a server that runs already. `tokenizer` is a
    directory.
    """
    async with starting(request, tmp_path) as start:
        yield start


@pytest.fixture(params=["reference"])
async def start_seeded_engine(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[StartEngine]:
    """The same, of backends that draw by seed: SGLang does on accelerators only."""
    async with starting(request, tmp_path) as start:
        yield start


@asynccontextmanager
async def starting(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[StartEngine]:
    started: list[Engine] = []

    async def start(*, tokenizer: Path | None = None, **settings: Any) -> Engine:
        if request.param == "sglang":
            servers: SharedServers = request.getfixturevalue("sglang_servers")
            sglang: dict[str, Any] = {"python": PYTHON}
            if "model" in settings:
                families = request.getfixturevalue("family_models")
                model = families[family_of(Path(settings["model"]))]
                sglang = {"url": servers.url(model)}
                settings.pop("prefill_chunk_tokens", None)  # that server has its own
            settings["sglang"] = SglangConfig(**sglang)
        else:
            settings["threads"] = 1
        config = EngineConfig(backend=request.param, **settings)
        engine = create_engine(request.param, config, tokenizer)
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in started:
        await engine.close()
