"""Tinker's HTTP: routes, the API key, limits, answers that are waited for, refusals.

A request of training or sampling is answered by the name of a future, which the client asks for
again and again. A status of 5xx, 408 or 429 has it try again; a 4xx is final.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import grpc
from aiohttp import web
from pydantic import BaseModel, ValidationError

from services.gateway import metrics, requests
from services.gateway.config import GatewayConfig
from services.gateway.datums import parse_header
from services.gateway.errors import GoneError, JournalDamagedError, RefusedError, is_own_fault
from services.gateway.journal import (
    Checkpoint,
    Model,
    SamplerRecord,
    Session,
    TrainingRequest,
    digest_of,
)
from services.gateway.models import PROTO, taken_sampler
from services.gateway.registry import ModelRegistry
from services.gateway.samplers import Engines, Samplers
from sluice.runtime.errors import RemoteError, ServiceError
from sluice.runtime.http import (
    REFUSALS,
    ApiError,
    HttpRunner,
    api_error,
    read_body,
    read_json,
    url_of,
)
from sluice.runtime.idempotency import RequestTable
from sluice.runtime.recovery import NotReadyError
from sluice.runtime.security import http_context

logger = logging.getLogger(__name__)

OPEN_PORTS = (
    (
        "HTTP of a gateway, as Tinker's client speaks it",
        "`server.host`, `tinker.port`",
        "certificate, and the token as the API key; `/api/v1/healthz` needs none",
    ),
)
API = "/api/v1"
LAST_SEQ = 2**31 - 1
LONGEST_PAGE = 1000  # entries of a list; its cursor says so
LEAVE_SECONDS = 0.5  # for what is being answered: who waits for an answer asks again
SEEN_SECONDS = 10.0  # between two signs of life that are written
KEY_PREFIX = "tml-"  # the client takes no key without it
ANSWER_BYTES = 1 << 28  # of sampling requests that are done, which are kept until others are
UNEMBED = (
    "train_unembed has no effect here: the output layer takes no adapter. Telemetry is not kept."
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=BaseModel)


@dataclass(eq=False)
class SamplingRequest:
    """A sampling request that runs, or has been answered."""

    session: str
    task: asyncio.Task[bytes]

    @property
    def weight(self) -> float:
        if self.task.cancelled() or self.task.exception() is not None:
            return 1024.0
        return 1024.0 + len(self.task.result())


class TinkerServer:
    """Serves from `start` to `close`."""

    def __init__(
        self, config: GatewayConfig, registry: ModelRegistry, engines: Engines, samplers: Samplers
    ) -> None:
        """Raises ConfigError for a token or certificate that cannot be read."""
        self._config, self._registry, self._journal = config, registry, registry.journal
        self._engines, self._samplers = engines, samplers
        self._token = config.server.security.token()
        tls = config.server.security.tls
        self._tls = None if tls is None else http_context(tls)
        self._sampling = RequestTable[SamplingRequest](ANSWER_BYTES, lambda each: each.weight)
        self._running: set[asyncio.Task[bytes]] = set()
        self._held = 0  # bytes of requests that the journal is yet to take
        self._seen: dict[str, float] = {}  # by session, when that was written last
        self._runner: HttpRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """What clients take as base_url."""
        return url_of(self._config.server, self.port)

    async def start(self) -> None:
        """Open the port. Raises ConfigError when it is taken."""
        application = web.Application(
            middlewares=[self._guard], client_max_size=self._config.tinker.max_body_bytes
        )
        application.add_routes(self._routes())
        self._runner = HttpRunner(
            application,
            access_log=None,
            shutdown_timeout=LEAVE_SECONDS,
        )
        self.port = await self._runner.open_port(
            self._config.server, self._config.tinker.port, self._tls, setting="tinker.port"
        )
        logger.info("Tinker-compatible at %s", self.url)

    async def close(self) -> None:
        """Take no more; what samples ends."""
        for task in self._running:
            task.cancel()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _routes(self) -> list[web.RouteDef]:
        run = "/training_runs/{run}"
        posts = {
            "/client/config": self._client_config,
            "/client/dynamic_config": self._dynamic_config,
            "/telemetry": self._telemetry,
            "/create_session": self._create_session,
            "/session_heartbeat": self._heartbeat,
            "/sessions/{session}/finish": self._finish_session,
            "/create_model": self._create_model,
            "/get_info": self._get_info,
            "/forward_backward": self._forward_backward,
            "/optim_step": self._optim_step,
            "/save_weights": self._save_weights,
            "/save_weights_for_sampler": self._save_for_sampler,
            "/load_weights": self._load_weights,
            "/create_sampling_session": self._create_sampler,
            "/join_sampling_session": self._join_sampler,
            "/asample": self._sample,
            "/retrieve_future": self._retrieve,
            "/cancel_future": self._cancel,
            "/weights_info": self._weights_info,
        }
        gets = {
            "/healthz": self._health,
            "/get_server_capabilities": self._capabilities,
            "/sessions": self._list_sessions,
            "/sessions/{session}": self._get_session,
            "/samplers/{sampler}": self._get_sampler,
            "/training_runs": self._list_runs,
            run: self._get_run,
            f"{run}/checkpoints": self._run_checkpoints,
            "/checkpoints": self._list_checkpoints,
        }
        checkpoint = f"{run}/checkpoints/{{kind}}/{{name}}"
        return [
            *(web.post(API + path, handler) for path, handler in posts.items()),
            *(web.get(API + path, handler) for path, handler in gets.items()),
            web.delete(API + checkpoint, self._delete_checkpoint),
            web.put(f"{API}{checkpoint}/ttl", self._set_ttl),
            web.route("*", "/{rest:.*}", self._refuse),
        ]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the key; turns refusals into statuses that the client understands; counts."""
        try:
            if request.path != f"{API}/healthz":
                self._check_key(request)
            response = await handler(request)
        except GoneError as error:
            response = ApiError(404, error.reason.lower(), str(error)).response()
        except JournalDamagedError as error:
            response = ApiError(410, error.reason.lower(), str(error)).response()
        except NotReadyError as error:
            response = ApiError(503, "not_ready", str(error)).response()
        except sqlite3.OperationalError as error:
            logger.error("%s: %s", self._config.journal, error)
            told = f"the gateway cannot write its journal: {error}"
            response = ApiError(503, "journal_failed", told).response()
        except REFUSALS as error:
            response = _final(error).response()
        metrics.HTTP_REQUESTS.labels(f"{response.status // 100}xx").inc()
        return response

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get("X-API-Key", "")
        if self._token is None:
            return
        for expected in (self._token, KEY_PREFIX + self._token):
            if hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode()):
                return
        raise ApiError(401, "invalid_api_key", f"the API key is missing or not {KEY_PREFIX}TOKEN")

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, self._config.tinker.body_seconds)

    async def _parsed(self, request: web.Request, kind: type[B]) -> tuple[B, bytes]:
        data = await self._body(request)
        return kind.model_validate(read_json(data)), data

    async def _refuse(self, request: web.Request) -> web.Response:
        raise ApiError(404, "not_served", f"{request.method} {request.path} is not served here")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _client_config(self, request: web.Request) -> web.Response:
        await self._body(request)
        return web.json_response(
            {
                "pjwt_auth_enabled": False,
                "credential_default_source": "api_key",
                "parallel_fwdbwd_chunks": True,
                "proto_compress_fwdbwd": False,
                "use_pyqwest_transport": False,
                "sample_max_concurrent_requests": self._config.tinker.max_running,
                "sample_use_retrieve_futures": False,
                "custom_loss_server_side": False,
                "sample_join_sampling_session": True,
            }
        )

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        await self._body(request)
        return web.json_response({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def _telemetry(self, request: web.Request) -> web.Response:
        await self._body(request)
        return web.json_response({"status": "accepted"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {
            "model_name": self._config.model_name,
            "max_context_length": await self._engines.max_length(),
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def _create_session(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.CreateSession)
        now = time.time()
        session = Session(
            id=uuid.uuid4().hex,
            created=now,
            seen=now,
            tags=tuple(body.tags),
            user_metadata=body.user_metadata,
            display_name=body.display_name,
        )
        await self._journal.add_session(session)
        return web.json_response(
            {"type": "create_session", "session_id": session.id, "warning_message": UNEMBED}
        )

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.OfSession)
        if self._journal.session_end(body.session_id) != "":
            raise ApiError(410, "session_finished", "the session has ended")
        self._registry.hear(body.session_id)
        await self._note_seen(body.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish_session(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.FinishSession)
        session_id, why = request.match_info["session"], str(body.reason.get("type") or "success")
        if self._journal.session_end(session_id) is None:
            raise _unknown_session(session_id)
        self._seen.pop(session_id, None)
        await self._registry.finish_session(session_id, why)
        return web.json_response({})

    async def _note_seen(self, session_id: str) -> None:
        if (now := time.monotonic()) - self._seen.get(session_id, -SEEN_SECONDS) >= SEEN_SECONDS:
            await self._registry.note_seen(session_id)
            self._seen[session_id] = now

    def _known_session(self, session_id: str) -> Session:
        session = self._journal.session(session_id)
        if session is None:
            raise _unknown_session(session_id)
        return session

    def _live_session(self, session_id: str) -> Session:
        session = self._known_session(session_id)
        if session.finished is not None:
            raise GoneError(f"session {session_id!r} has ended: {session.finished}")
        return session

    async def _create_model(self, request: web.Request) -> web.Response:
        body, data = await self._parsed(request, requests.CreateModel)
        session = self._live_session(body.session_id)
        self._check_base(body.base_model)
        lora = body.lora_config
        if lora is None:
            raise RefusedError("lora_config is missing: adapters alone are trained here")
        if body.optimizer_config.type != "adamw":
            raise RefusedError(
                f"optimizer_config: {body.optimizer_config.type!r} is not served here: adamw is"
            )
        tinker = self._config.tinker
        targets = (tinker.attention if lora.train_attn else ()) + (
            tinker.mlp if lora.train_mlp else ()
        )
        if not targets:
            raise RefusedError("lora_config: without train_attn and train_mlp nothing is trained")
        model = self._new_model(
            session,
            body.model_seq_id,
            rank=lora.rank,
            alpha=tinker.lora_alpha,
            targets=targets,
            seed=lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            user_metadata=body.user_metadata,
        )
        return await self._begin(model, data)

    def _check_base(self, name: str) -> None:
        known = {self._config.model_name, str(self._config.model)}
        if name not in known:
            raise RefusedError(
                f"base_model {name[:200]!r} is not served here: {self._config.model_name} is"
            )

    def _new_model(self, session: Session, seq: int, **numbers: Any) -> Model:
        now = time.time()
        return Model(
            id=f"{session.id}:train:{seq}",
            session=session.id,
            created=now,
            used=now,
            adapter=f"{session.id}-{seq}",
            **numbers,
        )

    async def _begin(self, model: Model, data: bytes) -> web.Response:
        create = TrainingRequest(
            model=model.id, seq=0, kind="create", digest=digest_of(data), body=data
        )
        await self._registry.begin(model, create)
        return _future(model.id, 0)

    async def _get_info(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.OfModel)
        model = self._journal.model(body.model_id)
        if model is None:
            raise GoneError(f"model {body.model_id[:80]!r} is not known")
        name = self._config.model_name
        return web.json_response(
            {
                "type": "get_info",
                "model_data": {
                    "arch": None,
                    "model_name": name,
                    "tokenizer_id": str(self._config.model),
                },
                "model_id": model.id,
                "is_lora": True,
                "lora_rank": model.rank,
                "model_name": name,
            }
        )

    async def _forward_backward(self, request: web.Request) -> web.Response:
        data = await self._body(request)
        if request.content_type != PROTO:
            raise ApiError(415, "unsupported_media", f"the body is no {PROTO}")
        model_id, seq, forward_only = parse_header(data)
        kind = "forward" if forward_only else "forward_backward"
        return await self._submit(model_id, seq, kind, data)

    async def _optim_step(self, request: web.Request) -> web.Response:
        return await self._submit_json(request, requests.OptimStep, "optim_step")

    async def _save_weights(self, request: web.Request) -> web.Response:
        return await self._submit_json(request, requests.SaveWeights, "save")

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        return await self._submit_json(request, requests.SaveForSampler, "publish")

    async def _submit_json(
        self, request: web.Request, kind: type[BaseModel], name: str
    ) -> web.Response:
        """Takes a request whatever else is wrong with it: those behind it wait for its place."""
        data = await self._body(request)
        values = read_json(data)
        if not isinstance(values, dict) or type(values.get("seq_id")) is not int:
            kind.model_validate(values)
            raise RefusedError("seq_id is missing, or no whole number")
        return await self._submit(str(values.get("model_id")), values["seq_id"], name, data)

    async def _submit(self, model_id: str, seq: int, kind: str, data: bytes) -> web.Response:
        if not 1 <= seq <= LAST_SEQ:
            raise RefusedError(f"seq_id is not from 1 to {LAST_SEQ}")
        model = self._registry.model(model_id)
        await self._note_seen(model.model.session)
        if self._held and self._held + len(data) > self._config.server.max_held_bytes:
            raise ApiError(429, "too_many_requests", f"{self._held} bytes wait for the journal")
        self._held += len(data)
        try:
            digest = await asyncio.to_thread(digest_of, data)
            await model.submit(
                TrainingRequest(model=model_id, seq=seq, kind=kind, digest=digest, body=data)
            )
        finally:
            self._held -= len(data)
        return _future(model_id, seq)

    async def _load_weights(self, request: web.Request) -> web.Response:
        data = await self._body(request)
        values = read_json(data)
        if isinstance(values, dict) and values.get("session_id") is not None:
            return await self._create_by_load(requests.LoadWeights.model_validate(values), data)
        return await self._submit_json(request, requests.LoadWeights, "load")

    async def _create_by_load(self, body: requests.LoadWeights, data: bytes) -> web.Response:
        session = self._live_session(str(body.session_id))
        if body.model_seq_id is None:
            raise RefusedError("model_seq_id is missing")
        if body.base_model is not None:
            self._check_base(body.base_model)
        if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
            raise RefusedError(
                f"optimizer_config: {body.optimizer_config.type!r} is not served here: adamw is"
            )
        if body.weights_access_token is not None:
            raise RefusedError("weights_access_token is not served here")
        source = self._registry.training(body.path)
        model = self._new_model(
            session,
            body.model_seq_id,
            rank=source.rank,
            alpha=source.alpha,
            targets=source.targets,
            train_attn=source.train_attn,
            train_mlp=source.train_mlp,
            user_metadata=body.user_metadata,
        )
        return await self._begin(model, data)

    async def _create_sampler(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.CreateSampler)
        session = self._live_session(body.session_id)
        sampler_id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        known = self._journal.sampler(sampler_id)
        if known is None:
            await self._journal.add_sampler(self._new_sampler(sampler_id, session, body))
        elif known.path != body.model_path or (known.version and known.path is None):
            raise RefusedError(taken_sampler(body.sampling_session_seq_id))
        return web.json_response(
            {"type": "create_sampling_session", "sampling_session_id": sampler_id}
        )

    def _new_sampler(
        self, sampler_id: str, session: Session, body: requests.CreateSampler
    ) -> SamplerRecord:
        now = time.time()
        if body.base_model is not None:
            self._check_base(body.base_model)
        if body.model_path is None:
            if body.base_model is None:
                raise RefusedError("base_model, or model_path, is missing")
            return SamplerRecord(id=sampler_id, session=session.id, created=now)
        found = self._journal.checkpoint(body.model_path)
        if found is None or found.kind != "sampler":
            raise RefusedError(
                f"model_path {body.model_path[:300]!r} names no weights to sample from: "
                "those of save_weights_for_sampler are"
            )
        return SamplerRecord(
            id=sampler_id,
            session=session.id,
            created=now,
            path=found.path,
            adapter=found.adapter,
            version=found.version,
            digest=found.digest,
        )

    async def _join_sampler(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.OfSampler)
        sampler = self._known_sampler(body.sampling_session_id)
        number = await self._journal.join_sampler(sampler.id)
        return web.json_response({"type": "join_sampling_session", "client_counter": number})

    def _known_sampler(self, sampler_id: str | None) -> SamplerRecord:
        sampler = self._journal.sampler(sampler_id or "")
        if sampler is None:
            raise GoneError(f"sampling session {str(sampler_id)[:80]!r} is not known")
        return sampler

    async def _sample(self, request: web.Request) -> web.Response:
        body, data = await self._parsed(request, requests.SampleTokens)
        sampler = self._known_sampler(body.sampling_session_id)
        if body.seq_id is None:
            raise RefusedError("seq_id is missing")
        request_id, digest = f"{sampler.id}:{body.seq_id}", digest_of(data)
        if self._sampling.find(request_id, digest) is None:
            if len(self._running) >= self._config.tinker.max_running:
                raise ApiError(429, "too_many_requests", f"{len(self._running)} requests run")
            self._start_sampling(request_id, digest, sampler, body)
        self._registry.hear(sampler.session)
        count = min(body.num_samples, self._config.tinker.max_samples)  # no more are answered
        ids = [f"{request_id}:{index}" for index in range(count)]
        return web.json_response({"request_id": request_id, "sample_sequence_ids": ids})

    def _start_sampling(
        self, request_id: str, digest: str, sampler: SamplerRecord, body: requests.SampleTokens
    ) -> None:
        work = self._answer_sample(sampler, body)
        task = asyncio.create_task(work, name=f"sample {request_id}")
        entry = self._sampling.add(request_id, digest, SamplingRequest(sampler.session, task))
        self._running.add(task)
        self._registry.add_sample(sampler.session, task)
        metrics.SAMPLING.set(len(self._running))

        def ended(task: asyncio.Task[bytes]) -> None:
            self._running.discard(task)
            metrics.SAMPLING.set(len(self._running))
            outcome = "cancelled" if task.cancelled() else "done"
            if outcome == "done" and task.exception() is not None:
                outcome = "failed"
            metrics.SAMPLES.labels(outcome).inc()
            if task.cancelled():
                self._sampling.discard(request_id, entry)
            else:
                self._sampling.done(request_id, entry)

        task.add_done_callback(ended)

    async def _answer_sample(self, sampler: SamplerRecord, body: requests.SampleTokens) -> bytes:
        with metrics.SAMPLE_SECONDS.time():
            async with asyncio.timeout(self._config.tinker.request_seconds):
                return await self._samplers.sample(sampler, body)

    async def _retrieve(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.RetrieveFuture)
        seconds = self._config.tinker.poll_seconds
        sampling = self._sampling.get(body.request_id)
        if sampling is not None:
            return await self._await_sample(sampling, seconds)
        owner, _, seq = body.request_id.rpartition(":")
        if ":sample:" in body.request_id:  # of a gateway that has ended since: asked for again
            raise ApiError(410, "gone", "the answer is not kept any more; sample again")
        if not seq.isascii() or not seq.isdecimal() or len(seq) > 10 or int(seq) > LAST_SEQ:
            raise GoneError(f"request {body.request_id[:80]!r} is not known")
        try:
            done = await self._registry.model(owner).answer(int(seq), seconds)
        except JournalDamagedError as error:
            return web.json_response({"error": str(error), "category": "server"})
        if done is None:
            return _try_again()
        assert done.answer is not None and done.media is not None
        return web.Response(body=done.answer, content_type=done.media)

    async def _await_sample(self, sampling: SamplingRequest, seconds: float) -> web.Response:
        self._registry.hear(sampling.session)
        await asyncio.wait([sampling.task], timeout=seconds)
        if not sampling.task.done():
            return _try_again()
        if sampling.task.cancelled():
            raise ApiError(410, "gone", "the sampling was cancelled")
        error = sampling.task.exception()
        if error is None:
            return web.Response(body=sampling.task.result(), content_type=PROTO)
        if isinstance(error, ServiceError | RemoteError):
            user = is_own_fault(error)
        elif isinstance(error, NotReadyError | TimeoutError):
            user = False
        else:
            raise error
        told = {
            "error": str(error) or "it took longer than is allowed",
            "category": "user" if user else "server",
        }
        return web.json_response(told)

    async def _cancel(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.CancelFuture)
        sampling = self._sampling.get(body.request_id)
        if sampling is not None:
            sampling.task.cancel()
        return web.json_response({})

    async def _weights_info(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.WeightsInfo)
        found = self._journal.checkpoint(body.tinker_path)
        if found is None:
            raise GoneError(f"{body.tinker_path[:300]!r} names nothing that is kept here")
        return web.json_response(
            {
                "base_model": self._config.model_name,
                "is_lora": True,
                "lora_rank": found.rank,
                "train_unembed": False,
                "train_mlp": found.train_mlp,
                "train_attn": found.train_attn,
            }
        )

    async def _list_sessions(self, request: web.Request) -> web.Response:
        page = _page(request, 20)
        found = await self._journal.look(lambda: self._journal.sessions(*page))
        return web.json_response({"sessions": [each.id for each in found]})

    async def _get_session(self, request: web.Request) -> web.Response:
        session = self._known_session(request.match_info["session"])
        models = await self._journal.look(lambda: self._journal.models_of(session.id))
        samplers = await self._journal.look(lambda: self._journal.samplers(session.id))
        return web.json_response(
            {
                "training_run_ids": [each.id for each in models],
                "sampler_ids": [each.id for each in samplers],
                "user_metadata": _texts(session.user_metadata),
                "display_name": session.display_name,
            }
        )

    async def _get_sampler(self, request: web.Request) -> web.Response:
        sampler = self._known_sampler(request.match_info["sampler"])
        return web.json_response(
            {
                "sampler_id": sampler.id,
                "base_model": self._config.model_name,
                "model_path": sampler.path,
            }
        )

    async def _list_runs(self, request: web.Request) -> web.Response:
        limit, offset = _page(request, 20)
        journal = self._journal
        runs = await journal.look(
            lambda: [self._describe_run(each) for each in journal.models(limit, offset)]
        )
        cursor = {"offset": offset, "limit": limit, "total_count": self._journal.count("models")}
        return web.json_response({"training_runs": runs, "cursor": cursor})

    async def _get_run(self, request: web.Request) -> web.Response:
        return web.json_response(self._describe_run(self._known_run(request)))

    def _known_run(self, request: web.Request) -> Model:
        name = request.match_info["run"]
        model = self._journal.model(name)
        if model is None:
            raise GoneError(f"training run {name[:80]!r} is not known")
        return model

    def _describe_run(self, model: Model) -> dict[str, Any]:
        def last(kind: str) -> dict[str, Any] | None:
            found = self._journal.checkpoints_of(model.id, kind, 1)
            return _describe(found[0]) if found else None

        return {
            "training_run_id": model.id,
            "base_model": self._config.model_name,
            "model_owner": "sluice",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": model.rank,
            "last_request_time": _time(model.used),
            "last_checkpoint": last("training"),
            "last_sampler_checkpoint": last("sampler"),
            "user_metadata": _texts(model.user_metadata),
        }

    async def _run_checkpoints(self, request: web.Request) -> web.Response:
        run, journal = self._known_run(request), self._journal
        found = await journal.look(lambda: [*map(_describe, journal.checkpoints_of(run.id))])
        return web.json_response({"checkpoints": found})

    async def _list_checkpoints(self, request: web.Request) -> web.Response:
        limit, offset = _page(request, 100)
        journal = self._journal
        found = await journal.look(lambda: [*map(_describe, journal.checkpoints(limit, offset))])
        total = self._journal.count("checkpoints")
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return web.json_response({"checkpoints": found, "cursor": cursor})

    def _named(self, request: web.Request) -> Checkpoint:
        run, kind, name = (request.match_info[part] for part in ("run", "kind", "name"))
        path = f"tinker://{run}/{kind}/{name}"
        found = self._journal.checkpoint(path)
        if found is None:
            raise GoneError(f"{path[:300]!r} names nothing that is kept here")
        return found

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        await self._registry.delete_checkpoint(self._named(request))
        return web.json_response({})

    async def _set_ttl(self, request: web.Request) -> web.Response:
        body, _ = await self._parsed(request, requests.SetTtl)
        found, seconds = self._named(request), body.ttl_seconds
        await self._journal.set_expiry(found, None if seconds is None else time.time() + seconds)
        return web.json_response({})


def _unknown_session(session_id: str) -> GoneError:
    return GoneError(f"session {session_id[:80]!r} is not known")


def _final(error: Any) -> ApiError:
    """A refusal; what this server does not do is no failure that passes."""
    refusal = api_error(error)
    own = isinstance(error, ServiceError | RemoteError) and is_own_fault(error)
    if isinstance(error, ValidationError) or (own and refusal.status >= 500):
        refusal.status = 400
    if isinstance(error, RemoteError) and error.code is grpc.StatusCode.UNAUTHENTICATED:
        refusal.status = 502  # of the gateway, and not of its client
    return refusal


def _future(model_id: str, seq: int) -> web.Response:
    return web.json_response({"request_id": f"{model_id}:{seq}", "model_id": model_id})


def _try_again() -> web.Response:
    return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)


def _page(request: web.Request, most: int) -> tuple[int, int]:
    """How many entries are asked for, and behind how many."""
    try:
        limit = int(request.query.get("limit", most))
        offset = int(request.query.get("offset", 0))
    except ValueError:
        raise RefusedError("limit and offset are numbers") from None
    if limit < 1 or offset < 0:
        raise RefusedError("limit is at least 1, offset at least 0")
    return min(limit, LONGEST_PAGE), min(offset, LAST_SEQ)


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    expires = checkpoint.expires
    return {
        "checkpoint_id": checkpoint.path.split("/", 3)[3],
        "checkpoint_type": checkpoint.kind,
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "public": False,
        "user_metadata": _texts(checkpoint.user_metadata),
        "expires_at": None if expires is None else _time(expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _texts(values: Any) -> dict[str, str] | None:
    if values is None:
        return None
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
