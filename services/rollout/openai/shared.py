"""What chat and text completions have in common: limits, log-probabilities, streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.rollout.config import OpenAIConfig
from services.rollout.engine.interface import Delta
from services.rollout.openai import answers as encode
from services.rollout.openai.answers import Names, Scored
from services.rollout.openai.generation import Answer, AnswerDelta, Ask, Generator
from services.rollout.openai.prompts import Prompt
from services.rollout.openai.recorder import Recorder
from services.rollout.openai.requests import ApiError, CommonRequest, Record
from sluice.samples.tokenizer import TextTokenizer

Chunk = dict[str, Any]


class StreamForm(Protocol):
    """How chunks of a stream look."""

    kind: str
    prefix: str

    def opening(self) -> Chunk | None:
        """What every choice begins with."""

    def piece(self, index: int, text: str) -> Chunk: ...

    def ending(self, index: int) -> Chunk:
        """The last chunk of a choice; it may have a finish reason of its own."""

    def logprobs(self, names: Names, scored: Scored) -> Chunk: ...


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the endpoints work with."""

    config: OpenAIConfig
    model_name: str
    tokenizer: TextTokenizer
    generator: Generator
    recorder: Recorder

    def names(self, request: CommonRequest) -> Names:
        return Names(self.tokenizer, as_ids=request.return_tokens_as_token_ids)

    def check(self, request: CommonRequest, prompt_count: int, token_limit: int | None) -> None:
        """Raises ApiError for another model, or more than is allowed."""
        if request.model not in ("", self.model_name):
            message = f"the model {request.model!r} does not exist; this is {self.model_name!r}"
            raise ApiError(404, "model_not_found", message, "model")
        limits = (
            ("n", prompt_count * request.n, self.config.max_choices),
            ("max_tokens", token_limit or 0, self.config.max_tokens),
        )
        for name, value, limit in limits:
            if value > limit:
                raise ApiError(400, "invalid_value", f"{name}: must not exceed {limit}", name)

    def ask(self, request: CommonRequest, prompt: Prompt, max_new_tokens: int) -> Ask:
        return Ask(
            token_ids=prompt.token_ids,
            sampling=request.sampling(max_new_tokens),
            count=request.n,
            stops=tuple(request.stop),
            special=not request.skip_special_tokens,
            keep_stop=request.include_stop_str_in_output,
        )

    async def scored(self, prompt: Prompt, answer: Answer, *, top_count: int, echo: bool) -> Scored:
        """The log-probabilities of an answer, and with `echo` of its prompt before it.

        The engine is asked for what it did not tell while sampling.
        """
        delta = answer.delta
        is_told = len(delta.logprobs_t1) == len(delta.token_ids)
        if not top_count and not echo and is_told:
            return Scored(delta.token_ids, delta.logprobs_t1)
        whole = (*prompt.token_ids, *delta.token_ids)
        first = 1 if echo else len(prompt.token_ids)
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
        ask: Ask,
        record: Record | None,
        form: StreamForm,
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks as they come; what is recorded is durable before the last ones.

        Raises ApiError, ServiceError and RemoteError.
        """
        head = encode.envelope(form.kind, self.model_name, form.prefix)
        names = self.names(request)
        if (opening := form.opening()) is not None:
            for index in range(ask.count):
                yield {**head, "choices": [{"index": index, "finish_reason": None, **opening}]}
        ended: list[AnswerDelta] = []
        async for piece in self.generator.stream(ask):
            choice: Chunk = {"index": piece.index, "finish_reason": None}
            choice |= form.piece(piece.index, piece.text)
            if request.wants_logprobs:
                choice["logprobs"] = form.logprobs(names, _told(piece.delta))
            if request.return_token_ids:
                choice["token_ids"] = list(piece.delta.token_ids)
            if piece.text or piece.delta.token_ids:
                yield {**head, "choices": [choice]}
            if piece.answer is not None:
                ended.append(piece)
        answers = [p.answer for p in sorted(ended, key=lambda p: p.index) if p.answer]
        if record:
            await self.recorder.add(record, prompt, answers)
        for index, answer in enumerate(answers):
            fields = encode.choice_fields(request, answer.delta) | {"index": index}
            fields.pop("token_ids", None)  # told already
            last = {**head, "choices": [{**fields, **form.ending(index)}]}
            yield last | encode.weights([answer])
        if request.stream_options.include_usage:
            total = encode.usage(len(prompt.token_ids), answers)
            yield {**head, "choices": [], "usage": total}

    def body(
        self, kind: str, prefix: str, prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> Chunk:
        """An answer without its choices."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return {
            **encode.envelope(kind, self.model_name, prefix),
            "usage": encode.usage(prompt_tokens, answers),
            **encode.weights(answers),
        }


def _told(delta: Delta) -> Scored:
    """What the engine said while it sampled. Raises ApiError where those are other numbers."""
    if len(delta.logprobs_t1) != len(delta.token_ids):
        message = "logprobs: with stream this engine has them at temperature 0 and 1 only"
        raise ApiError(400, "unsupported_parameter", message, "logprobs")
    return Scored(delta.token_ids, delta.logprobs_t1)
