"""Answers chat and text completions in the form that OpenAI's clients read, with our additions."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.rollout.config import OpenAIConfig
from services.rollout.engine.interface import Delta, FinishReason
from services.rollout.engine.wire import VersionBounds
from services.rollout.episodes.images import SampleImages
from services.rollout.openai.generation import (
    Answer,
    AnswerRequest,
    CallFilter,
    Generator,
    ToolCalls,
    no_tokens,
)
from services.rollout.openai.prompts import Prompt, chat_prompt, plain_prompt
from services.rollout.openai.recorder import NOTHING_EARLIER, Recorder
from services.rollout.openai.requests import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Record,
)
from sluice.runtime.http import ApiError
from sluice.runtime.idempotency import all_of
from sluice.samples.tokenizer import TextTokenizer

Chunk = dict[str, Any]
Top = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Scored:
    """Tokens with log-probabilities at temperature 1, None where nothing precedes a token.

    `top` has the likeliest tokens of each place, or is empty.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    top: Top = ()


class Names:
    """Writes tokens as text."""

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._texts: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns one text a token; several may look alike, as parts of a character do."""
        if self._as_ids:
            return [f"token_id:{token_id}" for token_id in token_ids]
        new = [[token_id] for token_id in set(token_ids) - self._texts.keys()]
        for (token_id,), text in zip(new, self._tokenizer.decode(new, special=True), strict=True):
            self._texts[token_id] = text
        return [self._texts[token_id] for token_id in token_ids]


def _envelope(kind: str, model: str, prefix: str) -> dict[str, Any]:
    """The fields that every answer begins with."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _usage(prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, int]:
    completion = sum(len(answer.delta.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


def _weights(answers: Sequence[Answer]) -> dict[str, Any]:
    """The fields of the newest weights that sampled a token."""
    spans = [span for answer in answers for span in answer.delta.spans]
    if not spans:
        return {}
    newest = max(spans, key=lambda span: span.version)
    return {
        "weight_version": newest.version,
        "system_fingerprint": f"{newest.version}-{newest.digest[:12]}",
    }


def _choice_fields(request: CommonRequest, delta: Delta) -> dict[str, Any]:
    """The fields of a finished choice besides its text."""
    reason = "length" if delta.finish_reason is FinishReason.LENGTH else "stop"
    fields: dict[str, Any] = {
        "finish_reason": reason,
        "weight_spans": [
            {
                "version": span.version,
                "digest": span.digest,
                "first_token": span.first_token,
                "last_token": span.last_token,
            }
            for span in delta.spans
        ],
    }
    if request.return_token_ids:
        fields["token_ids"] = list(delta.token_ids)
    return fields


def chat_logprobs(names: Names, scored: Scored) -> dict[str, Any]:
    """Writes `logprobs` of a chat choice."""
    texts = names.of(scored.token_ids)
    content = []
    for place, (text, logprob) in enumerate(zip(texts, scored.logprobs, strict=True)):
        top = scored.top[place] if scored.top else ()
        top_texts = names.of([token_id for token_id, _ in top])
        content.append(
            {
                **_entry(text, logprob),
                "top_logprobs": [
                    _entry(other, value) for other, (_, value) in zip(top_texts, top, strict=True)
                ],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(names: Names, scored: Scored) -> dict[str, Any]:
    """Writes `logprobs` of a text choice; the token itself is always among the top ones."""
    texts = names.of(scored.token_ids)
    offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
    top: list[Mapping[str, float] | None] = []
    for place, (text, logprob) in enumerate(zip(texts, scored.logprobs, strict=True)):
        if logprob is None:
            top.append(None)
            continue
        likeliest = dict[str, float]()
        entries = scored.top[place] if scored.top else ()
        for name, (_, value) in zip(names.of([i for i, _ in entries]), entries, strict=True):
            likeliest.setdefault(name, value)
        likeliest.setdefault(text, logprob)
        top.append(likeliest)
    return {
        "tokens": texts,
        "token_logprobs": list(scored.logprobs),
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    """`bytes` is null for a token that is only part of a character."""
    data = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": data}


class StreamForm(Protocol):
    """Writes the chunks of a stream."""

    kind: str
    prefix: str

    def opening(self) -> Chunk | None:
        """Returns what every choice begins with."""

    def piece(self, index: int, text: str) -> Chunk: ...

    def ending(self, index: int) -> Chunk:
        """Returns the last chunk of a choice; it may have a finish reason of its own."""

    def logprobs(self, names: Names, scored: Scored) -> Chunk: ...


@dataclass(frozen=True, kw_only=True)
class Responder:
    """Does what both endpoints need: limits, log-probabilities, streams."""

    config: OpenAIConfig
    model_name: str
    generator: Generator
    recorder: Recorder

    @property
    def images(self) -> SampleImages:
        """Images of calls: from their bodies alone."""
        return SampleImages(self.generator.images, files=False)

    def names(self, request: CommonRequest) -> Names:
        return Names(self.generator.tokenizer, as_ids=request.return_tokens_as_token_ids)

    def check(self, request: CommonRequest, prompt_count: int, token_limit: int | None) -> None:
        """Checks the model and the limits. Raises ApiError."""
        if request.model not in ("", self.model_name):
            message = f"the model {request.model!r} does not exist; this is {self.model_name!r}"
            raise ApiError(404, "model_not_found", message, "model")
        limits = (
            ("n", prompt_count * request.n, self.config.max_choices),
            ("max_tokens", token_limit or 0, self.config.max_tokens),
            (
                "min_tokens",
                request.min_tokens,
                self.config.max_tokens if token_limit is None else token_limit,
            ),
        )
        for name, value, limit in limits:
            if value > limit:
                raise ApiError(400, "invalid_value", f"{name}: must not exceed {limit}", name)

    def answer_request(
        self, request: CommonRequest, prompt: Prompt, max_new_tokens: int, record: Record | None
    ) -> AnswerRequest:
        return AnswerRequest(
            token_ids=prompt.token_ids,
            media=prompt.media,
            sampling=request.sampling(max_new_tokens),
            count=request.n,
            stops=tuple(request.stop),
            special=not request.skip_special_tokens,
            keep_stop=request.include_stop_str_in_output,
            bounds=VersionBounds() if record is None else record.bounds,
        )

    async def scored(self, prompt: Prompt, answer: Answer, *, top_count: int, echo: bool) -> Scored:
        """Returns the log-probabilities of an answer, and with `echo` of its prompt before it.

        The engine is asked for what it did not give while sampling.
        """
        delta = answer.delta
        has_logprobs = len(delta.logprobs_t1) == len(delta.token_ids)
        if not top_count and not echo and has_logprobs:
            return Scored(delta.token_ids, delta.logprobs_t1)
        whole = (*prompt.token_ids, *delta.token_ids)
        first = 1 if echo else len(prompt.token_ids)
        if prompt.media:
            message = "logprobs: beside images only those of sampled tokens, temperature 0 or 1"
            raise ApiError(400, "unsupported_parameter", message, "logprobs")
        if len(whole) == first:
            return Scored(whole if echo else (), [None] if echo else ())
        version = delta.spans[-1].version if delta.spans else None
        scores = await self.generator.score(whole, first, top_count, version)
        if not echo:
            return Scored(delta.token_ids, scores.logprobs, scores.top)
        top = ((), *scores.top) if scores.top else ()
        return Scored(whole, (None, *scores.logprobs), top)

    async def stream(
        self,
        request: CommonRequest,
        prompt: Prompt,
        asked: AnswerRequest,
        record: Record | None,
        form: StreamForm,
    ) -> AsyncGenerator[Chunk, None]:
        """Yields chunks as they come; what is recorded is durable before the last ones.

        Raises ApiError, ServiceError and RemoteError.
        """
        head = _envelope(form.kind, self.model_name, form.prefix)
        names = self.names(request)
        if (opening := form.opening()) is not None:
            for index in range(asked.count):
                yield {**head, "choices": [{"index": index, "finish_reason": None, **opening}]}
        ended: dict[int, Answer] = {}
        async for piece in self.generator.stream(asked):
            choice: Chunk = {"index": piece.index, "finish_reason": None}
            choice |= form.piece(piece.index, piece.text)
            if request.wants_logprobs:
                choice["logprobs"] = form.logprobs(names, _streamed_logprobs(piece.delta))
            if request.return_token_ids:
                choice["token_ids"] = list(piece.delta.token_ids)
            if piece.text or piece.delta.token_ids:
                yield {**head, "choices": [choice]}
            if piece.answer is not None:
                ended[piece.index] = piece.answer
        answers = [ended[index] for index in sorted(ended)]
        endings = [form.ending(index) for index in range(len(answers))]
        if record:
            calls = [_call_ids(ending.get("delta", {})) for ending in endings]
            await self.recorder.add(record, prompt, answers, calls)
        for index, (answer, ending) in enumerate(zip(answers, endings, strict=True)):
            fields = _choice_fields(request, answer.delta) | {"index": index}
            fields.pop("token_ids", None)  # sent already
            yield {**head, "choices": [{**fields, **ending}]} | _weights([answer])
        if request.stream_options.include_usage:
            total = _usage(len(prompt.token_ids), answers)
            yield {**head, "choices": [], "usage": total}

    def body(
        self, kind: str, prefix: str, prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> Chunk:
        """Returns an answer without its choices."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return {
            **_envelope(kind, self.model_name, prefix),
            "usage": _usage(prompt_tokens, answers),
            **_weights(answers),
        }


def _call_ids(message: Mapping[str, Any]) -> list[str]:
    """Returns the ids of the calls in a message, or in the delta of one."""
    return [call["id"] for call in message.get("tool_calls", [])]


def _streamed_logprobs(delta: Delta) -> Scored:
    """Returns what the engine gave while sampling. Raises ApiError where it is something else."""
    if len(delta.logprobs_t1) != len(delta.token_ids):
        message = "logprobs: with stream this engine has them at temperature 0 and 1 only"
        raise ApiError(400, "unsupported_parameter", message, "logprobs")
    return Scored(delta.token_ids, delta.logprobs_t1)


class _ChatForm:
    kind, prefix = "chat.completion.chunk", "chatcmpl"

    def __init__(self, filters: Sequence[CallFilter]) -> None:
        """One filter a choice where tools are given, else none."""
        self._filters = filters

    def opening(self) -> Chunk | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, index: int, text: str) -> Chunk:
        shown = self._filters[index].add(text) if self._filters else text
        return {"delta": {"content": shown} if shown else {}}

    def ending(self, index: int) -> Chunk:
        rest, calls = self._filters[index].finish() if self._filters else ("", [])
        delta: Chunk = {"content": rest} if rest else {}
        if not calls:
            return {"delta": delta}
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        return {"delta": delta | {"tool_calls": numbered}, "finish_reason": "tool_calls"}

    def logprobs(self, names: Names, scored: Scored) -> Chunk:
        return chat_logprobs(names, scored)


class Chat:
    """Answers conversations, by the model's own chat template."""

    def __init__(self, responder: Responder) -> None:
        self._responder, self._calls = responder, ToolCalls()

    async def answer(self, request: ChatRequest, record: Record | None) -> Chunk:
        """Returns the whole answer. Raises ApiError, ServiceError and RemoteError."""
        responder = self._responder
        prompt, asked = await self._prepare(request, record)
        answers = await responder.generator.answer(asked)
        choices = await all_of(
            self._choice(request, prompt, index, answer) for index, answer in enumerate(answers)
        )
        if record:
            calls = [_call_ids(choice["message"]) for choice in choices]
            await responder.recorder.add(record, prompt, answers, calls)
        body = responder.body("chat.completion", _ChatForm.prefix, [prompt], answers)
        if request.return_token_ids:
            body["prompt_token_ids"] = list(prompt.token_ids)
        return body | {"choices": choices}

    async def stream(
        self, request: ChatRequest, record: Record | None
    ) -> AsyncGenerator[Chunk, None]:
        """Yields chunks. Raises ApiError, ServiceError and RemoteError."""
        prompt, asked = await self._prepare(request, record)
        filters = [CallFilter(self._calls) for _ in range(request.n)] if request.shows_tools else []
        async for chunk in self._responder.stream(
            request, prompt, asked, record, _ChatForm(filters)
        ):
            yield chunk

    async def _prepare(
        self, request: ChatRequest, record: Record | None
    ) -> tuple[Prompt, AnswerRequest]:
        responder = self._responder
        responder.check(request, 1, request.token_limit)
        earlier = await responder.recorder.earlier(record) if record else NOTHING_EARLIER
        messages = [self._calls.restore(message, earlier.calls) for message in request.messages]
        prompt = await chat_prompt(
            responder.generator.tokenizer,
            request,
            messages,
            earlier.prompts,
            responder.images,
        )
        return prompt, responder.answer_request(
            request, prompt, request.token_limit or responder.config.max_tokens, record
        )

    async def _choice(
        self, request: ChatRequest, prompt: Prompt, index: int, answer: Answer
    ) -> Chunk:
        logprobs = None
        if request.logprobs:
            scored = await self._responder.scored(
                prompt, answer, top_count=request.top_logprobs, echo=False
            )
            logprobs = chat_logprobs(self._responder.names(request), scored)
        said, calls = self._calls.split(answer.text) if request.shows_tools else (answer.text, [])
        message: Chunk = {"role": "assistant", "content": said, "refusal": None}
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            **_choice_fields(request, answer.delta),
        }
        if calls:
            message |= {"content": said or None, "tool_calls": calls}
            choice["finish_reason"] = "tool_calls"
        return choice


NOTHING = Answer(no_tokens(0, FinishReason.LENGTH), "")


class _CompletionForm:
    kind, prefix = "text_completion", "cmpl"

    def opening(self) -> Chunk | None:
        return None

    def piece(self, index: int, text: str) -> Chunk:
        return {"text": text, "logprobs": None}

    def ending(self, index: int) -> Chunk:
        return self.piece(index, "")

    def logprobs(self, names: Names, scored: Scored) -> Chunk:
        return completion_logprobs(names, scored)


class Completions:
    """Answers with texts that go on from a prompt; with `echo` the prompt is scored too."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    async def answer(self, request: CompletionRequest, record: Record | None) -> Chunk:
        """Returns the whole answer. Raises ApiError, ServiceError and RemoteError."""
        responder = self._responder
        prompts = await self._prepare(request, record)
        parts = await all_of(self._answers(request, prompt, record) for prompt in prompts)
        pairs = [
            (prompt, answer) for prompt, part in zip(prompts, parts, strict=True) for answer in part
        ]
        choices = await all_of(
            self._choice(request, *pair, index=index) for index, pair in enumerate(pairs)
        )
        if record and request.max_tokens:
            for prompt, part in zip(prompts, parts, strict=True):
                await responder.recorder.add(record, prompt, part, [()] * len(part))
        every = [answer for _, answer in pairs]
        return responder.body(_CompletionForm.kind, _CompletionForm.prefix, prompts, every) | {
            "choices": choices
        }

    async def stream(
        self, request: CompletionRequest, record: Record | None
    ) -> AsyncGenerator[Chunk, None]:
        """Yields chunks. Raises ApiError, ServiceError and RemoteError."""
        prompts = await self._prepare(request, record)
        if len(prompts) > 1:
            raise ApiError(400, "invalid_value", "prompt: one at a time with stream", "prompt")
        asked = self._responder.answer_request(request, prompts[0], request.max_tokens, record)
        async for chunk in self._responder.stream(
            request, prompts[0], asked, record, _CompletionForm()
        ):
            yield chunk

    async def _prepare(self, request: CompletionRequest, record: Record | None) -> list[Prompt]:
        responder = self._responder
        responder.check(request, len(request.prompts), request.max_tokens)
        earlier = await responder.recorder.earlier(record) if record else NOTHING_EARLIER
        return [
            await plain_prompt(
                responder.generator.tokenizer, each, earlier.prompts, responder.images
            )
            for each in request.prompts
        ]

    async def _answers(
        self, request: CompletionRequest, prompt: Prompt, record: Record | None
    ) -> Sequence[Answer]:
        if not request.max_tokens:
            return [NOTHING] * request.n
        return await self._responder.generator.answer(
            self._responder.answer_request(request, prompt, request.max_tokens, record)
        )

    async def _choice(
        self, request: CompletionRequest, prompt: Prompt, answer: Answer, *, index: int
    ) -> Chunk:
        logprobs = None
        if request.logprobs is not None:
            scored = await self._responder.scored(
                prompt, answer, top_count=request.logprobs, echo=request.echo
            )
            logprobs = completion_logprobs(self._responder.names(request), scored)
        choice: Chunk = {
            "index": index,
            "text": prompt.text + answer.text if request.echo else answer.text,
            "logprobs": logprobs,
            **_choice_fields(request, answer.delta),
        }
        if request.return_token_ids:
            choice["prompt_token_ids"] = list(prompt.token_ids)
        return choice
