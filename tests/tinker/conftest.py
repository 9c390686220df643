"""A stack with a gateway, and the public client of Tinker, unmodified (`make test-tinker`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import Stack, start_stack, stop_stack
from tests.tinker.base import train_base
from tests.tinker.learned import LEARNED

KEY = "tml-none"


def pytest_unconfigure() -> None:
    if LEARNED:
        print("tinker: " + " ".join(f"{name}={value:.3f}" for name, value in LEARNED.items()))


@dataclass(frozen=True)
class Gateway:
    """A stack whose gateway serves the client."""

    stack: Stack
    model: Path

    @property
    def url(self) -> str:
        return str(self.stack.services["tinker"]["tinker_url"])

    @property
    def weights(self) -> Path:
        """Versions in the store."""
        return self.stack.run_dir / "store" / "weights" / "versions"

    def service(self, **options: Any) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=KEY, **options)

    def rest(self) -> Any:
        return tinker.RestClient(base_url=self.url, api_key=KEY)

    def begin(self, rank: int = 4, **options: Any) -> tinker.TrainingClient:
        """A model of a session of its own."""
        client = self.service().create_lora_training_client(str(self.model), rank, **options)
        return client.result()


def start_gateway(run_dir: Path, model: Path, **tinker_settings: Any) -> Gateway:
    engine = {"model": str(model), "max_running": 256, "max_model_length": 32, "threads": 1}
    stack = start_stack(
        run_dir,
        trainer={"kind": "trainer", "config": {"model": str(model), "lora": {"rank": 4}}},
        rollout={"kind": "rollout", "config": {"tokenizer": str(model), "engine": engine}},
        tinker={"kind": "gateway", "config": {"model": str(model), "tinker": tinker_settings}},
    )
    return Gateway(stack, model)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Gateway]:
    gateway = start_gateway(tmp_path_factory.mktemp("gateway"), model)
    yield gateway
    stop_stack(gateway.stack)


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """Of a whole sequence; inputs are by target."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )
