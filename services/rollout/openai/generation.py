"""Samples answers as text, up to a stop string, and finds the tool calls in them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from services.rollout.engine.interface import Delta, FinishReason, Sampling, TokenScores
from services.rollout.engine.wire import VersionBounds, join_deltas
from services.rollout.environments.tools import OPEN, parse_calls
from services.rollout.episodes.images import Images
from services.rollout.episodes.sampler import Sampler, SamplingPrompt
from sluice.client import new_request_id
from sluice.runtime.idempotency import all_of
from sluice.samples.messages import text_of
from sluice.samples.sample import MediaSpan
from sluice.samples.stops import StopMatch
from sluice.samples.tokenizer import TextTokenizer, off_loop

REMEMBERED_CALLS = 10_000


class TextStream:
    """Decodes one answer. Text that may turn out to be part of a stop string is not shown yet."""

    def __init__(
        self, tokenizer: TextTokenizer, stops: Sequence[str], *, special: bool, keep_stop: bool
    ) -> None:
        """`special`: show special tokens; `keep_stop`: the stop string belongs to the text."""
        self._tokenizer, self._stops = tokenizer, [StopMatch(stop) for stop in stops]
        self._special, self._keep_stop = special, keep_stop
        self._decode = tokenizer.decoder(special=special)
        self._token_ids: list[int] = []
        self._said = io.StringIO()  # grows without being copied; its position is its end
        self._shown = 0  # characters
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was said."""
        return self._said.getvalue()

    def add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Returns text to show now, and how many tokens were taken: up to the end of a stop."""
        for count, token_id in enumerate(token_ids, 1):
            self._token_ids.append(token_id)
            if piece := self._decode(token_id):
                self._grow(piece)
            if self.stopped:
                return self._show(self._said.tell()), count
        begun = max((stop.matched for stop in self._stops), default=0)
        return self._show(self._said.tell() - begun), len(token_ids)

    def finish(self) -> str:
        """Returns the rest, once no token follows."""
        if not self.stopped:
            (whole,) = self._tokenizer.decode([self._token_ids], special=self._special)
            text = self.text
            if len(whole) > len(text) and whole.startswith(text):
                self._grow(whole[len(text) :])  # bytes that never became a character
        return self._show(self._said.tell())

    def _grow(self, piece: str) -> None:
        ends = [
            (self._said.tell() + end - len(stop.text), stop.text)
            for stop in self._stops
            if (end := stop.find(piece))
        ]
        self._said.write(piece)
        if ends:
            at, found = min(ends)
            self._said.truncate(at + len(found) if self._keep_stop else at)
            self._said.seek(0, io.SEEK_END)
            self.stopped = True

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        self._said.seek(start)
        shown = self._said.read(self._shown - start)
        self._said.seek(0, io.SEEK_END)
        return shown


class ToolCalls:
    """Finds calls in answers, and remembers the text of each.

    A caller sends calls back as JSON, which a template would write in its own way. The text as it
    was sampled takes their place, so that the conversation goes on from the very tokens. What is
    recorded has the texts too, for the process that follows this one.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()  # of answers, by the id of a call

    def split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text before the first call and the calls; all is text if one is malformed."""
        said, opening, _ = text.partition(OPEN)
        calls = parse_calls(text) if opening else []
        if not calls or any(call.error for call in calls):
            return text, []
        found = []
        for call in calls:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            call_id = f"call_{uuid.uuid4().hex}"
            found.append({"id": call_id, "type": "function", "function": function})
            self._texts[call_id] = text
        while len(self._texts) > REMEMBERED_CALLS:
            self._texts.popitem(last=False)
        return said.rstrip(), found

    def restore(self, message: Mapping[str, Any], recorded: Mapping[str, str]) -> Mapping[str, Any]:
        """Returns a message whose calls were found here as it was sampled; any other as it is.

        So is one that its caller has rewritten: a call left out, say, or other arguments.
        recorded: further texts, by the id of a call.
        """
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            return message
        ids = [str(call.get("id")) for call in calls]
        texts = {recorded.get(call_id) or self._texts.get(call_id) for call_id in ids}
        if len(texts) != 1:
            return message
        (text,) = texts
        if text is None or not _is_said(text, message, calls):
            return message
        return {"role": message.get("role"), "content": text}


def _is_said(text: str, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message says what was sampled; what stands before its calls may be left out."""
    before, _, _ = text.partition(OPEN)
    if (content := text_of(message).strip()) and content != before.strip():
        return False
    try:
        sent = [(call["function"]["name"], _arguments_of(call)) for call in calls]
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return sent == [(call.name, call.arguments) for call in parse_calls(text)]


def _arguments_of(call: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call that a caller sent; some send them as they read them."""
    arguments = call["function"]["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else arguments


class CallFilter:
    """Shows a text as it comes; from where a call may begin on, nothing until the end."""

    def __init__(self, calls: ToolCalls) -> None:
        self._calls = calls
        self._pieces = list[str]()
        self._shown = 0  # characters
        self._space = list[str]()  # at the end of what was said: before a call it is not shown
        self._begun = ""  # what a call may begin with, behind it
        self._called = False

    def add(self, text: str) -> str:
        """Returns what may be shown now."""
        self._pieces.append(text)
        if self._called:
            return ""
        text = self._begun + text
        end = text.find(OPEN)
        self._called = end >= 0
        if not self._called:
            end = len(text) - _overlap(text, OPEN)
        said, self._begun = text[:end], text[end:]
        if not (visible := said.rstrip()):
            self._space.append(said)
            return ""
        shown = "".join([*self._space, visible])
        self._space = [said[len(visible) :]]
        self._shown += len(shown)
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns the rest of what is said, and the calls."""
        said, calls = self._calls.split("".join(self._pieces))
        return said[self._shown :], calls


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` with which a short `marker` begins."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """A prompt, and how it is to be answered `count` times.

    stops: strings that end an answer; keep_stop: the text holds them. special: the text holds
    special tokens.
    """

    token_ids: tuple[int, ...]
    sampling: Sampling
    count: int
    media: tuple[MediaSpan, ...] = ()
    stops: tuple[str, ...] = ()
    special: bool = False
    keep_stop: bool = False
    bounds: VersionBounds = field(default_factory=VersionBounds)


@dataclass(frozen=True)
class Answer:
    """`delta` holds every token sampled, up to the one that ended a stop string.

    `cut`: a stop string was found, so that the tokens stand for more than `text`. `sampling`: how
    it was sampled.
    """

    delta: Delta
    text: str
    cut: bool = False
    sampling: Sampling | None = None


def no_tokens(index: int, finish_reason: FinishReason | None = None) -> Delta:
    """Returns a delta of answer `index` that adds nothing."""
    return Delta(
        index=index,
        token_ids=(),
        logprobs=(),
        logprobs_t1=(),
        spans=(),
        finish_reason=finish_reason,
    )


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
    """Answers prompts. What it starts ends with the call, also when the caller goes away."""

    def __init__(
        self, tokenizer: TextTokenizer, sampler: Sampler, pool: str, images: Images
    ) -> None:
        self.tokenizer, self._sampler, self._pool = tokenizer, sampler, pool
        self.images = images

    async def answer(self, request: AnswerRequest) -> list[Answer]:
        """Returns all answers. Raises ServiceError and RemoteError."""
        indices = range(request.count)
        if request.stops:
            return await all_of(
                self._follow(request, index, lambda piece: None) for index in indices
            )
        deltas = await self._sampler.sample(self._prompt(request, indices))
        ids = [delta.token_ids for delta in deltas]
        decode = partial(self.tokenizer.decode, ids, special=request.special)
        texts = await off_loop(sum(map(len, ids)), decode)
        return [
            Answer(delta, text, sampling=request.sampling)
            for delta, text in zip(deltas, texts, strict=True)
        ]

    async def stream(self, request: AnswerRequest) -> AsyncGenerator[AnswerDelta, None]:
        """Yields pieces of all answers as they come; closing it ends the sampling."""
        pieces: asyncio.Queue[AnswerDelta | None] = asyncio.Queue()
        follow = [self._follow(request, index, pieces.put_nowait) for index in range(request.count)]
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
        """Returns log-probabilities of token_ids[prompt_length:] under `version`, None for any.

        Raises RemoteError.
        """
        bounds = VersionBounds(exact_version=version)
        return await self._sampler.score(token_ids, prompt_length, top_count, bounds, self._pool)

    async def _follow(
        self, request: AnswerRequest, index: int, send: Callable[[AnswerDelta], None]
    ) -> Answer:
        """Samples answer `index` and sends its pieces as they come."""
        text = TextStream(
            self.tokenizer, request.stops, special=request.special, keep_stop=request.keep_stop
        )
        deltas, token_count = list[Delta](), 0

        def listen(delta: Delta) -> None:
            nonlocal token_count
            shown, count = text.add(delta.token_ids)
            deltas.append(_first(delta, count, token_count))
            token_count += len(deltas[-1].token_ids)
            if shown or deltas[-1].token_ids:
                send(AnswerDelta(index=index, text=shown, delta=deltas[-1]))
            if text.stopped:
                raise _StopFoundError

        delta: Delta | None = None
        with contextlib.suppress(_StopFoundError):
            (delta,) = await self._sampler.sample(self._prompt(request, [index]), listen)
        rest = text.finish()
        if text.stopped or delta is None:
            (joined,) = join_deltas(deltas)
            delta = joined._replace(finish_reason=FinishReason.STOP)
        answer = Answer(
            delta._replace(index=index), text.text, text.stopped, sampling=request.sampling
        )
        send(AnswerDelta(index=index, text=rest, delta=no_tokens(index), answer=answer))
        return answer

    def _prompt(self, request: AnswerRequest, indices: Sequence[int]) -> SamplingPrompt:
        seeds = request.sampling.seeds
        return SamplingPrompt(
            group_id=new_request_id(),
            token_ids=request.token_ids,
            media=request.media,
            sample_count=len(indices),
            sampling=replace(
                request.sampling, seeds=tuple(seeds[index] for index in indices) if seeds else ()
            ),
            bounds=request.bounds,
            pool=self._pool,
        )


def _first(delta: Delta, count: int, offset: int) -> Delta:
    """Returns the first tokens of a delta, with spans counted from `offset` on."""
    shift = offset - delta.spans[0].first_token if delta.spans else 0
    end = offset + count
    spans = tuple(
        replace(span, last_token=min(span.last_token, end - 1))
        for span in (span.shifted(shift) for span in delta.spans)
        if span.first_token < end
    )
    experts, left_out = delta.routed_experts, len(delta.token_ids) - count
    return delta._replace(
        index=0,
        token_ids=delta.token_ids[:count],
        logprobs=delta.logprobs[:count],
        logprobs_t1=delta.logprobs_t1[:count],
        spans=spans,
        routed_experts=None if experts is None else experts[: len(experts) - left_out],
    )
