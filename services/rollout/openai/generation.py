"""Tokens as text while they come, with stop strings."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from services.rollout.engine.interface import Delta, Engine, FinishReason, Sampling, TokenScores
from services.rollout.engine.wire import VersionBounds, join_deltas
from services.rollout.episodes.drafts import SamplingPrompt
from services.rollout.episodes.engines import EngineAccess
from services.rollout.episodes.leases import NO_HINTS, Hints, LeaseSource
from services.rollout.episodes.sampler import Sampler, is_retried
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RemoteError, new_request_id
from sluice.router_client import Lease, outcome_of
from sluice.runtime.idempotency import all_of
from sluice.samples.sample import VersionSpan
from sluice.samples.tokenizer import TextTokenizer


class TextStream:
    """The text of one answer. Text that may turn out to be part of a stop string is held back."""

    def __init__(
        self, tokenizer: TextTokenizer, stops: Sequence[str], *, special: bool, keep_stop: bool
    ) -> None:
        """`special`: show special tokens; `keep_stop`: the stop string belongs to the text."""
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._special, self._keep_stop = special, keep_stop
        self._decode = tokenizer.decoder(special=special)
        self._token_ids: list[int] = []
        self._shown = 0  # characters
        self.text = ""
        self.stopped = False

    def add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text to show now, and how many of the tokens were taken: up to the end of a stop."""
        for count, token_id in enumerate(token_ids, 1):
            self._token_ids.append(token_id)
            if piece := self._decode(token_id):
                self._grow(piece)
            if self.stopped:
                return self._show(len(self.text)), count
        return self._show(len(self.text) - self._held_back()), len(token_ids)

    def finish(self) -> str:
        """The rest, once no token follows."""
        if not self.stopped:
            (whole,) = self._tokenizer.decode([self._token_ids], special=self._special)
            if len(whole) > len(self.text) and whole.startswith(self.text):
                self._grow(whole[len(self.text) :])  # bytes that never became a character
        return self._show(len(self.text))

    def _grow(self, piece: str) -> None:
        longest = max(map(len, self._stops), default=1)
        first = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, first)) >= 0]
        if found:
            at, stop = min(found)
            self.text = self.text[: at + len(stop) if self._keep_stop else at]
            self.stopped = True

    def _held_back(self) -> int:
        """Characters at the end with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return size
        return 0

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self.text[start : self._shown]


ADDRESS = "local"


class LocalLeases:
    """The engine itself queues what it has no room for; its dp ranks take turns."""

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
        """One lease per sample, at once."""
        ranks = max(1, len(self._engine.status().rank_loads))
        rank = next(self._turns) % ranks  # one for all: they share the prompt
        futures = []
        for _ in range(count):
            future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
            future.set_result(Lease(0, self._engine_id, ADDRESS, rank))
            futures.append(future)
        return futures

    def release(
        self, pool: str, leases: Sequence[Lease], outcome: router_pb.Outcome, tokens: Sequence[int]
    ) -> None:
        """Nobody counts them."""

    def give_up(self, pool: str, futures: Iterable[asyncio.Future[Lease]]) -> None:
        """Nobody counts them."""

    def end(self, pool: str, hints: Hints) -> None:
        """Nobody keeps them."""


BACKOFF_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Backing:
    """What the HTTP face generates with."""

    tokenizer: TextTokenizer
    sampler: Sampler
    leases: LeaseSource
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
class AnswerDelta:
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

    async def stream(self, ask: Ask) -> AsyncGenerator[AnswerDelta, None]:
        """Pieces of all answers as they come; closing it ends the sampling."""
        pieces: asyncio.Queue[AnswerDelta | None] = asyncio.Queue()
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
    ) -> TokenScores:
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

    async def _follow(self, ask: Ask, index: int, tell: Callable[[AnswerDelta], None]) -> Answer:
        """Answer `index`, told token by token."""
        text = TextStream(
            self._backing.tokenizer, ask.stops, special=ask.special, keep_stop=ask.keep_stop
        )
        kept: list[Delta] = []

        def hear(delta: Delta) -> None:
            shown, count = text.add(delta.token_ids)
            kept.append(_first(delta, count, sum(len(part.token_ids) for part in kept)))
            if shown or kept[-1].token_ids:
                tell(AnswerDelta(index=index, text=shown, delta=kept[-1]))
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
        tell(AnswerDelta(index=index, text=rest, delta=nothing, answer=answer))
        return answer

    def _prompt(self, ask: Ask, indices: Sequence[int]) -> SamplingPrompt:
        seeds = ask.sampling.seeds
        return SamplingPrompt(
            group_id=new_request_id(),
            token_ids=ask.token_ids,
            sample_count=len(indices),
            sampling=replace(
                ask.sampling, seeds=tuple(seeds[index] for index in indices) if seeds else ()
            ),
            bounds=VersionBounds(),
            pool=self._backing.pool,
        )


def _ignore(piece: AnswerDelta) -> None:
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
