"""How long answers to a prompt were, for the next time it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc

from services.rollout import metrics
from services.rollout.engine.interface import Delta, FinishReason, Generation
from services.rollout.engine.wire import join_deltas
from services.rollout.episodes.drafts import PartialSamples, SamplingPrompt
from services.rollout.episodes.engines import EngineAccess
from services.rollout.episodes.leases import LeaseSource
from sluice.api.rollout.v1 import trace_pb2
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RemoteError
from sluice.router_client import Lease, outcome_of
from sluice.runtime.errors import ServiceError
from sluice.runtime.waits import Waits

PROMPTS = 65_536  # remembered, those asked last
_NEW_SHARE = 0.5  # of the latest group in the mean; the policy changes from epoch to epoch


class PromptHistory:
    """Mean sampled tokens of the samples of a prompt, by its token ids."""

    def __init__(self, capacity: int = PROMPTS) -> None:
        self._capacity = capacity
        self._means: OrderedDict[int, float] = OrderedDict()  # by hash; a clash misleads a little

    def expected(self, prompt: tuple[int, ...]) -> float:
        """Tokens of a sample, 0 where nothing is known."""
        return self._means.get(hash(prompt), 0.0)

    def learn(self, prompt: tuple[int, ...], lengths: Sequence[int]) -> None:
        """Samples of one group, at least one, have ended."""
        key, mean = hash(prompt), sum(lengths) / len(lengths)
        before = self._means.pop(key, mean)
        self._means[key] = before + _NEW_SHARE * (mean - before)
        if len(self._means) > self._capacity:
            self._means.popitem(last=False)


logger = logging.getLogger(__name__)

Listener = Callable[[Delta], None]

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


@dataclass(frozen=True)
class _Part:
    """Samples that one request asks of one dp rank, with the leases for them."""

    leases: list[Lease]
    indices: list[int]


class Sampler:
    """Leases, asks, and asks again elsewhere for what was lost or cut off."""

    def __init__(
        self,
        leases: LeaseSource,
        engines: EngineAccess,
        waits: Waits,
        *,
        attempts: int,
        chunk_tokens: int = 0,
    ) -> None:
        self._leases, self._engines, self._waits = leases, engines, waits
        self._attempts, self._chunk_tokens = attempts, chunk_tokens
        self._history = PromptHistory()

    async def sample(self, prompt: SamplingPrompt, listener: Listener | None = None) -> list[Delta]:
        """One whole delta per sample, by index; tokens that came are not drawn again.

        `listener` gets them as they come, by index of the sample; of finish reasons the answer
        is to be believed. What it raises ends the sampling.

        Raises EngineError when an engine refuses, or `attempts` in a row brought no token.
        """
        if not prompt.hints.cached_tokens:  # no prompt of a later turn comes again
            expected = self._history.expected(prompt.token_ids)
            prompt = replace(prompt, hints=replace(prompt.hints, expected_tokens=expected))
        drafts, failures = PartialSamples(prompt, self._chunk_tokens), 0
        while missing := drafts.missing:
            before = drafts.token_count
            try:
                error = await self._attempt(prompt, missing, drafts, listener)
            except RemoteError as refusal:  # of the router, which is asked again for the others
                raise EngineError(refusal, failures + 1) from None
            if error is None:
                continue
            failures = 0 if drafts.token_count > before else failures + 1
            if not is_retried(error) or failures >= self._attempts:
                raise EngineError(error, failures)
            logger.info("group %s, failure %d: %s", prompt.group_id, failures, error)
            metrics.RETRIES.inc()
            await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** max(0, failures - 1))
        ended = drafts.ended()
        if not prompt.hints.cached_tokens:
            self._history.learn(prompt.token_ids, [len(delta.token_ids) for delta in ended])
        return ended

    def leave(self, prompt: SamplingPrompt) -> None:
        """Its conversations have no further turn."""
        self._leases.end(prompt.pool, prompt.hints)

    async def _attempt(
        self,
        prompt: SamplingPrompt,
        missing: Sequence[int],
        drafts: PartialSamples,
        listener: Listener | None,
    ) -> RemoteError | None:
        """Adds what was sampled to `drafts`; the worst error of its parts.

        Samples are asked for as their leases come, those of one dp rank together, so that they
        share the prompt's cache.
        """
        with self._waits.waiting(f"leases for group {prompt.group_id}", on=["router"]):
            futures = await self._leases.request(
                prompt.group_id,
                len(missing),
                prompt.bounds,
                prompt.pool,
                prompt.hints.of(missing),
            )
        waiting = dict(zip(futures, missing, strict=True))
        asking: set[asyncio.Task[RemoteError | None]] = set()
        try:
            while waiting:
                if not all(future.done() for future in waiting):
                    with self._waits.waiting(f"room for group {prompt.group_id}", on=["router"]):
                        await _first_leases(waiting)
                for part in _take_parts(waiting, drafts):
                    asking.add(asyncio.create_task(self._ask(prompt, part, drafts, listener)))
            errors = await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            # All of them: a task that is cancelled before its first step gives nothing back.
            self._leases.give_up(prompt.pool, futures)
        return min((error for error in errors if error), key=is_retried, default=None)

    async def _ask(
        self, prompt: SamplingPrompt, part: _Part, drafts: PartialSamples, listener: Listener | None
    ) -> RemoteError | None:
        outcome, lengths = router_pb.OUTCOME_ABORTED, list[int]()
        lease = part.leases[0]
        prompt.mark(trace_pb2.SPAN_KIND_LEASE, lease.engine_id, part.indices)
        try:
            with self._waits.waiting(f"samples of group {prompt.group_id}", on=[lease.engine_id]):
                generation = drafts.generation(part.indices, lease.dp_rank)
                if listener is None:
                    deltas = await self._engines.generate(lease.address, generation, prompt.bounds)
                else:
                    deltas = await self._listen(lease.address, generation, part, drafts, listener)
            outcome, lengths = router_pb.OUTCOME_OK, [len(d.token_ids) for d in deltas]
        except RemoteError as error:
            outcome = outcome_of(error.code)
            prompt.mark(trace_pb2.SPAN_KIND_GENERATE, lease.engine_id, part.indices)
            if error.reason != "PROMPT_TOO_LONG" or not drafts.is_begun(part.indices[0]):
                return error
            drafts.end(part.indices[0])
            return None
        finally:
            self._leases.release(prompt.pool, part.leases, outcome, lengths)
        pairs = list(zip(part.indices, deltas, strict=True))
        prompt.mark_sampled(lease.engine_id, pairs)
        if all([drafts.add(index, delta) for index, delta in pairs]):
            return None
        return RemoteError(
            grpc.StatusCode.ABORTED, "ENGINE_ABORTED", "the engine aborted the request", {}
        )

    async def _listen(
        self,
        address: str,
        generation: Generation,
        part: _Part,
        drafts: PartialSamples,
        listener: Listener,
    ) -> list[Delta]:
        """`generate`, told token by token; what a lost engine told is added to `drafts`."""
        told: list[Delta] = []
        stream = self._engines.stream(address, replace(generation, stream=True), drafts.bounds)
        try:
            async with contextlib.aclosing(stream):
                async for delta in stream:
                    told.append(delta)
                    listener(replace(delta, index=part.indices[delta.index]))
        except RemoteError:
            for delta in join_deltas(told):  # nobody is told other tokens later
                reason = delta.finish_reason or FinishReason.ABORTED
                drafts.add(part.indices[delta.index], replace(delta, finish_reason=reason))
            raise
        return join_deltas(told)


async def _first_leases(waiting: Mapping[asyncio.Future[Lease], int]) -> None:
    """Until a lease came, and a moment longer for those that come with it."""
    first = asyncio.FIRST_COMPLETED
    _, pending = await asyncio.wait(waiting, return_when=first)
    if pending:
        await asyncio.wait(pending, timeout=LINGER_SECONDS)


def _take_parts(waiting: dict[asyncio.Future[Lease], int], drafts: PartialSamples) -> list[_Part]:
    """Moves samples that have their lease into one part per (engine, dp rank), begun ones alone."""
    parts: dict[tuple[str, int, int], _Part] = {}
    for future in [future for future in waiting if future.done()]:
        index, lease = waiting.pop(future), future.result()
        alone = index if drafts.is_begun(index) else -1
        part = parts.setdefault((lease.address, lease.dp_rank, alone), _Part([], []))
        part.leases.append(lease)
        part.indices.append(index)
    return list(parts.values())


def is_retried(error: RemoteError) -> bool:
    return error.code in RETRIED or error.reason in RETRIED_REASONS
