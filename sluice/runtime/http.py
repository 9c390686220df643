"""What HTTP ports share: bodies and keys checked, refusals in the form of OpenAI's clients."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import re
import socket
import ssl
from typing import Any

import grpc
from aiohttp import web
from pydantic import ValidationError

from sluice.address import join_address, split_address
from sluice.config import ConfigError
from sluice.json_values import DEEPEST, json_fault
from sluice.runtime.errors import RemoteError, ServiceError
from sluice.runtime.server import ServerConfig

logger = logging.getLogger(__name__)

SHOWN = 500  # characters of what a caller sent, in a refusal
MOST_IDLE = 512  # connections on which nothing is answered; the oldest makes room for another
HANDSHAKE_SECONDS = 10.0  # for TLS to begin, and to end
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 503,
    grpc.StatusCode.FAILED_PRECONDITION: 503,  # no weights yet, or others than asked for
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_CODES = {  # of reasons that have another name here
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "MEDIA_UNSUPPORTED": "unsupported_content",
}


class ApiError(Exception):
    """A refusal: `code` is for programs; `param` names the field at fault."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        message, param = _legible(str(self)), self.param and _legible(self.param)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> web.Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return web.json_response(self.body(), status=self.status, headers=headers)


REFUSALS = (ApiError, ServiceError, RemoteError, ValidationError, TimeoutError, web.HTTPException)
_INDEX = re.compile(r"\[(\d+)\]")  # of a field as RPCs name it; here places stand between dots
Refusal = ApiError | ServiceError | RemoteError | ValidationError | TimeoutError | web.HTTPException


def api_error(error: Refusal) -> ApiError:
    """Writes any of REFUSALS in OpenAI's form."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServiceError | RemoteError):
        code = _CODES.get(error.reason, error.reason.lower() or error.code.name.lower())
        param = _INDEX.sub(r".\1", error.metadata.get("field", "")) or None
        return ApiError(_STATUS.get(error.code, 500), code, str(error), param)
    if isinstance(error, ValidationError):
        return _of_field(error)
    if isinstance(error, TimeoutError):
        return ApiError(504, "request_timed_out", "the request took longer than is allowed")
    return ApiError(error.status, error.reason.lower().replace(" ", "_"), error.reason)


def _of_field(error: ValidationError) -> ApiError:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, "unknown_parameter", f"unknown parameter: {param}", param)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, "invalid_value", f"{param or 'request'}: {message}", param)


class Bodies:
    """Bounds the bytes of bodies that are being received at once: the oldest makes room."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._receiving: dict[asyncio.Timeout, None] = {}

    async def receive(self, request: web.Request, most: int, seconds: float) -> bytes:
        """Raises TimeoutError, HTTPRequestEntityTooLarge and what reading does."""
        body = bytearray()
        async with asyncio.timeout(seconds) as limit:
            self._receiving[limit] = None
            try:
                async for part in request.content.iter_any():
                    body += part
                    self._held += len(part)
                    if len(body) > most:
                        raise web.HTTPRequestEntityTooLarge(most, len(body))
                    oldest = next(iter(self._receiving))
                    if self._held > self._limit and not oldest.expired():
                        oldest.reschedule(0)
            finally:
                del self._receiving[limit]
                self._held -= len(body)
        return bytes(body)


BODIES = web.AppKey("BODIES", Bodies)
BODY = "body"  # of a request, once it was read


async def read_body(request: web.Request, seconds: float) -> bytes:
    """Returns the body, which must be there in `seconds`, or sooner where others need the room.

    It may be asked for again. Raises ApiError and HTTPRequestEntityTooLarge.
    """
    try:
        if BODY not in request:
            bodies = request.app[BODIES]
            request[BODY] = await bodies.receive(request, request.client_max_size, seconds)
        body: bytes = request[BODY]
        return body
    except TimeoutError:
        message = f"no whole body came in {seconds:g} s, or others needed the room"
        raise ApiError(408, "body_timed_out", message) from None
    except web.RequestPayloadError:
        raise ApiError(400, "invalid_body", "the body is not in the encoding it names") from None


def read_json(data: bytes) -> Any:
    """Returns finite numbers and whole characters, nested so deep at most. Raises ApiError."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        values = json.loads(data, parse_constant=refuse)
    except RecursionError:
        message = f"is nested deeper than {DEEPEST} levels"
        raise ApiError(400, "invalid_json", message) from None
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None
    for name, value in values.items() if isinstance(values, dict) else [("", values)]:
        if fault := json_fault([name, value]):
            raise ApiError(400, "invalid_value", f"{_legible(name) or 'the body'}: {fault}", name)
    return values


def _legible(text: str) -> str:
    """A text of a caller in short, for a message."""
    shown = text.encode(errors="backslashreplace").decode()
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def check_key(request: web.Request, token: str | None) -> None:
    """Raises ApiError unless the request brings the token, where there is one."""
    given = request.headers.get("Authorization", "")
    if token and not hmac.compare_digest(
        given.encode(errors="surrogateescape"), f"Bearer {token}".encode()
    ):
        raise ApiError(401, "invalid_api_key", "the API key is missing or wrong")


class _HttpConnection(web.RequestHandler):
    """Answers what is no HTTP, and what failed here, in the form of all refusals."""

    __slots__ = ()

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log what failed here; a caller that leaves, or whose body is broken, is no failure."""
        if not isinstance(kwargs.get("exc_info"), ConnectionError | web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:
            fault = str(message).partition(":")[0]  # behind it is the line, which may hold the key
            logger.info("%s from %s: %r", type(exc).__name__, request.remote, fault)
            error = ApiError(status, "invalid_http", f"the request is no HTTP: {fault}")
        else:
            super().handle_error(request, status, exc, message)  # logs it
            error = ApiError(status, "internal", "the server failed; its log says more")
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer was sent already")
        response = error.response()
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # of what no handler was asked
            resp = api_error(resp).response()
        return await super().finish_response(request, resp, start_time)


class _HttpServer(web.Server):
    """Bounds the connections on which nothing goes on: the oldest makes room."""

    _tls: ssl.SSLContext | None
    _shaking: dict[socket.socket, asyncio.Task[None]]  # the oldest first

    def open(self, tls: ssl.SSLContext | None) -> None:
        self._tls, self._shaking = tls, {}

    def __call__(self) -> Any:  # a protocol: aiohttp knows of one kind
        return self._connection() if self._tls is None else _Accepted(self)

    def _connection(self) -> web.RequestHandler:
        return _HttpConnection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > MOST_IDLE:
            idle = [c for c in self.connections if c.transport and _is_idle(c)]
            for oldest in idle[:-MOST_IDLE]:
                assert oldest.transport is not None
                oldest.transport.abort()

    def secure(self, connection: socket.socket) -> None:
        """Shake hands with the peer of a connection, before anything is read of it."""
        task = asyncio.create_task(self._shake_hands(connection), name="TLS handshake")
        self._shaking[connection] = task
        if len(self._shaking) > MOST_IDLE:
            oldest = next(iter(self._shaking))
            del self._shaking[oldest]
            _end(oldest)
        task.add_done_callback(lambda _: self._shaking.pop(connection, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # no certificate, a wrong one, or no TLS at all
            await self._loop.connect_accepted_socket(
                self._connection,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=HANDSHAKE_SECONDS,
            )

    def pre_shutdown(self) -> None:
        for connection in self._shaking:
            _end(connection)
        super().pre_shutdown()


def _is_idle(connection: web.RequestHandler) -> bool:
    """Whether nothing is answered on it, or its peer does not read the answer."""
    return connection._current_request is None or connection.writing_paused


def _end(connection: socket.socket) -> None:
    """Whoever waits for it is told of its end."""
    with contextlib.suppress(OSError):  # its peer has ended it
        connection.shutdown(socket.SHUT_RDWR)


class _Accepted(asyncio.Protocol):
    """Hands a connection on to those whose peers are to shake hands.

    An event loop that shakes hands itself tells of a connection only after that.
    """

    def __init__(self, server: _HttpServer) -> None:
        self._server = server

    def connection_made(self, transport: Any) -> None:
        try:
            descriptor = os.dup(transport.get_extra_info("socket").fileno())
        except OSError:  # this process has as many as it may
            return
        finally:
            transport.abort()  # of its own descriptor
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)
        self._server.secure(connection)


class HttpRunner(web.AppRunner):
    """Serves an application, whose failures and refusals all have one form."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _HttpServer
        return server

    async def open_port(
        self, server: ServerConfig, port: int, tls: ssl.SSLContext | None, *, setting: str
    ) -> int:
        """Open a port (0: a free one) at the host of `server`, and return its number.

        Raises ConfigError, naming the setting of the port, when it is taken.
        """
        self.app[BODIES] = Bodies(server.max_held_bytes)
        await self.setup()
        assert isinstance(self.server, _HttpServer)
        self.server.open(tls)
        site = web.TCPSite(self, server.host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"{setting}: {error}") from None
        return int(self.addresses[0][1])


def url_of(server: ServerConfig, port: int) -> str:
    """Where others find an HTTP port of a server."""
    host = split_address(server.advertise)[0] or server.host
    scheme = "http" if server.security.tls is None else "https"
    return f"{scheme}://{join_address(host, port)}"
