"""Samples the continuations of one prompt on leased engines, and on others when one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import grpc

from services.rollout import metrics
from services.rollout.engine import Delta, FinishReason, Generation, Sampling
from services.rollout.episodes.engines import EngineAccess
from services.rollout.episodes.leases import RouterLeases
from services.rollout.wire import VersionBounds
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RemoteError, new_request_id
from sluice.router_client import Lease, outcome_of
from sluice.runtime.errors import ServiceError
from sluice.runtime.waits import Waits

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
LINGER_SECONDS = 0.02  # for leases that come almost together
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
    """Engines refused or were lost as often as is allowed, or the router refuses for good.

    Code and reason are those of the last refusal.
    """

    def __init__(self, error: RemoteError, attempts: int) -> None:
        super().__init__(str(error), attempts=attempts, **error.metadata)
        self.code, self.reason = error.code, error.reason or "ENGINE_LOST"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is to be sampled: `sample_count` continuations, sample i by seeds[i] if given."""

    group_id: str
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

    def __init__(
        self, leases: RouterLeases, engines: EngineAccess, waits: Waits, attempts: int
    ) -> None:
        self._leases, self._engines, self._waits = leases, engines, waits
        self._attempts = attempts

    async def sample(self, prompt: Prompt) -> list[Delta]:
        """One whole delta per sample, by index; samples that came are not drawn again.

        Raises EngineError when an engine refuses, or all attempts failed.
        """
        done: dict[int, Delta] = {}
        for attempt in range(1, self._attempts + 1):
            missing = [index for index in range(prompt.sample_count) if index not in done]
            try:
                error = await self._attempt(prompt, missing, done)
            except RemoteError as refusal:  # of the router, which is asked again for the others
                raise EngineError(refusal, attempt) from None
            if error is None:
                return [done[index] for index in range(prompt.sample_count)]
            if not _is_retried(error) or attempt == self._attempts:
                raise EngineError(error, attempt)
            logger.info("group %s, attempt %d: %s", prompt.group_id, attempt, error)
            metrics.RETRIES.inc()
            await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(
        self, prompt: Prompt, missing: Sequence[int], done: dict[int, Delta]
    ) -> RemoteError | None:
        """Adds what was sampled to `done`; the worst error of its parts.

        Samples are asked for as their leases come, those of one dp rank together, so that they
        share the prompt's cache.
        """
        with self._waits.waiting(f"leases for group {prompt.group_id}", on=["router"]):
            futures = await self._leases.request(
                prompt.group_id, len(missing), prompt.bounds, prompt.pool
            )
        waiting = dict(zip(futures, missing, strict=True))
        asking: set[asyncio.Task[RemoteError | None]] = set()
        try:
            while waiting:
                if not all(future.done() for future in waiting):
                    with self._waits.waiting(f"room for group {prompt.group_id}", on=["router"]):
                        await _first_leases(waiting)
                for part in _take_parts(waiting):
                    asking.add(asyncio.create_task(self._ask(prompt, part, done)))
            errors = await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            self._leases.give_up(prompt.pool, waiting)
        return min((error for error in errors if error), key=_is_retried, default=None)

    async def _ask(self, prompt: Prompt, part: _Part, done: dict[int, Delta]) -> RemoteError | None:
        outcome, lengths = router_pb.OUTCOME_ABORTED, list[int]()
        lease = part.leases[0]
        try:
            with self._waits.waiting(f"samples of group {prompt.group_id}", on=[lease.engine_id]):
                deltas = await self._engines.generate(
                    lease.address, _generation(prompt, part), prompt.bounds
                )
            outcome, lengths = router_pb.OUTCOME_OK, [len(d.token_ids) for d in deltas]
        except RemoteError as error:
            outcome = outcome_of(error.code)
            return error
        finally:
            self._leases.release(prompt.pool, part.leases, outcome, lengths)
        for index, delta in zip(part.indices, deltas, strict=True):
            if delta.finish_reason is not FinishReason.ABORTED:
                done[index] = delta
        if all(index in done for index in part.indices):
            return None
        return RemoteError(
            grpc.StatusCode.ABORTED, "ENGINE_ABORTED", "the engine aborted the request", {}
        )


async def _first_leases(waiting: Mapping[asyncio.Future[Lease], int]) -> None:
    """Until a lease came, and a moment longer for those that come with it."""
    first = asyncio.FIRST_COMPLETED
    _, pending = await asyncio.wait(waiting, return_when=first)
    if pending:
        await asyncio.wait(pending, timeout=LINGER_SECONDS)


def _take_parts(waiting: dict[asyncio.Future[Lease], int]) -> list[_Part]:
    """Moves samples that have their lease into one part per (engine, dp rank)."""
    parts: dict[tuple[str, int], _Part] = {}
    for future in [future for future in waiting if future.done()]:
        index, lease = waiting.pop(future), future.result()
        part = parts.setdefault((lease.address, lease.dp_rank), _Part([], []))
        part.leases.append(lease)
        part.indices.append(index)
    return list(parts.values())


def _generation(prompt: Prompt, part: _Part) -> Generation:
    seeds = prompt.sampling.seeds
    chosen = tuple(seeds[index] for index in part.indices) if seeds else ()
    return Generation(
        request_id=new_request_id(),
        prompt_token_ids=prompt.token_ids,
        sampling=replace(prompt.sampling, seeds=chosen),
        sample_count=len(part.indices),
        dp_rank=part.leases[0].dp_rank,
    )


def _is_retried(error: RemoteError) -> bool:
    return error.code in RETRIED or error.reason in RETRIED_REASONS
