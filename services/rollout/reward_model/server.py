"""HTTP of a reward model: POST /classify as SGLang has it, its limits, and what it refuses.

{"model", "text": [...]} -> [{"embedding": [score], "meta_info": {"prompt_tokens"}}, ...]
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import BaseModel

from services.rollout.reward_model import metrics
from services.rollout.reward_model.batching import Batches, BusyError
from services.rollout.reward_model.config import RewardModelConfig
from sluice.runtime.http import (
    REFUSALS,
    ApiError,
    HttpRunner,
    api_error,
    check_key,
    read_body,
    read_json,
    url_of,
)
from sluice.runtime.security import http_context
from sluice.samples.tokenizer import off_loop

if TYPE_CHECKING:
    from services.rollout.reward_model.model import ValueModel

logger = logging.getLogger(__name__)

OPEN_PORTS = (
    (
        "HTTP of a reward model: `/classify`",
        "`server.host`, `classify.port`",
        "certificate, and the token as the API key; `/health` needs none",
    ),
)
CAUSES = {401: "key", 404: "model", 413: "size", 503: "busy", 504: "deadline"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ClassifyRequest(BaseModel, extra="forbid", strict=True):
    """POST /classify. One text is answered by one object, a list by a list."""

    model: str
    text: str | list[str]


class ClassifyServer:
    """Listens from `start` to `close`; refuses to score until it is told by what."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises ConfigError for a token or certificate that cannot be read."""
        self._config, self._limits = config, config.classify
        self._token = config.server.security.token()
        tls = config.server.security.tls
        self._tls = None if tls is None else http_context(tls)
        self._serving: tuple[ValueModel, Batches] | None = None
        self._is_ready = False
        self._running = 0
        self._runner: HttpRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """What graders take as `url`."""
        return f"{url_of(self._config.server, self.port)}/classify"

    async def start(self) -> None:
        """Open the port. Raises ConfigError when it is taken."""
        application = web.Application(
            middlewares=[self._guard], client_max_size=self._limits.max_body_bytes
        )
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/model_info", self._describe),
                web.post("/classify", self._classify),
            ]
        )
        self._runner = HttpRunner(
            application,
            handler_cancellation=True,  # a caller that goes away has no more scored
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=max(0.01, self._config.server.drain_seconds),  # 0 is forever
        )
        self.port = await self._runner.open_port(
            self._config.server, self._limits.port, self._tls, setting="classify.port"
        )
        logger.info("scores at %s", self.url)

    def serve(self, model: ValueModel, batches: Batches) -> None:
        """Score with these from now on."""
        self._serving, self._is_ready = (model, batches), True

    def set_ready(self, is_ready: bool) -> None:
        """Take requests, or refuse them for now."""
        self._is_ready = is_ready

    async def close(self) -> None:
        """Take no more; let what runs end within the drain time."""
        self._is_ready = False
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the key; writes refusals as JSON; counts."""
        began = time.monotonic()
        try:
            if request.path != "/health":
                check_key(request, self._token)
            response = await handler(request)
        except REFUSALS as error:
            response = api_error(error).response()
        if request.path == "/classify":
            metrics.REQUESTS.labels(f"{response.status // 100}xx").inc()
            metrics.REQUEST_SECONDS.observe(time.monotonic() - began)
            if response.status >= 400:
                metrics.REFUSED.labels(CAUSES.get(response.status, "other")).inc()
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._is_ready else 503)

    async def _describe(self, request: web.Request) -> web.Response:
        model, _ = self._ready()
        return web.json_response(
            {
                "model": self._config.model_name,
                "digest": model.digest,
                "max_length": model.max_length,
            }
        )

    async def _classify(self, request: web.Request) -> web.Response:
        with self._place():
            async with asyncio.timeout(self._limits.request_seconds):
                return web.json_response(await self._answer(request))

    async def _answer(self, request: web.Request) -> Any:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "unsupported_encoding", "the body must not be compressed")
        data = read_json(await read_body(request, self._limits.request_seconds))
        body = ClassifyRequest.model_validate(data)
        model, batches = self._ready()
        self._check_model(body.model, model.digest)
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not 0 < len(texts) <= self._limits.max_texts:
            message = f"text: {len(texts)} texts, of 1 to {self._limits.max_texts}"
            raise ApiError(400, "invalid_value", message, "text")
        size = sum(map(len, texts))
        tokens = await off_loop(size, lambda: model.encode(texts))
        _check_tokens(tokens, model)
        scores = await batches.score(tokens)
        _check_scores(scores)
        found = [
            {"embedding": [score], "meta_info": {"prompt_tokens": len(each)}}
            for score, each in zip(scores, tokens, strict=True)
        ]
        return found[0] if isinstance(body.text, str) else found

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Takes one of the places for requests, before a body is read. Raises ApiError."""
        self._ready()
        if self._running >= self._limits.max_requests:
            raise BusyError(f"{self._running} requests run (classify.max_requests)")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _ready(self) -> tuple[ValueModel, Batches]:
        if self._serving is None or not self._is_ready:
            raise ApiError(503, "not_ready", "the model loads, is stuck, or the server stops")
        return self._serving

    def _check_model(self, asked: str, digest: str) -> None:
        name = self._config.model_name
        if asked not in (name, digest, f"{name}@{digest}"):
            raise ApiError(
                404, "model_not_found", f"here is {name}@{digest}, not {asked[:200]!r}", "model"
            )


def _check_tokens(texts: Sequence[Sequence[int]], model: ValueModel) -> None:
    """Raises ApiError for a text that the model cannot take."""
    for index, tokens in enumerate(texts):
        field = f"text.{index}"
        if not tokens:
            raise ApiError(400, "invalid_value", f"{field}: no token", field)
        if len(tokens) > model.max_length:
            message = f"{field}: {len(tokens)} tokens exceed {model.max_length}"
            raise ApiError(400, "context_length_exceeded", message, field)
        if max(tokens) >= model.vocabulary:
            message = f"{field}: token {max(tokens)}, of a model that knows {model.vocabulary}"
            raise ApiError(400, "invalid_value", message, field)


def _check_scores(scores: Sequence[float]) -> None:
    """Raises ApiError for what is no number: JSON has none, and no reward is."""
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            raise ApiError(422, "score_not_finite", f"text.{index}: the model gives {score}")
