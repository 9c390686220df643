"""POST /v1/completions, with prompts as texts or as token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from services.rollout.concurrency import all_of
from services.rollout.engine import Delta, FinishReason
from services.rollout.openai import answers as encode
from services.rollout.openai.answers import Names, Scored
from services.rollout.openai.errors import ApiError
from services.rollout.openai.generation import Answer
from services.rollout.openai.prompts import Prompt, plain_prompt
from services.rollout.openai.requests import CompletionRequest, Record
from services.rollout.openai.shared import Chunk, Shared

NOTHING = Answer(
    Delta(
        index=0,
        token_ids=(),
        logprobs=(),
        logprobs_t1=(),
        spans=(),
        finish_reason=FinishReason.LENGTH,
    ),
    "",
)


class _Form:
    kind, prefix = "text_completion", "cmpl"

    def opening(self) -> Chunk | None:
        return None

    def piece(self, index: int, text: str) -> Chunk:
        return {"text": text, "logprobs": None}

    def ending(self, index: int) -> Chunk:
        return self.piece(index, "")

    def logprobs(self, names: Names, scored: Scored) -> Chunk:
        return encode.completion_logprobs(names, scored)


class Completions:
    """Texts that go on from a prompt; with `echo` the prompt is scored too."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def answer(self, request: CompletionRequest, record: Record | None) -> Chunk:
        """Raises ApiError, ServiceError and RemoteError."""
        shared = self._shared
        prompts = await self._prepare(request, record)
        parts = await all_of(self._answers(request, prompt) for prompt in prompts)
        pairs = [
            (prompt, answer) for prompt, part in zip(prompts, parts, strict=True) for answer in part
        ]
        choices = await all_of(
            self._choice(request, *pair, index=index) for index, pair in enumerate(pairs)
        )
        if record and request.max_tokens:
            for prompt, part in zip(prompts, parts, strict=True):
                await shared.recorder.add(record, prompt, part)
        every = [answer for _, answer in pairs]
        return shared.body(_Form.kind, _Form.prefix, prompts, every) | {"choices": choices}

    async def stream(
        self, request: CompletionRequest, record: Record | None
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks. Raises ApiError, ServiceError and RemoteError."""
        prompts = await self._prepare(request, record)
        if len(prompts) > 1:
            raise ApiError(400, "invalid_value", "prompt: one at a time with stream", "prompt")
        ask = self._shared.ask(request, prompts[0], request.max_tokens)
        async for chunk in self._shared.stream(request, prompts[0], ask, record, _Form()):
            yield chunk

    async def _prepare(self, request: CompletionRequest, record: Record | None) -> list[Prompt]:
        shared = self._shared
        shared.check(request, len(request.prompts), request.max_tokens)
        earlier = await shared.recorder.earlier(record) if record else ()
        return [await plain_prompt(shared.tokenizer, each, earlier) for each in request.prompts]

    async def _answers(self, request: CompletionRequest, prompt: Prompt) -> Sequence[Answer]:
        if not request.max_tokens:
            return [NOTHING] * request.n
        return await self._shared.generator.answer(
            self._shared.ask(request, prompt, request.max_tokens)
        )

    async def _choice(
        self, request: CompletionRequest, prompt: Prompt, answer: Answer, *, index: int
    ) -> Chunk:
        logprobs = None
        if request.logprobs is not None:
            scored = await self._shared.scored(
                prompt, answer, top_count=request.logprobs, echo=request.echo
            )
            logprobs = encode.completion_logprobs(self._shared.names(request), scored)
        choice: Chunk = {
            "index": index,
            "text": prompt.text + answer.text if request.echo else answer.text,
            "logprobs": logprobs,
            **encode.choice_fields(request, answer.delta),
        }
        if request.return_token_ids:
            choice["prompt_token_ids"] = list(prompt.token_ids)
        return choice
