"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from services.rollout.concurrency import all_of
from services.rollout.openai import answers as encode
from services.rollout.openai.answers import Names, Scored
from services.rollout.openai.generation import Answer, Ask
from services.rollout.openai.prompts import Prompt, chat_prompt
from services.rollout.openai.requests import ChatRequest, Record
from services.rollout.openai.shared import Chunk, Shared
from services.rollout.openai.tools import CallFilter, ToolCalls


class _Form:
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
        return encode.chat_logprobs(names, scored)


class Chat:
    """Conversations, by the model's own chat template."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._calls = shared, ToolCalls()

    async def answer(self, request: ChatRequest, record: Record | None) -> Chunk:
        """Raises ApiError, ServiceError and RemoteError."""
        shared = self._shared
        prompt, ask = await self._prepare(request, record)
        answers = await shared.generator.answer(ask)
        choices = await all_of(
            self._choice(request, prompt, index, answer) for index, answer in enumerate(answers)
        )
        if record:
            await shared.recorder.add(record, prompt, answers)
        body = shared.body("chat.completion", _Form.prefix, [prompt], answers)
        if request.return_token_ids:
            body["prompt_token_ids"] = list(prompt.token_ids)
        return body | {"choices": choices}

    async def stream(
        self, request: ChatRequest, record: Record | None
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks. Raises ApiError, ServiceError and RemoteError."""
        prompt, ask = await self._prepare(request, record)
        filters = [CallFilter(self._calls) for _ in range(request.n)] if request.shows_tools else []
        async for chunk in self._shared.stream(request, prompt, ask, record, _Form(filters)):
            yield chunk

    async def _prepare(self, request: ChatRequest, record: Record | None) -> tuple[Prompt, Ask]:
        shared = self._shared
        shared.check(request, 1, request.token_limit)
        earlier = await shared.recorder.earlier(record) if record else ()
        messages = [self._calls.restore(message) for message in request.messages]
        prompt = await chat_prompt(shared.tokenizer, request, messages, earlier)
        return prompt, shared.ask(request, prompt, request.token_limit or shared.config.max_tokens)

    async def _choice(
        self, request: ChatRequest, prompt: Prompt, index: int, answer: Answer
    ) -> Chunk:
        logprobs = None
        if request.logprobs:
            scored = await self._shared.scored(
                prompt, answer, top_count=request.top_logprobs, echo=False
            )
            logprobs = encode.chat_logprobs(self._shared.names(request), scored)
        said, calls = self._calls.split(answer.text) if request.shows_tools else (answer.text, [])
        message: Chunk = {"role": "assistant", "content": said, "refusal": None}
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            **encode.choice_fields(request, answer.delta),
        }
        if calls:
            message |= {"content": said or None, "tool_calls": calls}
            choice["finish_reason"] = "tool_calls"
        return choice
