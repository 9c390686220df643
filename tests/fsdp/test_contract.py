"""The contract of all training backends, kept by this one on one rank of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.trainer.backend import Mesh, TrainingBackend, create_backend
from services.trainer.config import TrainerConfig
from sluice.config import parse_config
from tests.contract.training_backend.cases import OPTIM, Model, StartBackend, build_model
from tests.contract.training_backend.test_logprobs import *  # noqa: F403
from tests.contract.training_backend.test_muon import *  # noqa: F403
from tests.contract.training_backend.test_steps import *  # noqa: F403
from tests.contract.training_backend.test_storage import *  # noqa: F403
from tests.contract.training_backend.test_trainable import *  # noqa: F403

pytestmark = pytest.mark.fast


@pytest.fixture(scope="session", params=["qwen3", "llama", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def start_backend(process_group: None, tmp_path: Path) -> Iterator[StartBackend]:
    torch.set_num_threads(1)
    started: list[TrainingBackend] = []

    def start(model: Model, **settings: Any) -> TrainingBackend:
        values = {
            "model": str(model.directory),
            "store": tmp_path / "store",
            "backend": "fsdp",
            "fsdp": {"dtype": "float32"},
            "optim": OPTIM,
            "durable": False,
            **settings,
        }
        config = parse_config(TrainerConfig, values)
        backend = create_backend("fsdp", config, Mesh(rank=0, world_size=1))
        started.append(backend)
        return backend

    yield start
    for backend in started:
        backend.close()
