"""The tokenizer of the model, for harnesses that have none: the endpoints are vLLM's."""

from __future__ import annotations

from aiohttp import web

from services.rollout.openai.prompts import chat_text, encode
from services.rollout.openai.requests import DetokenizeRequest, TokenizeRequest, parse
from sluice.samples.chat_template import NoChatTemplateError
from sluice.samples.tokenizer import TextTokenizer


class Tokenization:
    """Texts to tokens and back."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

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
        body = await parse(request, TokenizeRequest)
        if body.messages is not None:
            text, special = chat_text(self._tokenizer, body.messages), False
        else:
            text, special = body.prompt or "", body.add_special_tokens
        token_ids = await encode(self._tokenizer, text, special=special)
        return web.json_response({"tokens": token_ids, "count": len(token_ids)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await parse(request, DetokenizeRequest)
        (text,) = self._tokenizer.decode([body.tokens], special=True)
        return web.json_response({"prompt": text})
