"""Faults on the wire: work is done, and its answer never sent. Loaded only when asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from sluice import faults
from sluice.runtime.errors import ServiceError


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
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        factory = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[streams_in, streams_out]
        kind = ("stream" if streams_in else "unary") + ("_stream" if streams_out else "_unary")
        behavior = getattr(handler, kind)

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
            response = await behavior(request, context)
            _lose(method)
            return response

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async for response in behavior(request, context):
                _lose(method)
                yield response

        return factory(
            stream if streams_out else unary,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _lose(method: str) -> None:
    faults.point(f"done.{method}")
    if faults.due(f"reply.{method}"):
        raise ReplyLostError(f"the answer of {method} is lost")
