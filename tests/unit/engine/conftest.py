"""Cores to drive step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.loading import open_model
from tests.contract.engine.cases import Model, build_model

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=0)


@pytest.fixture(scope="session")
def create_core() -> Callable[..., EngineCore]:
    def create(directory: Path, **settings: Any) -> EngineCore:
        config = EngineConfig(model=str(directory), **settings)
        core = EngineCore(config)
        core.serve(*open_model(directory, getattr(torch, config.dtype), CPU))
        return core

    return create
