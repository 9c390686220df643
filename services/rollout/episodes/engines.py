"""Asks the engines that leases name: over gRPC, or directly where the engine is in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from services.rollout.engine import Delta, Generation
from services.rollout.wire import (
    VersionBounds,
    bounds_to_proto,
    delta_from_proto,
    sampling_to_proto,
)
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.client import EngineClient, error_from_status, typed_errors
from sluice.runtime.errors import ServiceError
from sluice.runtime.security import SecurityConfig

Generate = Callable[[Generation, VersionBounds], Awaitable[list[Delta]]]


class EngineAccess:
    """One channel per address, opened when first used."""

    def __init__(self, security: SecurityConfig) -> None:
        self._security = security
        self._engines: dict[str, EngineClient] = {}
        self._local: dict[str, Generate] = {}

    def add_local(self, address: str, generate: Generate) -> None:
        """The engine at `address` is in this process."""
        self._local[address] = generate

    async def generate(
        self, address: str, generation: Generation, bounds: VersionBounds
    ) -> list[Delta]:
        """One whole delta per sample, by index. Cancelling it aborts the request in the engine.

        Raises RemoteError, wherever the engine is.
        """
        local = self._local.get(address)
        if local is None:
            return await self._ask(address, generation, bounds)
        try:
            return await local(generation, bounds)
        except ServiceError as error:
            raise error_from_status(error.to_status()) from None

    async def close(self) -> None:
        """Close all channels."""
        for engine in self._engines.values():
            await engine.close()

    async def _ask(
        self, address: str, generation: Generation, bounds: VersionBounds
    ) -> list[Delta]:
        engine = self._engines.get(address)
        if engine is None:
            engine = self._engines[address] = EngineClient(address, self._security)
        request = pb.GenerateRequest(
            request_id=generation.request_id,
            prompt_token_ids=generation.prompt_token_ids,
            sampling=sampling_to_proto(generation.sampling),
            sample_count=generation.sample_count,
            dp_rank=generation.dp_rank,
            versions=bounds_to_proto(bounds),
        )
        with typed_errors():
            response = await engine.stub.Generate(request)
        return [delta_from_proto(completion) for completion in response.completions]
