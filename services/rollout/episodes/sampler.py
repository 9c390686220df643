"""Samples the continuations of one prompt on leased engines, and on others when one is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc

from services.rollout import metrics
from services.rollout.engine import Delta, FinishReason, Sampling
from services.rollout.episodes.engines import EngineChannels
from services.rollout.episodes.leases import Lease, LeaseSource
from services.rollout.wire import VersionBounds, delta_from_proto, sampling_to_proto
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.client import RemoteError, new_request_id
from sluice.runtime.errors import ServiceError

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
RETRIED = frozenset(  # another engine, or the same one later, may do
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
RETRIED_REASONS = frozenset({"VERSION_UNAVAILABLE", "NO_WEIGHTS", "REQUEST_EXISTS"})


class EngineError(ServiceError):
    """An engine refused or was lost as often as is allowed; code and reason are its own."""

    def __init__(self, error: RemoteError, attempts: int) -> None:
        super().__init__(str(error), attempts=attempts, **error.metadata)
        self.code, self.reason = error.code, error.reason or "ENGINE_LOST"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is to be sampled: `sample_count` continuations, sample i by seeds[i] if given."""

    token_ids: tuple[int, ...]
    sample_count: int
    sampling: Sampling
    bounds: VersionBounds
    pool: str


@dataclass(frozen=True)
class _Part:
    """Samples that one request asks of one dp rank, with the leases for them."""

    leases: list[Lease]
    indices: list[int]


class Sampler:
    """Leases, asks, and asks again elsewhere for what was lost."""

    def __init__(self, leases: LeaseSource, engines: EngineChannels, attempts: int) -> None:
        self._leases, self._engines, self._attempts = leases, engines, attempts

    async def sample(self, prompt: Prompt) -> list[Delta]:
        """One whole delta per sample, by index; samples that came are not drawn again.

        Raises EngineError when an engine refuses, or all attempts failed.
        """
        done: dict[int, Delta] = {}
        for attempt in range(1, self._attempts + 1):
            missing = [index for index in range(prompt.sample_count) if index not in done]
            error = await self._attempt(prompt, missing, done)
            if error is None:
                return [done[index] for index in range(prompt.sample_count)]
            if not _is_retried(error) or attempt == self._attempts:
                raise EngineError(error, attempt)
            logger.info("attempt %d: %s", attempt, error)
            metrics.RETRIES.inc()
            await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(
        self, prompt: Prompt, missing: Sequence[int], done: dict[int, Delta]
    ) -> RemoteError | None:
        """Adds what was sampled to `done`; the worst error of its parts."""
        leases = await self._leases.acquire(len(missing), prompt.bounds, prompt.pool)
        try:
            parts = _parts(leases, missing)
            errors = await asyncio.gather(*(self._ask(prompt, part, done) for part in parts))
        finally:
            self._leases.release(leases)
        return min((error for error in errors if error), key=_is_retried, default=None)

    async def _ask(self, prompt: Prompt, part: _Part, done: dict[int, Delta]) -> RemoteError | None:
        seeds = prompt.sampling.seeds
        sampling = replace(
            prompt.sampling, seeds=tuple(seeds[index] for index in part.indices) if seeds else ()
        )
        request = pb.GenerateRequest(
            request_id=new_request_id(),
            prompt_token_ids=prompt.token_ids,
            sampling=sampling_to_proto(sampling),
            sample_count=len(part.indices),
            dp_rank=part.leases[0].dp_rank,
            versions=pb.VersionBounds(
                min_version=prompt.bounds.min_version, exact_version=prompt.bounds.exact_version
            ),
        )
        try:
            response = await self._engines.generate(part.leases[0].address, request)
        except RemoteError as error:
            return error
        for index, completion in zip(part.indices, response.completions, strict=True):
            delta = delta_from_proto(completion)
            if delta.finish_reason is not FinishReason.ABORTED:
                done[index] = delta
        if all(index in done for index in part.indices):
            return None
        return RemoteError(
            grpc.StatusCode.ABORTED, "ENGINE_ABORTED", "the engine aborted the request", {}
        )


def _is_retried(error: RemoteError) -> bool:
    return error.code in RETRIED or error.reason in RETRIED_REASONS


def _parts(leases: Sequence[Lease], indices: Sequence[int]) -> list[_Part]:
    """One part per (engine, dp rank), so that its samples share the prompt's cache."""

    def target(pair: tuple[Lease, int]) -> tuple[str, int]:
        return pair[0].address, pair[0].dp_rank

    pairs = zip(
        sorted(leases, key=lambda lease: (lease.address, lease.dp_rank)), indices, strict=True
    )
    return [
        _Part([lease for lease, _ in group], [index for _, index in group])
        for _, found in itertools.groupby(pairs, key=target)
        for group in [list(found)]
    ]
