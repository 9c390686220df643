"""Asks the engines that leases name: over gRPC, or directly where the engine is in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

from services.rollout.engine.generations import complete, score, stream
from services.rollout.engine.interface import Delta, Engine, Generation, TokenScores
from services.rollout.engine.wire import (
    VersionBounds,
    bounds_to_proto,
    delta_from_proto,
    sampling_to_proto,
    scores_from_proto,
)
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.client import ClientCache, EngineClient, error_from_status, typed_errors
from sluice.runtime.errors import ServiceError
from sluice.runtime.security import SecurityConfig


class EngineAccess:
    """Asks engines by address; each channel is opened when first used."""

    def __init__(self, security: SecurityConfig) -> None:
        self._clients = ClientCache(EngineClient, security)
        self._local: dict[str, Engine] = {}

    def add_local(self, address: str, engine: Engine) -> None:
        """Add an engine in this process, which is asked directly at `address`."""
        self._local[address] = engine

    async def generate(
        self, address: str, generation: Generation, bounds: VersionBounds
    ) -> list[Delta]:
        """Returns one whole delta per sample, by index. Cancelling aborts the request.

        Raises RemoteError, wherever the engine is.
        """
        local, temperature = self._local.get(address), generation.sampling.temperature
        if local is None:
            request = _request(generation, bounds)
            with typed_errors():
                response = await self._clients[address].stub.Generate(request)
            return [delta_from_proto(c, temperature=temperature) for c in response.completions]
        with _as_remote():
            return await complete(local, generation, bounds)

    async def stream(
        self, address: str, generation: Generation, bounds: VersionBounds
    ) -> AsyncGenerator[Delta, None]:
        """Yields deltas as they come; closing it aborts the request. Raises RemoteError."""
        local, temperature = self._local.get(address), generation.sampling.temperature
        if local is None:
            request = pb.StreamGenerateRequest(generate=_request(generation, bounds))
            with typed_errors():
                async for response in self._clients[address].stub.StreamGenerate(request):
                    yield delta_from_proto(response.delta, temperature=temperature)
            return
        with _as_remote():
            async with contextlib.aclosing(stream(local, generation, bounds)) as deltas:
                async for delta in deltas:
                    yield delta

    async def score(
        self,
        address: str,
        token_ids: Sequence[int],
        prompt_length: int,
        top_count: int,
        bounds: VersionBounds,
    ) -> TokenScores:
        """Returns log-probabilities of token_ids[prompt_length:]. Raises RemoteError."""
        local = self._local.get(address)
        if local is None:
            request = pb.ScoreRequest(
                token_ids=token_ids,
                prompt_length=prompt_length,
                top_count=top_count,
                versions=bounds_to_proto(bounds),
            )
            with typed_errors():
                return scores_from_proto(await self._clients[address].stub.Score(request))
        with _as_remote():
            bounds.check(local.status().version)
            scores = await score(local, token_ids, prompt_length, top_count)
            bounds.check(local.status().version)
            return scores

    async def close(self) -> None:
        """Close all channels."""
        await self._clients.close()


@contextlib.contextmanager
def _as_remote() -> Iterator[None]:
    """Turns what an engine in this process refuses into RemoteError, as others refuse it."""
    try:
        yield
    except ServiceError as error:
        raise error_from_status(error.to_status()) from None


def _request(generation: Generation, bounds: VersionBounds) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=generation.request_id,
        prompt_token_ids=generation.prompt_token_ids,
        sampling=sampling_to_proto(generation.sampling),
        sample_count=generation.sample_count,
        dp_rank=generation.dp_rank,
        versions=bounds_to_proto(bounds),
    )
