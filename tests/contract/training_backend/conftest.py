"""Backends under contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.trainer.backend import Mesh, TrainingBackend, create_backend
from services.trainer.config import TrainerConfig
from sluice.config import parse_config
from tests.contract.training_backend.cases import OPTIM, Model, StartBackend, build_model


@pytest.fixture(scope="session", params=["qwen3", "llama", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(params=["reference"])
def start_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartBackend]:
    """Makes backends of one kind on one rank, and closes them in the end."""
    started: list[TrainingBackend] = []

    def start(model: Model, **settings: Any) -> TrainingBackend:
        values = {
            "model": str(model.directory),
            "store": tmp_path / "store",
            "backend": request.param,
            "optim": OPTIM,
            "durable": False,
            **settings,
        }
        config = parse_config(TrainerConfig, values)
        backend = create_backend(request.param, config, Mesh(rank=0, world_size=1))
        started.append(backend)
        return backend

    yield start
    for backend in started:
        backend.close()
