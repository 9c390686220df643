"""Tool calls between OpenAI's form and the text that a model wrote."""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from services.rollout.engine.interface import Delta, FinishReason
from services.rollout.environments.tools import OPEN, parse_calls
from services.rollout.openai import answers as encode
from services.rollout.openai.answers import Names, Scored
from services.rollout.openai.generation import Answer, Ask
from services.rollout.openai.prompts import Prompt, chat_prompt, plain_prompt
from services.rollout.openai.requests import ApiError, ChatRequest, CompletionRequest, Record
from services.rollout.openai.shared import Chunk, Shared
from sluice.runtime.idempotency import all_of

REMEMBERED_CALLS = 10_000


class ToolCalls:
    """Finds calls in answers, and remembers the text of each.

    A caller sends calls back as JSON, which a template would write in its own way. The text as it
    was sampled takes their place, so that the conversation goes on from the very tokens.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()  # of answers, by the id of a call

    def split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What was said before the first call, and the calls; all is said if one is malformed."""
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

    def restore(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message whose calls were found here, as it was sampled; any other as it is."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            return message
        texts = {self._texts.get(str(call.get("id"))) for call in calls}
        if len(texts) != 1 or None in texts:
            return message
        (text,) = texts
        return {"role": message.get("role"), "content": text}


class CallFilter:
    """Streams what is said; from where a call may begin on, nothing is shown until the end."""

    def __init__(self, calls: ToolCalls) -> None:
        self._calls = calls
        self._text, self._shown = "", 0

    def add(self, text: str) -> str:
        """What may be shown now."""
        self._text += text
        end = self._text.find(OPEN)
        if end < 0:
            sizes = range(min(len(OPEN) - 1, len(self._text)), 0, -1)
            held = next((size for size in sizes if OPEN.startswith(self._text[-size:])), 0)
            end = len(self._text) - held
        # White space before a call is not said.
        end = max(self._shown, len(self._text[:end].rstrip()))
        start, self._shown = self._shown, end
        return self._text[start:end]

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of what is said, and the calls."""
        said, calls = self._calls.split(self._text)
        return said[self._shown :], calls


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
        body = shared.body("chat.completion", _ChatForm.prefix, [prompt], answers)
        if request.return_token_ids:
            body["prompt_token_ids"] = list(prompt.token_ids)
        return body | {"choices": choices}

    async def stream(
        self, request: ChatRequest, record: Record | None
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks. Raises ApiError, ServiceError and RemoteError."""
        prompt, ask = await self._prepare(request, record)
        filters = [CallFilter(self._calls) for _ in range(request.n)] if request.shows_tools else []
        async for chunk in self._shared.stream(request, prompt, ask, record, _ChatForm(filters)):
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


class _CompletionForm:
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
        return shared.body(_CompletionForm.kind, _CompletionForm.prefix, prompts, every) | {
            "choices": choices
        }

    async def stream(
        self, request: CompletionRequest, record: Record | None
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks. Raises ApiError, ServiceError and RemoteError."""
        prompts = await self._prepare(request, record)
        if len(prompts) > 1:
            raise ApiError(400, "invalid_value", "prompt: one at a time with stream", "prompt")
        ask = self._shared.ask(request, prompts[0], request.max_tokens)
        async for chunk in self._shared.stream(request, prompts[0], ask, record, _CompletionForm()):
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
