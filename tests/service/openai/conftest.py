"""A tiny chat model behind the OpenAI port of a rollout process, with and without a router."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.rollout.process import RolloutProcess
from sluice.client import EngineClient
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.service.rollout.harness import (
    ENGINE,
    Store,
    load_weights,
    running_rollout,
    running_router,
    wait_for_engines,
)

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<end>' if message.role == 'assistant' else '=' }}{% endfor %}"
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}=0{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = build_tiny_qwen3(tmp_path_factory.mktemp("model"), 0)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Store:
    weights = WeightStore(tmp_path / "store" / "weights", durable=False)
    first = import_checkpoint(weights, model, None, 0)
    second = import_checkpoint(weights, model, first.version, 1)
    return Store(tmp_path / "store", weights, first, second)


def client_of(process: RolloutProcess, **options: Any) -> AsyncOpenAI:
    assert process.openai is not None
    settings = {"base_url": process.openai.url, "api_key": "none", "max_retries": 0}
    return AsyncOpenAI(**{**settings, "timeout": PATIENCE, **options})


@contextlib.asynccontextmanager
async def running_openai(
    store: Store, model: Path, *, engine: dict[str, Any] | None = None, **values: Any
) -> AsyncIterator[RolloutProcess]:
    """An engine with the OpenAI port, under the first version."""
    settings = {"roles": ["engine"], "openai": {}, "tokenizer": str(model), **values}
    async with running_rollout(store, engine={**ENGINE, **(engine or {})}, **settings) as process:
        server = process.server
        async with EngineClient(server.address, server.config.security) as engine_client:
            await load_weights(engine_client, store.first)
        yield process


@pytest.fixture
async def process(store: Store, model: Path) -> AsyncIterator[RolloutProcess]:
    async with running_openai(store, model) as process:
        yield process


@pytest.fixture
async def client(process: RolloutProcess) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(process) as client:
        yield client


@pytest.fixture
async def leased(store: Store, model: Path) -> AsyncIterator[AsyncOpenAI]:
    """A client of an episode worker, whose engine another process has."""
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router())
        address = router.server.address
        await stack.enter_async_context(
            running_openai(store, model, router=address, openai=None, engine_id="engine")
        )
        worker = await stack.enter_async_context(
            running_rollout(
                store,
                roles=["episodes"],
                router=address,
                tokenizer=str(model),
                openai={},
                engine_id="worker",
            )
        )
        await wait_for_engines(address, 1)
        yield await stack.enter_async_context(client_of(worker))
