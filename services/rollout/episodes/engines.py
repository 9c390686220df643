"""Engines of an episode worker: leased by dp rank from the router, asked over gRPC or directly.

An engine in this process is asked directly; where there is no router, it alone is leased.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import grpc

from services.rollout.engine.interface import Delta, Engine, Generation, TokenScores
from services.rollout.engine.servicer import complete, score, stream
from services.rollout.engine.wire import (
    MediaReader,
    VersionBounds,
    bounds_to_proto,
    delta_from_proto,
    media_to_proto,
    sampling_to_proto,
    scores_from_proto,
)
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import ClientCache, EngineClient, error_from_status, typed_errors
from sluice.router_client import Lease, LeaseClient, LeaseDemand
from sluice.runtime.errors import ServiceError
from sluice.runtime.security import SecurityConfig
from sluice.samples.sample import MediaSpan


class EngineAccess:
    """Asks engines by address; each channel is opened when first used."""

    def __init__(self, security: SecurityConfig, media: MediaReader, processor: str) -> None:
        """`media` is for engines in this process; others read for themselves.

        `processor`: digest of the rules by which images are prepared here, empty where none are.
        """
        self._clients, self._media = ClientCache(EngineClient, security), media
        self._processor = processor
        self._local: dict[str, Engine] = {}

    def add_local(self, address: str, engine: Engine) -> None:
        """Add an engine in this process, which is asked directly at `address`."""
        self._local[address] = engine

    async def generate(
        self,
        address: str,
        generation: Generation,
        bounds: VersionBounds,
        media: Sequence[MediaSpan] = (),
    ) -> list[Delta]:
        """Returns one whole delta per sample, by index. Cancelling aborts the request.

        `media`: what the placeholders of the prompt stand for. Raises RemoteError, wherever the
        engine is.
        """
        local, temperature = self._local.get(address), generation.sampling.temperature
        if local is None:
            request = _request(self._shown(generation, media), bounds, media)
            with typed_errors():
                response = await self._clients[address].stub.Generate(request)
            return [delta_from_proto(c, temperature=temperature) for c in response.completions]
        with _as_remote():
            return await complete(local, await self._with_media(generation, media), bounds)

    async def stream(
        self,
        address: str,
        generation: Generation,
        bounds: VersionBounds,
        media: Sequence[MediaSpan] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Yields deltas as they come; closing it aborts the request. Raises RemoteError."""
        local, temperature = self._local.get(address), generation.sampling.temperature
        if local is None:
            request = pb.StreamGenerateRequest(
                generate=_request(self._shown(generation, media), bounds, media)
            )
            with typed_errors():
                async for response in self._clients[address].stub.StreamGenerate(request):
                    yield delta_from_proto(response.delta, temperature=temperature)
            return
        with _as_remote():
            generation = await self._with_media(generation, media)
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

    async def _with_media(self, generation: Generation, media: Sequence[MediaSpan]) -> Generation:
        if not media:
            return generation
        read = await self._media.read(media_to_proto(media))
        return replace(self._shown(generation, media), media=read)

    def _shown(self, generation: Generation, media: Sequence[MediaSpan]) -> Generation:
        return replace(generation, processor=self._processor) if media else generation


@contextlib.contextmanager
def _as_remote() -> Iterator[None]:
    """Turns what an engine in this process refuses into RemoteError, as others refuse it."""
    try:
        yield
    except ServiceError as error:
        raise error_from_status(error.to_status()) from None


def _request(
    generation: Generation, bounds: VersionBounds, media: Sequence[MediaSpan]
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=generation.request_id,
        prompt_token_ids=generation.prompt_token_ids,
        sampling=sampling_to_proto(generation.sampling),
        sample_count=generation.sample_count,
        dp_rank=generation.dp_rank,
        versions=bounds_to_proto(bounds),
        media=media_to_proto(media),
        processor=generation.processor,
        takes_columns=True,
        sampled_count=generation.sampled_count,
    )


LOCAL_ADDRESS = "local"  # of the engine in this process, where it serves no other


@dataclass(frozen=True)
class Hints:
    """Tells the router of samples that it is asked to place.

    sessions: of the conversation that each belongs to, or none: its turns go to the same dp rank,
    which has `cached_tokens` of the prompt in its cache. expected_tokens: sampled ones of each,
    0 where nothing is known.
    """

    sessions: tuple[str, ...] = ()
    cached_tokens: int = 0
    expected_tokens: float = 0.0

    @classmethod
    def of_conversations(cls, count: int) -> Self:
        """Returns hints of new conversations, for their first turn."""
        prefix = uuid.uuid4()
        return cls(tuple(f"{prefix}/{index}" for index in range(count)))

    def of(self, indices: Sequence[int]) -> Hints:
        """Returns the hints of some of the samples."""
        if not self.sessions:
            return self
        return replace(self, sessions=tuple(self.sessions[index] for index in indices))

    def with_cache(self, tokens: int) -> Hints:
        """Returns hints for a later turn."""
        return replace(self, cached_tokens=tokens) if self.sessions else self


NO_HINTS = Hints()


class LeaseSource(Protocol):
    """Says which engine samples what."""

    async def request(
        self,
        group_id: str,
        count: int,
        bounds: VersionBounds,
        pool: str,
        hints: Hints = NO_HINTS,
    ) -> list[asyncio.Future[Lease]]: ...

    def release(
        self, pool: str, leases: Sequence[Lease], outcome: router_pb.Outcome, tokens: Sequence[int]
    ) -> None: ...

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None: ...

    def end(self, pool: str, hints: Hints) -> None: ...


class RouterLeases:
    """Asks the router, with one lease client per pool, all of one name."""

    def __init__(self, channel: grpc.aio.Channel, client_id: str = "") -> None:
        self._channel, self._client_id = channel, client_id
        self._clients: dict[str, LeaseClient] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def request(
        self,
        group_id: str,
        count: int,
        bounds: VersionBounds,
        pool: str,
        hints: Hints = NO_HINTS,
    ) -> list[asyncio.Future[Lease]]:
        """Returns one future per sample, done when an engine has room; cancelling gives it up.

        Raises RemoteError when the router refuses for good; waits while no engine will do.
        """
        wanted = LeaseDemand(
            count=count,
            min_version=bounds.min_version,
            exact_version=bounds.exact_version,
            groups=[(group_id, count)],
            sessions=hints.sessions,
            cached_tokens=[hints.cached_tokens] * count if hints.sessions else (),
            expected_tokens=[hints.expected_tokens] * count if hints.expected_tokens else (),
        )
        return await self._client(pool).request(wanted)

    def release(
        self, pool: str, leases: Sequence[Lease], outcome: router_pb.Outcome, tokens: Sequence[int]
    ) -> None:
        """Give leases back, with how their requests ended; does not wait."""
        self._client(pool).release(leases, outcome, tokens)

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None:
        """Stop waiting for leases, and give back those that came.

        Those given back before are ignored.
        """
        bound = []
        for future in futures:
            if not future.cancel() and not future.cancelled():
                bound.append(future.result())
        self.release(pool, bound, router_pb.OUTCOME_ABORTED, ())

    def end(self, pool: str, hints: Hints) -> None:
        """Say that no further turn comes, so that no rank is kept for one; does not wait."""
        if hints.sessions:
            ended = self._client(pool).end_sessions(hints.sessions)
            task = asyncio.create_task(ended, name="end sessions")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Give everything back."""
        await asyncio.gather(*self._ending)
        for client in self._clients.values():
            await client.close()

    def _client(self, pool: str) -> LeaseClient:
        client = self._clients.get(pool)
        if client is None:
            client = self._clients[pool] = LeaseClient(
                self._channel, pool=pool, client_id=self._client_id
            )
            client.start()
        return client


class LocalLeases:
    """Leases one engine without limit: it queues what it has no room for.

    Its dp ranks take turns.
    """

    def __init__(self, engine: Engine, engine_id: str) -> None:
        self._engine, self._engine_id = engine, engine_id
        self._turns = itertools.count()

    async def request(
        self,
        group_id: str,
        count: int,
        bounds: VersionBounds,
        pool: str,
        hints: Hints = NO_HINTS,
    ) -> list[asyncio.Future[Lease]]:
        """Returns one lease per sample, at once."""
        ranks = max(1, len(self._engine.status().rank_loads))
        rank = next(self._turns) % ranks  # one for all: they share the prompt
        futures = []
        for _ in range(count):
            future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
            future.set_result(Lease(0, self._engine_id, LOCAL_ADDRESS, rank))
            futures.append(future)
        return futures

    def release(
        self, pool: str, leases: Sequence[Lease], outcome: router_pb.Outcome, tokens: Sequence[int]
    ) -> None:
        """Does nothing: nobody counts them."""

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None:
        """Does nothing: nobody counts them."""

    def end(self, pool: str, hints: Hints) -> None:
        """Does nothing: no rank is kept."""
