"""Answers to one prompt, by the same leases and engines that episodes are sampled with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from services.rollout.concurrency import all_of
from services.rollout.engine import Delta, FinishReason, Sampling, Scores
from services.rollout.episodes.drafts import Prompt
from services.rollout.episodes.engines import EngineAccess
from services.rollout.episodes.leases import Leases
from services.rollout.episodes.sampler import Sampler, is_retried
from services.rollout.openai.text import TextStream
from services.rollout.wire import VersionBounds, join_deltas
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RemoteError, new_request_id
from sluice.router_client import outcome_of
from sluice.samples.sample import VersionSpan
from sluice.samples.tokenizer import TextTokenizer

BACKOFF_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Backing:
    """What the HTTP face generates with."""

    tokenizer: TextTokenizer
    sampler: Sampler
    leases: Leases
    engines: EngineAccess
    pool: str
    attempts: int


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A prompt, and how it is to be answered `count` times.

    stops: strings that end an answer; keep_stop: the text holds them. special: the text holds
    special tokens.
    """

    token_ids: tuple[int, ...]
    sampling: Sampling
    count: int
    stops: tuple[str, ...] = ()
    special: bool = False
    keep_stop: bool = False


@dataclass(frozen=True)
class Answer:
    """`delta` holds every token sampled, up to the one that ended a stop string.

    `cut`: a stop string was found, so that the tokens stand for more than `text`.
    """

    delta: Delta
    text: str
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What was added to answer `index`; `answer` comes with its last piece."""

    index: int
    text: str
    delta: Delta
    answer: Answer | None = None


class _StopFoundError(Exception):
    """Ends the sampling from within."""


class Generator:
    """Owns nothing; what it starts ends with the call, also when the caller goes away."""

    def __init__(self, backing: Backing) -> None:
        self._backing = backing

    async def answer(self, ask: Ask) -> list[Answer]:
        """All answers. Raises ServiceError and RemoteError."""
        if ask.stops:
            return await all_of(self._follow(ask, index, _ignore) for index in range(ask.count))
        prompt = self._prompt(ask, range(ask.count))
        deltas = await self._backing.sampler.sample(prompt)
        texts = self._backing.tokenizer.decode(
            [delta.token_ids for delta in deltas], special=ask.special
        )
        return [Answer(delta, text) for delta, text in zip(deltas, texts, strict=True)]

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Pieces of all answers as they come; closing it ends the sampling."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        follow = [self._follow(ask, index, pieces.put_nowait) for index in range(ask.count)]
        work = asyncio.create_task(all_of(follow), name="answers")
        work.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def score(
        self,
        token_ids: Sequence[int],
        prompt_length: int,
        top_count: int,
        version: int | None = None,
    ) -> Scores:
        """Log-probabilities of token_ids[prompt_length:] under `version`, None for any.

        Raises RemoteError.
        """
        backing, bounds = self._backing, VersionBounds(exact_version=version)
        failures = 0
        while True:
            name = new_request_id()
            futures = await backing.leases.request(name, 1, bounds, backing.pool)
            try:
                lease = await futures[0]
            except BaseException:
                backing.leases.give_up(backing.pool, futures)
                raise
            outcome: router_pb.Outcome = router_pb.OUTCOME_ABORTED
            try:
                scores = await backing.engines.score(
                    lease.address, token_ids, prompt_length, top_count, bounds
                )
                outcome = router_pb.OUTCOME_OK
                return scores
            except RemoteError as error:
                outcome, failures = outcome_of(error.code), failures + 1
                if not is_retried(error) or failures >= backing.attempts:
                    raise
            finally:
                backing.leases.release(backing.pool, [lease], outcome, ())
            await asyncio.sleep(BACKOFF_SECONDS)

    async def _follow(self, ask: Ask, index: int, tell: Callable[[Piece], None]) -> Answer:
        """Answer `index`, told token by token."""
        text = TextStream(
            self._backing.tokenizer, ask.stops, special=ask.special, keep_stop=ask.keep_stop
        )
        kept: list[Delta] = []

        def hear(delta: Delta) -> None:
            shown, count = text.add(delta.token_ids)
            kept.append(_first(delta, count, sum(len(part.token_ids) for part in kept)))
            if shown or kept[-1].token_ids:
                tell(Piece(index=index, text=shown, delta=kept[-1]))
            if text.stopped:
                raise _StopFoundError

        delta: Delta | None = None
        with contextlib.suppress(_StopFoundError):
            (delta,) = await self._backing.sampler.sample(self._prompt(ask, [index]), hear)
        rest = text.finish()
        if text.stopped or delta is None:
            (joined,) = join_deltas(kept)
            delta = replace(joined, finish_reason=FinishReason.STOP)
        answer = Answer(replace(delta, index=index), text.text, text.stopped)
        nothing = Delta(index=index, token_ids=(), logprobs=(), logprobs_t1=(), spans=())
        tell(Piece(index=index, text=rest, delta=nothing, answer=answer))
        return answer

    def _prompt(self, ask: Ask, indices: Sequence[int]) -> Prompt:
        seeds = ask.sampling.seeds
        return Prompt(
            group_id=new_request_id(),
            token_ids=ask.token_ids,
            sample_count=len(indices),
            sampling=replace(
                ask.sampling, seeds=tuple(seeds[index] for index in indices) if seeds else ()
            ),
            bounds=VersionBounds(),
            pool=self._backing.pool,
        )


def _ignore(piece: Piece) -> None:
    """Nobody listens."""


def _first(delta: Delta, count: int, offset: int) -> Delta:
    """The first tokens of a delta, with spans counted from `offset` on."""
    shift = offset - delta.spans[0].first_token if delta.spans else 0
    spans = tuple(
        VersionSpan(
            version=span.version,
            digest=span.digest,
            first_token=span.first_token + shift,
            last_token=min(span.last_token + shift, offset + count - 1),
        )
        for span in delta.spans
        if span.first_token + shift < offset + count
    )
    experts, left_out = delta.routed_experts, len(delta.token_ids) - count
    return replace(
        delta,
        index=0,
        token_ids=delta.token_ids[:count],
        logprobs=delta.logprobs[:count],
        logprobs_t1=delta.logprobs_t1[:count],
        spans=spans,
        routed_experts=None if experts is None else experts[: len(experts) - left_out],
    )
