"""Serves OpenAI's HTTP: routes, the API key, limits, deadlines, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

from aiohttp import web
from pydantic import TypeAdapter

from services.rollout import metrics
from services.rollout.config import RolloutConfig
from services.rollout.engine.interface import Engine
from services.rollout.engine.wire import MediaReader
from services.rollout.episodes.engines import LOCAL_ADDRESS, EngineAccess, LocalLeases
from services.rollout.episodes.images import Images
from services.rollout.episodes.sampler import Sampler
from services.rollout.openai.completions import Chat, Chunk, Completions, Responder
from services.rollout.openai.generation import Generator
from services.rollout.openai.prompts import Tokenization
from services.rollout.openai.recorder import Recorder
from services.rollout.openai.requests import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Name,
    Record,
    RewardRequest,
    parse,
)
from sluice.address import join_address
from sluice.place import directory_of
from sluice.runtime.http import REFUSALS, ApiError, HttpRunner, api_error, check_key
from sluice.runtime.security import http_context
from sluice.runtime.server import ServerConfig
from sluice.runtime.waits import Waits
from sluice.samples.blob_store import open_blobs
from sluice.samples.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

OPEN_PORTS = (
    (
        "HTTP of a rollout process, as OpenAI's clients speak it; only with `openai:`",
        "`server.host`, `openai.port`",
        "certificate, and the token as the API key; `/health` needs none",
    ),
)
RECORD_HEADER = "X-Sluice-Record"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_NAME = TypeAdapter(Name)


class OpenAIServer:
    """Serves from `start` to `close`; refuses to generate until `set_ready`."""

    def __init__(self, responder: Responder, server: ServerConfig, drain_seconds: float) -> None:
        """Raises ConfigError for a token or certificate that cannot be read."""
        self.responder, self._server, self._drain_seconds = responder, server, drain_seconds
        self._chat, self._completions = Chat(responder), Completions(responder)
        self._seconds = responder.config.request_seconds
        self._tokens = Tokenization(responder.generator.tokenizer, self._seconds)
        self._token = server.security.token()
        tls = server.security.tls
        self._tls = None if tls is None else http_context(tls)
        self._running = 0
        self._ready = False
        self._started = int(time.time())
        self._runner: HttpRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """What clients take as base_url."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{join_address(self._server.host, self.port)}/v1"

    async def start(self) -> None:
        """Open the port. Raises ConfigError when it is taken."""
        self._runner = HttpRunner(
            self._application(),
            handler_cancellation=True,  # a caller that goes away ends its sampling
            access_log=None,
            shutdown_timeout=max(0.01, self._drain_seconds),  # 0 is forever
        )
        self.port = await self._runner.open_port(
            self._server, self.responder.config.port, self._tls, setting="openai.port"
        )
        logger.info("OpenAI-compatible at %s", self.url)

    def set_ready(self) -> None:
        """Begin to take requests: the engines can be asked."""
        self._ready = True

    async def close(self) -> None:
        """Take no more; let what runs end within the drain time."""
        self._ready = False
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        await asyncio.to_thread(self.responder.generator.images.close)

    def _application(self) -> web.Application:
        application = web.Application(
            middlewares=[self._guard], client_max_size=self.responder.config.max_body_bytes
        )
        group = "/sluice/v1/groups/{group}"
        application.add_routes(
            [
                web.get("/health", self._health),
                *self._tokens.routes(),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model}", self._model),
                web.post("/v1/chat/completions", self._answer_chat),
                web.post("/v1/completions", self._answer_completion),
                web.get("/sluice/v1/groups", self._list_groups),
                web.get(group, self._get_group),
                web.get(f"{group}/lines", self._get_lines),
                web.post(f"{group}/rewards", self._reward_group),
                web.post(f"{group}/close", self._close_group),
                web.delete(group, self._delete_group),
            ]
        )
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the key; turns refusals into OpenAI's errors; counts."""
        began = time.monotonic()
        try:
            if request.path != "/health":
                check_key(request, self._token)
            response = await handler(request)
        except REFUSALS as error:
            response = api_error(error).response()
        metrics.HTTP_REQUESTS.labels(f"{response.status // 100}xx").inc()
        metrics.HTTP_SECONDS.observe(time.monotonic() - began)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._ready else 503)

    def _model_entry(self) -> Chunk:
        name = self.responder.model_name
        return {"id": name, "object": "model", "created": self._started, "owned_by": "sluice"}

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_entry()]})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != self.responder.model_name:
            raise ApiError(404, "model_not_found", "the model does not exist", "model")
        return web.json_response(self._model_entry())

    async def _answer_chat(self, request: web.Request) -> web.StreamResponse:
        body = await parse(request, ChatRequest, self._seconds)
        record = _record_of(request, body)
        if body.stream:
            return await self._send_stream(request, self._chat.stream(body, record))
        with self._slot():
            async with self._deadline():
                return web.json_response(await self._chat.answer(body, record))

    async def _answer_completion(self, request: web.Request) -> web.StreamResponse:
        body = await parse(request, CompletionRequest, self._seconds)
        record = _record_of(request, body)
        if body.stream:
            return await self._send_stream(request, self._completions.stream(body, record))
        with self._slot():
            async with self._deadline():
                return web.json_response(await self._completions.answer(body, record))

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """Takes one of the places for requests that run. Raises ApiError."""
        if not self._ready:
            raise ApiError(503, "not_ready", "the server starts or stops; try again")
        if self._running >= self.responder.config.max_running:
            raise ApiError(429, "too_many_requests", f"{self._running} requests run; try again")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _deadline(self) -> asyncio.Timeout:
        return asyncio.timeout(self._seconds)

    async def _send_stream(
        self, request: web.Request, chunks: AsyncGenerator[Chunk, None]
    ) -> web.StreamResponse:
        """Sends server-sent events. A refusal before the first chunk has a status of its own."""
        with self._slot():
            async with contextlib.aclosing(chunks):
                async with self._deadline():
                    first = await anext(chunks)
                response = web.StreamResponse(
                    headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                )
                await response.prepare(request)
                await _send(response, first)
                try:
                    async with self._deadline():
                        async for chunk in chunks:
                            await _send(response, chunk)
                        await response.write(b"data: [DONE]\n\n")
                except ConnectionError:
                    logger.info("a caller left in the middle of its stream")
                except REFUSALS as error:
                    await _send(response, api_error(error).body())
                return response

    async def _list_groups(self, request: web.Request) -> web.Response:
        return web.json_response(await self.responder.recorder.names())

    async def _get_group(self, request: web.Request) -> web.Response:
        return web.json_response(await self.responder.recorder.describe(_group_of(request)))

    async def _get_lines(self, request: web.Request) -> web.Response:
        return web.json_response({"lines": await self.responder.recorder.lines(_group_of(request))})

    async def _reward_group(self, request: web.Request) -> web.Response:
        body = await parse(request, RewardRequest, self._seconds)
        group = await self.responder.recorder.reward(_group_of(request), body.rewards)
        return web.json_response(group)

    async def _close_group(self, request: web.Request) -> web.Response:
        return web.json_response(await self.responder.recorder.close(_group_of(request)))

    async def _delete_group(self, request: web.Request) -> web.Response:
        await self.responder.recorder.delete(_group_of(request))
        return web.json_response({"deleted": True})


async def _send(response: web.StreamResponse, chunk: Chunk) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


def _record_of(request: web.Request, body: CommonRequest) -> Record | None:
    """Reads the field, or the header where a client can set no more than that."""
    header = request.headers.get(RECORD_HEADER)
    if header is None or body.sluice_record is not None:
        return body.sluice_record
    return Record.parse(header)


def _group_of(request: web.Request) -> str:
    return _NAME.validate_python(request.match_info["group"])


def create_server(
    config: RolloutConfig, generator: Generator, drain_seconds: float
) -> OpenAIServer:
    """Builds the server. Raises ConfigError."""
    assert config.openai is not None
    blobs = open_blobs(config.store, config.store_cache, sync=config.store_sync)
    store = directory_of(config.store)
    records = config.openai.records or (store and store / "records")
    assert records is not None  # a setting of its own for a bucket
    responder = Responder(
        config=config.openai,
        model_name=config.openai.model_name or config.pool,
        generator=generator,
        recorder=Recorder(
            records, blobs, generator.tokenizer, config.openai, sync=config.store_sync
        ),
    )
    return OpenAIServer(responder, config.server, drain_seconds)


def local_generator(config: RolloutConfig, engine: Engine, waits: Waits) -> Generator:
    """Samples with the engine of this process alone. Raises ConfigError without a tokenizer."""
    assert config.tokenizer_directory is not None
    blobs = open_blobs(config.store, config.store_cache, sync=config.store_sync)
    images = Images.of_model(config.tokenizer_directory, blobs, config.images)
    engines = EngineAccess(config.server.security, MediaReader(blobs), images.processor)
    engines.add_local(LOCAL_ADDRESS, engine)
    leases = LocalLeases(engine, config.engine_id)
    sampler = Sampler(leases, engines, waits, attempts=config.episodes.engine_attempts)
    directory = config.tokenizer_directory
    return Generator(TextTokenizer(directory), sampler, config.pool, images)
