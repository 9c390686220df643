"""A gateway in this process over a real trainer, spoken to without the client of Tinker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.gateway import schema
from services.gateway.config import GatewayConfig
from services.gateway.process import GatewayProcess
from sluice.config import parse_config
from tests.patience import PATIENCE
from tests.service.trainer.harness import ACTIVE, RunningTrainer, running_trainer, until

NOWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    lora = {"lora": {"rank": 2, "max_adapters": 32}}
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **lora) as running:
        yield running


@dataclass
class Http:
    """What a client says and is told."""

    session: aiohttp.ClientSession
    url: str
    headers: dict[str, str]

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(
            f"{self.url}/api/v1/{path}", data=data, headers=self.headers | headers
        ) as response:
            raw = await response.read()
            is_json = "json" in response.content_type
            return response.status, json.loads(raw) if is_json else raw

    async def pass_of(self, model_id: str, seq: int, rows: int = 2, **more: Any) -> tuple[int, Any]:
        """A pass of cross_entropy over some rows."""
        message: Any = schema.ForwardBackwardRequest(
            model_id=model_id, seq_id=seq, loss_fn="cross_entropy", **more
        )
        for row in range(rows):
            datum = message.data.add()
            tokens = np.array([row % 10, 1, 10], "<i4")
            datum.model_input.add().encoded_text.tokens = tokens.tobytes()
            target = datum.loss_fn_inputs["target_tokens"]
            target.dtype, target.dense = schema.INT64, np.array([1, 10, 1], "<i8").tobytes()
        kind = {"Content-Type": "application/x-protobuf"}
        return await self.post("forward_backward", message.SerializeToString(), **kind)

    async def step(self, model_id: str, seq: int, **adam: float) -> tuple[int, Any]:
        body = {"type": "optim_step", "model_id": model_id, "seq_id": seq, "adam_params": adam}
        return await self.post("optim_step", body)

    async def result(self, request_id: str) -> Any:
        while True:
            status, answer = await self.post("retrieve_future", {"request_id": request_id})
            if status != 408:
                assert status == 200, answer
                return answer

    async def begin(self) -> str:
        """The id of a model."""
        _, session = await self.post("create_session", {"tags": [], "type": "create_session"})
        body = {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": self.headers["model"],
            "lora_config": {"rank": 2},
        }
        _, future = await self.post("create_model", body)
        return str((await self.result(future["request_id"]))["model_id"])


@dataclass
class Place:
    """Where gateways work one after another."""

    config: GatewayConfig
    trainer: RunningTrainer


@pytest.fixture
async def place(tmp_path: Path, trainer: RunningTrainer, model: Path) -> Place:
    async with trainer.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        for each in (await client.get()).adapters:
            await client.delete_adapter(each.adapter)
    security = {"token_file": str(trainer.security.token_file)}
    values = {
        "model": str(model),
        "trainer": trainer.address,
        "router": NOWHERE,
        "journal": str(tmp_path / "journal.sqlite"),
        "store": str(trainer.store),
        "tinker": {"poll_seconds": 0.5, "checkpoint_steps": 2, "recovery_seconds": 60},
        "server": {"drain_seconds": 0.1, "security": security},
    }
    return Place(parse_config(GatewayConfig, values), trainer)


def headers_of(place: Place) -> dict[str, str]:
    """Of a client's requests."""
    key = f"tml-{place.trainer.security.token()}"
    return {"X-API-Key": key, "model": str(place.config.model)}


class RunningGateway:
    """One of them, from `start` to `stop`."""

    def __init__(self, place: Place) -> None:
        self.process = GatewayProcess(place.config)
        self.place = place

    async def start(self) -> Http:
        await self.process.start()
        self.session = aiohttp.ClientSession()
        return Http(self.session, self.process.tinker.url, headers_of(self.place))

    async def stop(self) -> None:
        await self.session.close()
        await self.process.server.stop()
        await asyncio.wait_for(self.process.close(), PATIENCE)


@pytest.fixture
async def http(place: Place) -> AsyncIterator[Http]:
    running = RunningGateway(place)
    yield await running.start()
    await running.stop()
