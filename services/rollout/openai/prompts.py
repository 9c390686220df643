"""Turns chat messages and texts into the tokens an engine is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from services.rollout.episodes.images import NO_IMAGES, Passage, SampleImages
from services.rollout.openai.requests import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from sluice.runtime.http import ApiError, read_json
from sluice.samples.chat_template import ChatTemplateError, NoChatTemplateError
from sluice.samples.messages import MessageError, template_messages
from sluice.samples.sample import MediaSpan
from sluice.samples.tokenizer import TextTokenizer, off_loop

MESSAGE_CHARACTERS = 100  # that take a tokenizer as long as a message takes a template


@dataclass(frozen=True)
class Prompt:
    """token_ids are what the model takes in; text is what they stand for, media what they show.

    Of an earlier conversation: a text that it may come back as, and its tokens. A text has one
    placeholder for each image.
    """

    text: str
    token_ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()

    @property
    def shown(self) -> list[str]:
        """Digests of its images, in order: placeholders look alike whatever they show."""
        return [span.digest for span in self.media]


async def chat_prompt(
    tokenizer: TextTokenizer,
    request: ChatRequest,
    messages: Sequence[Mapping[str, Any]],
    earlier: Sequence[Prompt] = (),
    images: SampleImages = NO_IMAGES,
) -> Prompt:
    """Encodes a conversation up to where the assistant begins; `messages` are the request's.

    Where it goes on from an earlier one, the tokens of that one are taken as they are: text
    that was sampled is never tokenised again. Raises ApiError and ServiceError.
    """
    tools = request.tools if request.shows_tools else []
    text = await chat_text(tokenizer, messages, tools, request.chat_template_kwargs)
    shown = await images.show(messages)
    begun = _begun(text, earlier, [image.blob.digest for image in shown])
    rest = await encode(tokenizer, text[len(begun.text) :], special=False)
    return _followed(begun, text, images.images.expand(rest, shown[len(begun.media) :]))


async def chat_text(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """Writes the conversation by the model's chat template; a long one in a thread.

    Raises ApiError.
    """
    size = MESSAGE_CHARACTERS * (len(messages) + len(tools))
    return await off_loop(size, lambda: _rendered(tokenizer, messages, tools, options))


def _rendered(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None,
) -> str:
    plain = [_message(message, index) for index, message in enumerate(messages)]
    try:
        return tokenizer.chat_template.render(plain, tools=tools or None, options=options)
    except ChatTemplateError as error:
        raise ApiError(400, "invalid_messages", str(error), "messages") from None


async def plain_prompt(
    tokenizer: TextTokenizer,
    prompt: str | list[int],
    earlier: Sequence[Prompt] = (),
    images: SampleImages = NO_IMAGES,
) -> Prompt:
    """Encodes a text as the model expects it, or takes tokens as they are.

    It shows no images, nor may it hold their placeholders. Raises ApiError and ServiceError.
    """
    if not isinstance(prompt, str):
        (text,) = tokenizer.decode([prompt], special=True)
        return Prompt(text, tuple(images.images.expand(prompt, ()).token_ids))
    begun = _begun(prompt, earlier, [])
    rest = await encode(tokenizer, prompt[len(begun.text) :], special=not begun.token_ids)
    followed = _followed(begun, prompt, images.images.expand(rest, ()))
    if not followed.token_ids:
        raise ApiError(400, "invalid_value", "prompt: has no tokens", "prompt")
    return followed


def _begun(text: str, earlier: Sequence[Prompt], shown: Sequence[str]) -> Prompt:
    """Finds the longest earlier conversation that a text with these images goes on from."""
    fitting = [
        each
        for each in earlier
        if text.startswith(each.text) and each.shown == shown[: len(each.media)]
    ]
    return max(fitting, key=lambda each: len(each.text), default=Prompt("", ()))


def _followed(begun: Prompt, text: str, rest: Passage) -> Prompt:
    media = [span.placed(len(begun.token_ids), 0) for span in rest.media]
    return Prompt(text, (*begun.token_ids, *rest.token_ids), (*begun.media, *media))


async def encode(tokenizer: TextTokenizer, text: str, *, special: bool) -> list[int]:
    """Returns token ids; long texts are tokenised in a thread."""
    return await off_loop(len(text), partial(tokenizer.encode, text, special=special))


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns a message as templates want it: arguments of calls are objects, images bare."""
    field = f"messages.{index}"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, "invalid_value", f"{field}.role: is required", f"{field}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _content(message.get("content"), f"{field}.content")
    if calls := plain.get("tool_calls"):
        if not isinstance(calls, list):
            field = f"{field}.tool_calls"
            raise ApiError(400, "invalid_value", f"{field}: must be a list", field)
        plain["tool_calls"] = [_tool_call(call, f"{field}.tool_calls") for call in calls]
    return plain


def _content(content: Any, field: str) -> Any:
    try:
        (plain,) = template_messages([{"content": "" if content is None else content}])
    except MessageError as error:
        message = f"{field}: text and images can be read here: {error}"
        raise ApiError(400, "unsupported_content", message, field) from None
    return plain["content"]


def _tool_call(call: Any, field: str) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = read_json((function["arguments"] or "{}").encode())
        return {**call, "function": function}
    except (ApiError, KeyError, TypeError, ValueError) as error:
        raise ApiError(400, "invalid_value", f"{field}: {error}", field) from None


class Tokenization:
    """Serves texts to tokens and back."""

    def __init__(self, tokenizer: TextTokenizer, seconds: float) -> None:
        """A body must come within `seconds`."""
        self._tokenizer, self._seconds = tokenizer, seconds

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/tokenizer_info", self._info),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _info(self, request: web.Request) -> web.Response:
        try:
            template = self._tokenizer.chat_template.source
        except NoChatTemplateError:
            template = None
        tokens = {"bos_token": None, "eos_token": None, **self._tokenizer.special_tokens}
        return web.json_response({**tokens, "chat_template": template})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await parse(request, TokenizeRequest, self._seconds)
        if body.messages is not None:
            text, special = await chat_text(self._tokenizer, body.messages), False
        else:
            text, special = body.prompt or "", body.add_special_tokens
        token_ids = await encode(self._tokenizer, text, special=special)
        return web.json_response({"tokens": token_ids, "count": len(token_ids)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await parse(request, DetokenizeRequest, self._seconds)
        (text,) = self._tokenizer.decode([body.tokens], special=True)
        return web.json_response({"prompt": text})
