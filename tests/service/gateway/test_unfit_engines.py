"""Engines that take no adapters: who samples is told at once, and of what is to be set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from services.gateway.config import GatewayConfig
from services.gateway.errors import UnfitEnginesError
from services.gateway.journal import SamplerRecord
from services.gateway.requests import SampleTokens
from services.gateway.samplers import Engines, Samplers
from services.rollout.errors import EngineFailedError, UnfitAdapterError, VersionUnavailableError
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as engine_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.router.v1 import router_service_pb2_grpc as router_grpc
from sluice.config import parse_config
from sluice.runtime.recovery import NotReadyError
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE

SAMPLER = SamplerRecord(id="s", session="s", created=0.0, adapter="a", version=1, digest="d" * 32)
UNFIT = "SGLang was started without: set engine.sglang.lora"


class Engine(engine_grpc.EngineServiceServicer, router_grpc.RouterServiceServicer):
    """One that holds no adapter, behind a router that knows no other."""

    def __init__(self) -> None:
        self.address = ""
        self.refusal: Exception = UnfitAdapterError(UNFIT)

    async def ListEngines(self, request, context):
        return router_pb.ListEnginesResponse(engines=[router_pb.Engine(address=self.address)])

    async def GetEngine(self, request, context):
        return pb.GetEngineResponse(max_model_length=16)

    async def PrepareWeights(self, request, context):
        raise self.refusal

    async def Generate(self, request, context):
        raise VersionUnavailableError("adapter 'a@1' is not held")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    server = Server(ServerConfig(host="127.0.0.1", drain_seconds=0))
    server.add(engine_grpc.add_EngineServiceServicer_to_server, engine, "engine")
    server.add(router_grpc.add_RouterServiceServicer_to_server, engine, "router")
    await server.start()
    engine.address = server.address
    yield engine
    await server.stop()


@pytest.fixture
async def engines(engine: Engine, tmp_path) -> AsyncIterator[tuple[GatewayConfig, Engines]]:
    values = {
        "model": "model",
        "trainer": engine.address,
        "router": engine.address,
        "journal": str(tmp_path / "journal.sqlite"),
        "store": str(tmp_path),
        "tinker": {"recovery_seconds": 10 * PATIENCE},
    }
    config = parse_config(GatewayConfig, values)
    engines = Engines(config)
    yield config, engines
    await engines.close()


async def test_who_samples_is_told_at_once_and_what_to_set(engines) -> None:
    """Not after `tinker.recovery_seconds`, in which nothing would have changed."""
    asked = SampleTokens.model_validate(
        {
            "sampling_session_id": "s",
            "seq_id": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {},
        }
    )
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(UnfitEnginesError, match=UNFIT) as told:
            await Samplers(*engines).sample(SAMPLER, asked)
    assert told.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_engine_that_starts_is_waited_for(engine: Engine, engines) -> None:
    engine.refusal = EngineFailedError("SGLang is being started")
    with pytest.raises(NotReadyError, match="being started"):
        await engines[1].bring_up(SAMPLER)
