"""What every RPC of every service goes through: checks, errors, measure, request id."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.api import field_behavior_pb2
from google.protobuf import message as pb
from google.rpc import status_pb2
from grpc_status import rpc_status
from prometheus_client import Gauge, Histogram

from sluice import faults, logs
from sluice.runtime.errors import InvalidFieldError, ServiceError, UnauthenticatedError

logger = logging.getLogger(__name__)

RPC_SECONDS = Histogram(
    "sluice_rpc_duration_seconds",
    "Wall time of RPCs.",
    ["method", "code"],
    buckets=(0.001, 0.01, 0.1, 1, 10, 60, 600),
)
RPCS_RUNNING = Gauge("sluice_rpc_running", "RPCs under way.", ["method"])

HEAR_OUT_SECONDS = 1.0  # a refused caller has so long to finish what it sends

_required_cache: dict[Any, list[tuple[Any, bool]]] = {}


def _fields_to_check(descriptor: Any) -> list[tuple[Any, bool]]:
    """(field, is required) of required fields and of messages that have some, at any depth."""
    fields = _required_cache.get(descriptor)
    if fields is None:
        fields = []
        for field in descriptor.fields:
            behavior = field.GetOptions().Extensions[field_behavior_pb2.field_behavior]
            required = field_behavior_pb2.REQUIRED in behavior
            if required or _asks(field.message_type, ()):
                fields.append((field, required))
        _required_cache[descriptor] = fields
    return fields


def _asks(descriptor: Any, above: tuple[Any, ...]) -> bool:
    """Whether a message type has required fields, itself or below."""
    if descriptor is None or descriptor in above:
        return False
    return any(
        field_behavior_pb2.REQUIRED
        in field.GetOptions().Extensions[field_behavior_pb2.field_behavior]
        or _asks(field.message_type, (*above, descriptor))
        for field in descriptor.fields
    )


def check_required(message: pb.Message, prefix: str = "") -> None:
    """Raise InvalidFieldError for the first field marked REQUIRED in the proto that is unset."""
    for field, required in _fields_to_check(message.DESCRIPTOR):
        value = getattr(message, field.name)
        is_set = message.HasField(field.name) if field.has_presence else bool(value)
        if required and not is_set:
            raise InvalidFieldError(prefix + field.name, "is required")
        if not is_set or field.message_type is None:
            continue
        if isinstance(value, pb.Message):
            check_required(value, f"{prefix}{field.name}.")
        elif not field.message_type.GetOptions().map_entry:
            for index, item in enumerate(value):
                check_required(item, f"{prefix}{field.name}[{index}].")


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        check_required(request)
        yield request


async def _hear_out(requests: AsyncIterator[Any]) -> None:
    """Read on to the end of what a caller sends, then refuse it.

    A grpc.aio client that is writing while the status arrives reports INTERNAL in its stead
    (grpc/grpc issue 36066).
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAR_OUT_SECONDS):
            async for _ in requests:
                pass


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

    Health and reflection answer without these, save for the token.
    """

    def __init__(self, token: str | None = None) -> None:
        self._token = token
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
        method = _Method(details.method, handler, self._token)
        wrapped = _with_behavior(handler, method.unary, method.stream)
        self._handlers[details.method] = wrapped
        return wrapped


class _Method:
    """What is done around every call of one method."""

    def __init__(self, method: str, handler: grpc.RpcMethodHandler, token: str | None) -> None:
        self._method = method
        self._token = None if method.startswith("/grpc.health.") else token
        self._behavior = _behavior(handler)
        self._streams_in = handler.request_streaming
        self._running = RPCS_RUNNING.labels(method)
        self._answered = RPC_SECONDS.labels(method, grpc.StatusCode.OK.name)

    async def unary(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        start, failure = self._begin(), None
        try:
            return await self._behavior(self._check(request, context), context)
        except BaseException as error:  # noqa: BLE001 - ends in the client's status or is raised
            failure = error
            await self._fail(error, request, context)
        finally:
            self._measure(start, failure)

    async def stream(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        start, failure = self._begin(), None
        try:
            async for response in self._behavior(self._check(request, context), context):
                yield response
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001
            failure = error
            await self._fail(error, request, context)
        finally:
            self._measure(start, failure)

    def _check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        metadata = dict(context.invocation_metadata() or ())
        logs.request_id.set(str(metadata.get("x-request-id", "-")))
        if self._token is not None:
            given = str(metadata.get("authorization", ""))
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise UnauthenticatedError(f"{self._method} needs a valid bearer token")
        if self._streams_in:
            return _checked(request)
        check_required(request)
        return request

    async def _fail(
        self, error: BaseException, request: Any, context: grpc.aio.ServicerContext
    ) -> NoReturn:
        aborted = isinstance(error, grpc.aio.AbortError)
        if aborted or not isinstance(error, Exception):  # such as asyncio.CancelledError
            raise error
        if self._streams_in:
            await _hear_out(request)
        if isinstance(error, ServiceError):
            logger.info("%s: %s %s", self._method, error.reason, error)
            await context.abort_with_status(rpc_status.to_status(error.to_status()))
        if isinstance(error, NotImplementedError):  # what generated servicers raise
            await context.abort(_code_of(error), f"{self._method} is not implemented")
        logger.error("%s failed", self._method, exc_info=error)
        status = status_pb2.Status(
            code=_code_of(error).value[0], message=f"{type(error).__name__} in {self._method}"
        )
        await context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("abort returns never")

    def _begin(self) -> float:
        self._running.inc()
        return time.perf_counter()

    def _measure(self, start: float, failure: BaseException | None) -> None:
        self._running.dec()
        seconds = time.perf_counter() - start
        if failure is None:
            self._answered.observe(seconds)
        else:
            RPC_SECONDS.labels(self._method, _code_of(failure).name).observe(seconds)


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
            async for response in behavior(request, context):
                _lose(method)
                yield response

        return _with_behavior(handler, unary, stream)


def _lose(method: str) -> None:
    faults.point(f"done.{method}")
    if faults.due(f"reply.{method}"):
        raise ReplyLostError(f"the answer of {method} is lost")
