"""Channels to the engines that leases name."""

from __future__ import annotations

from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.client import EngineClient, typed_errors
from sluice.runtime.security import SecurityConfig


class EngineChannels:
    """One channel per address, opened when first used."""

    def __init__(self, security: SecurityConfig) -> None:
        self._security = security
        self._engines: dict[str, EngineClient] = {}

    async def generate(self, address: str, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Raises RemoteError; cancelling it aborts the request in the engine."""
        engine = self._engines.get(address)
        if engine is None:
            engine = self._engines[address] = EngineClient(address, self._security)
        with typed_errors():
            response: pb.GenerateResponse = await engine.stub.Generate(request)
        return response

    async def close(self) -> None:
        """Close all channels."""
        for engine in self._engines.values():
            await engine.close()
