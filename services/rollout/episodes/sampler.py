"""Samples the continuations of a prompt: over several engines, and again where one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import grpc

from services.rollout import metrics
from services.rollout.engine.interface import (
    Delta,
    FinishReason,
    Generation,
    Sampling,
    TokenScores,
)
from services.rollout.engine.wire import VersionBounds, join_deltas, join_experts
from services.rollout.episodes.engines import NO_HINTS, EngineAccess, Hints, LeaseSource
from services.rollout.episodes.images import collapse
from services.rollout.episodes.trajectory import Timeline
from sluice.api.rollout.v1 import trace_pb2
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RemoteError, new_request_id
from sluice.router_client import Lease, outcome_of
from sluice.runtime.errors import ServiceError
from sluice.runtime.recovery import PASSING, Backoff
from sluice.runtime.waits import Waits
from sluice.samples.sample import MediaSpan

logger = logging.getLogger(__name__)

Listener = Callable[[Delta], None]

BACKOFF = Backoff(first=0.05, longest=2.0)
LINGER_SECONDS = 0.02  # for leases that come almost together
RETRIED = PASSING | {  # another engine may do
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
}
RETRIED_REASONS = frozenset({"VERSION_UNAVAILABLE", "NO_WEIGHTS", "REQUEST_EXISTS"})
PROMPTS = 65_536  # remembered, those asked last
_NEW_SHARE = 0.5  # of the latest group in the mean; the policy changes from epoch to epoch


class EngineError(ServiceError):
    """Engines refused or were lost as often as is allowed, or the router refuses for good.

    Code and reason are those of the last refusal; what no message can hold was asked wrongly.
    """

    def __init__(self, error: RemoteError, attempts: int) -> None:
        super().__init__(str(error), attempts=attempts, **error.metadata)
        too_large = error.is_too_large  # grpc's code is that of servers with much to do
        self.code = grpc.StatusCode.INVALID_ARGUMENT if too_large else error.code
        self.reason = error.reason or "ENGINE_LOST"


@dataclass(frozen=True, kw_only=True)
class SamplingPrompt:
    """What is to be sampled: `sample_count` continuations, sample i by seeds[i] if given.

    `media` are what the prompt shows, each in place of its tokens. On the timeline samples count
    from `first_episode` on.
    """

    group_id: str
    token_ids: tuple[int, ...]
    sample_count: int
    sampling: Sampling
    bounds: VersionBounds
    pool: str
    timeline: Timeline | None = None
    first_episode: int = 0
    hints: Hints = NO_HINTS
    media: tuple[MediaSpan, ...] = ()

    def mark(self, kind: trace_pb2.SpanKind, place: str, indices: Sequence[int]) -> None:
        """Write on the timeline what these samples did until now."""
        if self.timeline is not None:
            self.timeline.mark(kind, place, [self.first_episode + index for index in indices])

    def mark_sampled(self, place: str, deltas: Iterable[tuple[int, Delta]]) -> None:
        """Write on the timeline that these samples came from an engine."""
        if self.timeline is not None:
            first = self.first_episode
            self.timeline.sampled(place, {first + index: delta for index, delta in deltas})


class PartialSamples:
    """Gathers what has come of each sample. One that was cut off goes on from its tokens.

    An engine is asked for at most `chunk_tokens` at once (0: for all), so that no more is lost
    with it.
    """

    def __init__(self, prompt: SamplingPrompt, chunk_tokens: int) -> None:
        self._prompt, self._chunk = prompt, chunk_tokens
        self._open: dict[int, Delta] = {}
        self._done: dict[int, Delta] = {}

    @property
    def missing(self) -> list[int]:
        """Samples that have not ended."""
        return [i for i in range(self._prompt.sample_count) if i not in self._done]

    @property
    def token_count(self) -> int:
        """Tokens kept so far."""
        deltas = (*self._open.values(), *self._done.values())
        return sum(len(delta.token_ids) for delta in deltas)

    def is_begun(self, index: int) -> bool:
        """Whether a sample has tokens to go on from; then no other shares its request."""
        return index in self._open

    def ended(self) -> list[Delta]:
        """Returns one whole delta per sample, by index; all have ended."""
        return [self._done[index] for index in range(self._prompt.sample_count)]

    def generation(self, indices: Sequence[int], dp_rank: int) -> Generation:
        """Returns the request for these samples: several that have not begun, or one that has.

        Its prompt has one placeholder for each of the media.
        """
        prompt = collapse(self._prompt.token_ids, self._prompt.media)
        seeds = self._prompt.sampling.seeds
        so_far = self._open.get(indices[0])
        sampled, budget = so_far.token_ids if so_far else (), self._budget(indices[0])
        owed = max(0, self._prompt.sampling.min_new_tokens - len(sampled))
        sampling = replace(
            self._prompt.sampling,
            seeds=tuple(seeds[index] for index in indices) if seeds else (),
            max_new_tokens=budget,
            min_new_tokens=min(owed, budget),
        )
        return Generation(
            request_id=new_request_id(),
            prompt_token_ids=(*prompt, *sampled),
            sampling=sampling,
            sample_count=len(indices),
            dp_rank=dp_rank,
            sampled_count=len(sampled),
        )

    def add(self, index: int, delta: Delta) -> bool:
        """Take what an engine answered for a sample; false when the engine aborted it."""
        if delta.index != index:
            delta = delta._replace(index=index)
        if self._is_whole(index, delta):
            self._done[index] = delta
            return True
        asked = self._budget(index)
        whole = _append(self._open.pop(index, None), delta)
        sampling, aborted = self._prompt.sampling, delta.finish_reason is FinishReason.ABORTED
        is_full = delta.finish_reason is FinishReason.LENGTH and len(delta.token_ids) == asked
        # a stop string may stand at the end of a chunk that owes more tokens than it has
        is_early = len(whole.token_ids) < sampling.min_new_tokens
        if aborted or is_full or (is_early and delta.finish_reason is FinishReason.STOP):
            if len(whole.token_ids) < sampling.max_new_tokens:
                if whole.token_ids:
                    self._open[index] = whole._replace(finish_reason=None)
                return not aborted
            whole = whole._replace(finish_reason=FinishReason.LENGTH)
        elif whole.finish_reason is not delta.finish_reason:
            whole = whole._replace(finish_reason=delta.finish_reason)
        self._done[index] = whole
        return True

    def end(self, index: int) -> None:
        """End a sample that cannot grow: no engine has room for one token more."""
        self._done[index] = self._open.pop(index)._replace(finish_reason=FinishReason.LENGTH)

    def _is_whole(self, index: int, delta: Delta) -> bool:
        """Whether a first answer surely ends its sample, as most do."""
        if index in self._open:
            return False
        if delta.finish_reason is FinishReason.LENGTH:
            return len(delta.token_ids) == self._prompt.sampling.max_new_tokens
        return delta.finish_reason is FinishReason.STOP and not self._prompt.sampling.min_new_tokens

    def _budget(self, index: int) -> int:
        so_far = self._open.get(index)
        left = self._prompt.sampling.max_new_tokens - (len(so_far.token_ids) if so_far else 0)
        return min(left, self._chunk) if self._chunk else left


def _append(so_far: Delta | None, more: Delta) -> Delta:
    """Joins two answers; spans of `more` count from the start of its own request."""
    if so_far is None:
        return more
    if not more.token_ids:  # aborted before it sampled anything
        return so_far
    spans = tuple(span.shifted(len(so_far.token_ids)) for span in more.spans)
    (joined,) = join_deltas([so_far, more._replace(spans=spans)])
    experts = join_experts(so_far.routed_experts, more.routed_experts)
    return joined._replace(routed_experts=experts)


class PromptHistory:
    """Remembers how long answers to a prompt were: mean tokens of its samples, by its token ids."""

    def __init__(self, capacity: int = PROMPTS) -> None:
        self._capacity = capacity
        self._means: OrderedDict[int, float] = OrderedDict()  # by hash; a clash misleads a little

    def expected(self, prompt: tuple[int, ...]) -> float:
        """Returns the tokens of a sample to expect, 0 for a new prompt."""
        return self._means.get(hash(prompt), 0.0)

    def learn(self, prompt: tuple[int, ...], lengths: Sequence[int]) -> None:
        """Take the lengths of the samples of one group, at least one, that have ended."""
        key, mean = hash(prompt), sum(lengths) / len(lengths)
        before = self._means.pop(key, mean)
        self._means[key] = before + _NEW_SHARE * (mean - before)
        if len(self._means) > self._capacity:
            self._means.popitem(last=False)


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
        """Returns one whole delta per sample, by index; tokens that came are not drawn again.

        `listener` gets them as they come, by index of the sample; of finish reasons the answer
        is to be believed. What it raises ends the sampling.

        Raises EngineError when an engine refuses, or `attempts` in a row brought no token.
        """
        if not prompt.hints.cached_tokens:  # no prompt of a later turn comes again
            expected = self._history.expected(prompt.token_ids)
            prompt = replace(prompt, hints=replace(prompt.hints, expected_tokens=expected))
        partial, failures = PartialSamples(prompt, self._chunk_tokens), 0
        while missing := partial.missing:
            before = partial.token_count
            try:
                error = await self._attempt(prompt, missing, partial, listener)
            except RemoteError as refusal:  # of the router, which is asked again for the others
                raise EngineError(refusal, failures + 1) from None
            if error is None:
                continue
            failures = 0 if partial.token_count > before else failures + 1
            if not is_retried(error) or failures >= self._attempts:
                raise EngineError(error, failures)
            logger.info("group %s, failure %d: %s", prompt.group_id, failures, error)
            metrics.RETRIES.inc()
            await asyncio.sleep(BACKOFF.seconds(failures))
        ended = partial.ended()
        if not prompt.hints.cached_tokens:
            self._history.learn(prompt.token_ids, [len(delta.token_ids) for delta in ended])
        return ended

    async def score(
        self,
        token_ids: Sequence[int],
        prompt_length: int,
        top_count: int,
        bounds: VersionBounds,
        pool: str,
    ) -> TokenScores:
        """Returns log-probabilities of token_ids[prompt_length:]. Raises RemoteError."""
        failures = 0
        while True:
            futures = await self._leases.request(new_request_id(), 1, bounds, pool)
            try:
                with self._waiting_for_room("scores", pool):
                    lease = await futures[0]
            except BaseException:
                self._leases.give_up(pool, futures)
                raise
            outcome: router_pb.Outcome = router_pb.OUTCOME_ABORTED
            try:
                scores = await self._engines.score(
                    lease.address, token_ids, prompt_length, top_count, bounds
                )
                outcome = router_pb.OUTCOME_OK
                return scores
            except RemoteError as error:
                outcome, failures = outcome_of(error.code), failures + 1
                if not is_retried(error) or failures >= self._attempts:
                    raise
            finally:
                self._leases.release(pool, [lease], outcome, ())
            await asyncio.sleep(BACKOFF.seconds(failures))

    def _waiting_for_room(self, what: str, pool: str) -> AbstractContextManager[object]:
        where = f"no engine of pool {pool or 'policy'} has any; the router's own waits say why"
        return self._waits.waiting(f"room for {what}", on=["router"], explain=lambda: where)

    def leave(self, prompt: SamplingPrompt) -> None:
        """Say that its conversations have no further turn."""
        self._leases.end(prompt.pool, prompt.hints)

    async def _attempt(
        self,
        prompt: SamplingPrompt,
        missing: Sequence[int],
        partial: PartialSamples,
        listener: Listener | None,
    ) -> RemoteError | None:
        """Adds what was sampled to `partial`; returns the worst error of its parts.

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
        indices = dict(zip(futures, missing, strict=True))
        arrivals = _Arrivals(futures)
        asking: set[asyncio.Task[RemoteError | None]] = set()
        try:
            while arrivals.left:
                if not arrivals.are_all_there:
                    with self._waiting_for_room(f"group {prompt.group_id}", prompt.pool):
                        await arrivals.wait()
                leases = {indices[future]: future.result() for future in arrivals.take()}
                for part in _parts_of(leases, partial):
                    asking.add(asyncio.create_task(self._ask(prompt, part, partial, listener)))
            errors = await asyncio.gather(*asking)
        except BaseException:
            for task in asking:
                task.cancel()
            # All of them: a task that is cancelled before its first step gives nothing back.
            self._leases.give_up(prompt.pool, futures)
            raise
        return min((error for error in errors if error), key=is_retried, default=None)

    async def _ask(
        self,
        prompt: SamplingPrompt,
        part: _Part,
        partial: PartialSamples,
        listener: Listener | None,
    ) -> RemoteError | None:
        outcome, lengths = router_pb.OUTCOME_ABORTED, list[int]()
        lease = part.leases[0]
        prompt.mark(trace_pb2.SPAN_KIND_LEASE, lease.engine_id, part.indices)
        try:
            with self._waits.waiting(f"samples of group {prompt.group_id}", on=[lease.engine_id]):
                generation = partial.generation(part.indices, lease.dp_rank)
                if listener is None:
                    deltas = await self._engines.generate(
                        lease.address, generation, prompt.bounds, prompt.media
                    )
                else:
                    stream = self._engines.stream(
                        lease.address,
                        replace(generation, stream=True),
                        prompt.bounds,
                        prompt.media,
                    )
                    deltas = await _listen(stream, part.indices, partial, listener)
            outcome, lengths = router_pb.OUTCOME_OK, [len(d.token_ids) for d in deltas]
        except RemoteError as error:
            outcome = outcome_of(error.code)
            prompt.mark(trace_pb2.SPAN_KIND_GENERATE, lease.engine_id, part.indices)
            if error.reason != "PROMPT_TOO_LONG" or not partial.is_begun(part.indices[0]):
                return error
            partial.end(part.indices[0])
            return None
        finally:
            self._leases.release(prompt.pool, part.leases, outcome, lengths)
        pairs = list(zip(part.indices, deltas, strict=True))
        prompt.mark_sampled(lease.engine_id, pairs)
        if all([partial.add(index, delta) for index, delta in pairs]):
            return None
        return RemoteError(
            grpc.StatusCode.ABORTED, "ENGINE_ABORTED", "the engine aborted the request", {}
        )


async def _listen(
    stream: AsyncGenerator[Delta, None],
    indices: Sequence[int],
    partial: PartialSamples,
    listener: Listener,
) -> list[Delta]:
    """Returns whole deltas, passed on as they come; those of a lost engine go to `partial`."""
    received: list[Delta] = []
    try:
        async with contextlib.aclosing(stream):
            async for delta in stream:
                received.append(delta)
                listener(delta._replace(index=indices[delta.index]))
    except RemoteError:
        for delta in join_deltas(received):  # the listener must not get other tokens later
            reason = delta.finish_reason or FinishReason.ABORTED
            partial.add(indices[delta.index], delta._replace(finish_reason=reason))
        raise
    return join_deltas(received)


class _Arrivals:
    """Leases as they come, each looked at once: a group may wait for thousands, one by one."""

    def __init__(self, futures: Sequence[asyncio.Future[Lease]]) -> None:
        self.left = len(futures)  # to be taken
        self._there = [future for future in futures if future.done()]
        self._first, self._last = asyncio.Event(), asyncio.Event()
        for future in futures:
            if not future.done():
                future.add_done_callback(self._note)

    @property
    def are_all_there(self) -> bool:
        return len(self._there) == self.left

    async def wait(self) -> None:
        """Waits until a lease came, and a moment longer for those that come with it."""
        if not self._there:
            await self._first.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._last.wait()

    def take(self) -> list[asyncio.Future[Lease]]:
        """Those that came since the last call."""
        there, self._there = self._there, []
        self.left -= len(there)
        self._first.clear()
        return there

    def _note(self, future: asyncio.Future[Lease]) -> None:
        self._there.append(future)
        self._first.set()
        if self.are_all_there:
            self._last.set()


def _parts_of(leases: Mapping[int, Lease], partial: PartialSamples) -> list[_Part]:
    """Puts samples by index into one part per (engine, dp rank) of their lease, begun ones
    alone."""
    parts: dict[tuple[str, int, int], _Part] = {}
    for index, lease in sorted(leases.items()):
        key = (lease.address, lease.dp_rank, index if partial.is_begun(index) else -1)
        part = parts.get(key)
        if part is None:
            part = parts[key] = _Part([], [])
        part.leases.append(lease)
        part.indices.append(index)
    return list(parts.values())


def is_retried(error: RemoteError) -> bool:
    """Says whether another engine, or the same one later, may do what this one refused."""
    if error.is_too_large:
        return False
    return error.code in RETRIED or error.reason in RETRIED_REASONS
