"""What every RPC of every service goes through: checks, errors, measure, request id."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hmac
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf import message as pb
from google.rpc import status_pb2
from grpc_status import rpc_status
from prometheus_client import Gauge, Histogram

from sluice import faults, logs
from sluice.runtime.errors import (
    DeadlineError,
    QueueFullError,
    ServiceError,
    UnauthenticatedError,
    forget_frames,
)
from sluice.runtime.messages import SCANNED_BYTES, MalformedMessageError, RequestRules

logger = logging.getLogger(__name__)

RPC_SECONDS = Histogram(
    "sluice_rpc_duration_seconds",
    "Wall time of RPCs.",
    ["method", "code"],
    buckets=(0.001, 0.01, 0.1, 1, 10, 60, 600),
)
RPCS_RUNNING = Gauge("sluice_rpc_running", "RPCs under way.", ["method"])

HEAR_OUT_SECONDS = 1.0  # a refused caller has so long to finish what it sends
REFUSAL_SECONDS = 0.05  # a caller without a token, of whom nothing is read
RECEIVE_SECONDS = 60.0  # for the message of a call that has one
CROWDED_SECONDS = 5.0  # for it while another call waits for the place
LOG_SECONDS = 1.0  # between two lines on malformed messages of one method
FREED_BYTES = 8 << 20  # of requests, large or many, whose memory is given back
FEW_BYTES = 128 << 10  # of them in TRIM_SECONDS: the rest of the last requests, or none
TRIM_SECONDS = 1.0  # after them
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)
_M_ARENA_MAX = -8  # of malloc.h
LONGEST_REQUEST_ID = 100  # characters of it in the log


async def _hear_out(context: grpc.aio.ServicerContext) -> None:
    """Read on to the end of what a caller sends, then refuse it.

    A grpc.aio client that is writing while the status arrives reports INTERNAL in its stead
    (grpc/grpc issue 36066).
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAR_OUT_SECONDS):
            while await context.read() is not grpc.aio.EOF:
                pass


def share_one_arena() -> None:
    """Have all threads allocate from one arena; of each further one glibc keeps up to 64 MiB.

    `malloc_trim` gives back the unused end of the first alone. Threads that run already may have
    arenas of their own.
    """
    if _MALLOPT is not None:
        _MALLOPT(_M_ARENA_MAX, 1)


class RequestRoom:
    """Bounds the bytes of requests that are being received or are held at once.

    How large a message is, grpc says once it is there: so only as many calls receive theirs at a
    time as there is room for the largest of each. While others wait, those that have received for
    longest make room: callers that begin a message and send no more keep nobody out.
    """

    def __init__(self, limit: int, largest: int) -> None:
        self._limit, self._held, self._freed = limit, 0, 0
        self._trimming: asyncio.TimerHandle | None = None
        self._places = asyncio.Semaphore(max(1, limit // largest))
        self._waiting = 0  # for a place
        self._receiving: dict[asyncio.Timeout, float] = {}  # when each began, first to last

    async def receive(self, context: grpc.aio.ServicerContext) -> bytes:
        """Returns the one message of a call.

        Raises MalformedMessageError, DeadlineError, and QueueFullError for want of a place.
        """
        if self._places.locked():
            await self._wait()
        else:
            await self._places.acquire()
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(began + RECEIVE_SECONDS) as limit:
                self._receiving[limit] = began
                if self._waiting:
                    self._hurry()
                raw = await context.read()
        except TimeoutError:
            if limit.when() != began + RECEIVE_SECONDS:
                raise _crowded("no message came, and others wait to send theirs") from None
            raise DeadlineError(f"no message came in {RECEIVE_SECONDS:g} s") from None
        finally:
            self._receiving.pop(limit, None)
            self._places.release()
        if raw is grpc.aio.EOF:
            raise MalformedMessageError("no message came")
        return cast(bytes, raw)

    async def _wait(self) -> None:
        """Wait for a place to receive at. Raises QueueFullError."""
        self._waiting += 1
        try:
            self._hurry()
            async with asyncio.timeout(RECEIVE_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            raise _crowded("too many calls are receiving") from None
        finally:
            self._waiting -= 1
            self._hurry()

    def _hurry(self) -> None:
        """Give as many of those that receive as there are that wait the shorter time."""
        for index, (limit, began) in enumerate(self._receiving.items()):
            seconds = CROWDED_SECONDS if index < self._waiting else RECEIVE_SECONDS
            if limit.when() != began + seconds and not limit.expired():
                limit.reschedule(began + seconds)

    def hold(self, size: int) -> None:
        """Raises QueueFullError where there is no room."""
        if self._held and self._held + size > self._limit:
            raise QueueFullError(
                f"requests of {self._held:,} bytes are held",
                limit=self._limit,
                setting="server.max_held_bytes",
                kind="bytes",
            )
        self._held += size

    def let_go(self, size: int) -> None:
        self._held -= size
        self._freed += size
        if self._freed > FREED_BYTES and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        """Give back to the system what requests took: the allocator would keep it.

        Again until hardly any were let go before: those that were under way meanwhile are too
        few by themselves, and each takes several times its bytes.
        """
        freed, self._freed, self._trimming = self._freed, 0, None
        if freed > FEW_BYTES:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)
        if _MALLOC_TRIM is not None:
            _MALLOC_TRIM(0)


def _crowded(message: str) -> QueueFullError:
    return QueueFullError(message, setting="server.max_held_bytes", kind="calls")


_FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _behavior(handler: grpc.RpcMethodHandler) -> Callable[..., Any]:
    """Returns the function of a handler, of whichever of the four kinds it is."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(behavior for behavior in kinds if behavior is not None)


def _with_behavior(
    handler: grpc.RpcMethodHandler, unary: Callable[..., Any], stream: Callable[..., Any]
) -> grpc.RpcMethodHandler:
    """Returns a handler of the same kind that answers by `stream`, or by `unary`."""
    return _FACTORIES[handler.request_streaming, handler.response_streaming](
        stream if handler.response_streaming else unary,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Checks token and requests, turns errors into statuses and measures.

    Every method is handled as one that takes a stream of bytes: so a caller without a token is
    refused before anything of its message is read, and bytes that are no message are an error
    like others. Health answers without the token.
    """

    def __init__(
        self, token: str | None, rules: RequestRules, create_room: Callable[[], RequestRoom]
    ) -> None:
        self._token, self._rules = token, rules
        self._room, self._open_room = create_room(), create_room()
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}  # made once per method

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if details.method in self._handlers:
            return self._handlers[details.method]
        handler = await continuation(details)
        if handler is None:
            return handler
        is_open = details.method.startswith("/grpc.health.")
        token, room = (None, self._open_room) if is_open else (self._token, self._room)
        method = _Method(details.method, handler, token, self._rules, room)
        wrapped = _FACTORIES[True, handler.response_streaming](
            method.stream if handler.response_streaming else method.unary,
            response_serializer=handler.response_serializer,
        )
        self._handlers[details.method] = wrapped
        return wrapped


class _Method:
    """What is done around every call of one method."""

    def __init__(
        self,
        method: str,
        handler: grpc.RpcMethodHandler,
        token: str | None,
        rules: RequestRules,
        room: RequestRoom,
    ) -> None:
        self._method, self._token = method, token
        self._rules, self._room = rules, room
        self._behavior = _behavior(handler)
        self._parse = handler.request_deserializer or bytes
        self._streams_in = handler.request_streaming
        self._running = RPCS_RUNNING.labels(method)
        self._answered = RPC_SECONDS.labels(method, grpc.StatusCode.OK.name)
        self._logged, self._unlogged = -LOG_SECONDS, 0  # lines on malformed messages

    async def unary(self, _: object, context: grpc.aio.ServicerContext) -> Any:
        call = self._begin()
        try:
            self._authenticate(context)
            return await self._behavior(await self._request(context, call), context)
        except BaseException as error:  # noqa: BLE001 - ends in the client's status or is raised
            call.code = _code_of(error)
            status = await self._status_of(error, context)
        finally:
            self._end(call)
        await context.abort_with_status(status)

    async def stream(self, _: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        call, status = self._begin(), None
        try:
            self._authenticate(context)
            answers = self._behavior(await self._request(context, call), context)
            if inspect.isawaitable(answers):  # it writes to the context itself
                await answers
            else:
                async for answer in answers:
                    yield answer
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001
            call.code = _code_of(error)
            status = await self._status_of(error, context)
        finally:
            self._end(call)
        if status is not None:
            await context.abort_with_status(status)

    def _authenticate(self, context: grpc.aio.ServicerContext) -> None:
        """Raises UnauthenticatedError; nothing of the message has been read yet."""
        metadata = dict(context.invocation_metadata() or ())
        logs.request_id.set(str(metadata.get("x-request-id", "-"))[:LONGEST_REQUEST_ID])
        if self._token is not None:
            given = str(metadata.get("authorization", ""))
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise UnauthenticatedError(f"{self._method} needs a valid bearer token")

    async def _request(self, context: grpc.aio.ServicerContext, call: _Call) -> Any:
        """What the servicer gets: the message, or an iterator of messages.

        Read from the context, for grpc's own iterator keeps the last message while it lives.
        """
        if self._streams_in:
            return self._messages(context, call)
        return self._decode(await self._room.receive(context), call)

    async def _messages(self, context: grpc.aio.ServicerContext, call: _Call) -> AsyncIterator[Any]:
        while (raw := await context.read()) is not grpc.aio.EOF:
            self._let_go(call)
            message = self._decode(cast(bytes, raw), call)
            del raw  # a stream may wait long for its next message
            yield message
            del message

    def _decode(self, raw: bytes, call: _Call) -> Any:
        size = len(raw)
        if size > SCANNED_BYTES:
            self._hold(size, call)  # first: memory of what is refused next is given back, too
            self._hold(self._rules.weigh(raw, self._parse), call)
        else:
            self._hold(2 * size, call)  # about what it takes once it is decoded, too
        message = self._rules.decode(raw, self._parse)
        if isinstance(message, pb.Message):
            self._rules.check(message)
        return message

    async def _status_of(self, error: BaseException, context: grpc.aio.ServicerContext) -> Any:
        """The status that a call ends with. Raises what is no error of it, such as its end.

        What the failed call held is let go of here: grpc keeps its error for as long as it keeps
        the call, and the error its frames with the request in them.
        """
        aborted = isinstance(error, grpc.aio.AbortError)
        if aborted or not isinstance(error, Exception):  # such as asyncio.CancelledError
            raise error
        if isinstance(error, MalformedMessageError):
            self._log_malformed(error)
        elif isinstance(error, ServiceError):
            logger.info("%s: %s %s", self._method, error.reason, error)
        elif not isinstance(error, NotImplementedError):  # what generated servicers raise
            logger.error("%s failed", self._method, exc_info=error)
        forget_frames(error)
        if isinstance(error, UnauthenticatedError) and self._streams_in:
            await asyncio.sleep(REFUSAL_SECONDS)
        elif self._streams_in:
            await _hear_out(context)
        return rpc_status.to_status(self._describe(error))

    def _describe(self, error: Exception) -> status_pb2.Status:
        if isinstance(error, ServiceError):
            return error.to_status()
        message = f"{type(error).__name__} in {self._method}"
        if isinstance(error, NotImplementedError):
            message = f"{self._method} is not implemented"
        return status_pb2.Status(code=_code_of(error).value[0], message=message)

    def _log_malformed(self, error: MalformedMessageError) -> None:
        now = time.monotonic()
        if now - self._logged < LOG_SECONDS:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        logger.warning("%s: %s %s%s", self._method, error.reason, error, more)
        self._logged, self._unlogged = now, 0

    def _begin(self) -> _Call:
        self._running.inc()
        return _Call(time.perf_counter())

    def _end(self, call: _Call) -> None:
        self._running.dec()
        self._let_go(call)
        seconds = time.perf_counter() - call.start
        if call.code is grpc.StatusCode.OK:
            self._answered.observe(seconds)
        else:
            RPC_SECONDS.labels(self._method, call.code.name).observe(seconds)

    def _hold(self, size: int, call: _Call) -> None:
        self._room.hold(size)
        call.held += size

    def _let_go(self, call: _Call) -> None:
        self._room.let_go(call.held)
        call.held = 0


@dataclass
class _Call:
    """One call under way; `held` are bytes of its request."""

    start: float
    held: int = 0
    code: grpc.StatusCode = grpc.StatusCode.OK


def _code_of(error: BaseException) -> grpc.StatusCode:
    """The status a call ends with that raised `error`."""
    if isinstance(error, ServiceError):
        return error.code
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED
    if isinstance(error, NotImplementedError):
        return grpc.StatusCode.UNIMPLEMENTED
    return grpc.StatusCode.INTERNAL


class ReplyLostError(ServiceError):
    """What a caller sees whose connection broke before the answer."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "REPLY_LOST"


class LostReplies(grpc.aio.ServerInterceptor):
    """After each call: `done.<Method>` kills the process, `reply.<Method>` loses the answer.

    Of a stream every message is an answer, and a lost one ends it. Goes inside the interceptor
    that turns errors into statuses.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None:
            return handler
        method = details.method.rpartition("/")[2]
        behavior = _behavior(handler)

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
            response = await behavior(request, context)
            _lose(method)
            return response

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            answers = behavior(request, _LosingContext(context, method))
            if inspect.isawaitable(answers):
                await answers
                return
            async for response in answers:
                _lose(method)
                yield response

        return _with_behavior(handler, unary, stream)


class _LosingContext:
    """The context of a call that writes its answers itself."""

    def __init__(self, context: grpc.aio.ServicerContext, method: str) -> None:
        self._context, self._method = context, method

    async def write(self, message: Any) -> None:
        _lose(self._method)
        await self._context.write(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _lose(method: str) -> None:
    faults.point(f"done.{method}")
    if faults.due(f"reply.{method}"):
        raise ReplyLostError(f"the answer of {method} is lost")
