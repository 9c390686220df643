"""Channels to other services: retries on UNAVAILABLE only, a deadline on every call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc

from sluice import logs
from sluice.config import ConfigError
from sluice.runtime import waits
from sluice.runtime.addresses import MovingChannel
from sluice.runtime.security import SecurityConfig, channel_credentials

RETRY_BUFFER_BYTES = 64 * 1024 * 1024  # of a call; one that has sent more is not sent again
DEFAULT_DEADLINE = 60.0
DEADLINES = {  # seconds, by method; a caller's own timeout wins
    "GetTrainer": 5.0,
    "GetEngine": 5.0,
    "ListEngines": 5.0,
    "ListWaits": 5.0,
    "CheckStore": 60.0,
    "RegisterEngine": 5.0,
    "RenewLeases": 5.0,
    "AcquireLeases": 30.0,
    "Generate": 600.0,
    "StreamGenerate": 600.0,
    "Score": 600.0,
    "Rollout": 3600.0,
    "Evaluate": 3600.0,
    "CancelRollout": 10.0,
    "ComputeLogprobs": 1800.0,
    "ComputeValues": 1800.0,
    "ForwardBackward": 1800.0,
    "DescribeAlgorithm": 600.0,
    "StepOptimizer": 600.0,
    "UploadBatch": 600.0,
    "CreateAdapter": 600.0,
    "DeleteAdapter": 600.0,
    "PrepareWeights": 600.0,
    "StageWeights": 660.0,
    "JoinTransferGroup": 600.0,
    "CommitWeights": 600.0,
    "Sleep": 600.0,
    "Wake": 600.0,
    "WaitOperation": 60.0,
}

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


NOT_LISTED = {"WaitOperation"}  # asked again and again; the operation is listed


def _method_of(details: grpc.aio.ClientCallDetails) -> str:
    return details.method.decode() if isinstance(details.method, bytes) else details.method


def _list_until_done(call: Any, details: grpc.aio.ClientCallDetails, address: str) -> Any:
    """List the call among the waits of the context, if it has any."""
    service, _, method = _method_of(details).rpartition("/")
    if (listed := waits.of_context()) is not None and method not in NOT_LISTED:
        what = f"{service.rpartition('.')[2]}.{method}"
        wait = listed.begin(what, on=(address,), timeout=details.timeout)
        call.add_done_callback(lambda _: listed.end(wait))
    return call


def _interceptors(token: str | None, address: str) -> list[Any]:
    """Returns what sets the deadline, the token and the request id of a call, and lists it.

    grpc.aio files an interceptor under the first kind it matches, so there is one per kind.
    """

    def completed(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        if token is not None:
            metadata.add("authorization", f"Bearer {token}")
        if (request_id := logs.request_id.get()) != "-":
            metadata.add("x-request-id", request_id)
        timeout = details.timeout
        if timeout is None:
            timeout = DEADLINES.get(_method_of(details).rpartition("/")[2], DEFAULT_DEADLINE)
        return grpc.aio.ClientCallDetails(
            details.method, timeout, metadata, details.credentials, details.wait_for_ready
        )

    async def intercept(continuation: Callable, details: Any, request: Any) -> Any:
        details = completed(details)
        return _list_until_done(await continuation(details, request), details, address)

    kinds = (
        ("intercept_unary_unary", grpc.aio.UnaryUnaryClientInterceptor),
        ("intercept_unary_stream", grpc.aio.UnaryStreamClientInterceptor),
        ("intercept_stream_unary", grpc.aio.StreamUnaryClientInterceptor),
        ("intercept_stream_stream", grpc.aio.StreamStreamClientInterceptor),
    )
    return [type(kind.__name__, (kind,), {name: staticmethod(intercept)})() for name, kind in kinds]


def create_channel(
    address: str, security: SecurityConfig | None = None, *, name: str = ""
) -> grpc.aio.Channel:
    """Returns a channel to an address; the caller closes it. Raises ConfigError.

    address: host:port, or FILE#NAME for a service of a services.json, which is followed.
    name: host that the server's certificate must be for, where that is not the address's.
    """
    port = address.rpartition(":")[2]
    if port.isascii() and port.isdecimal() and not 0 < int(port[:6]) < 1 << 16:
        # gRPC would take the number modulo 65536, and ask somebody else
        raise ConfigError(f"{address[:200]!r}: a port is 1 to 65535")
    security = security or SecurityConfig()
    if "#" in address:
        return MovingChannel(address, lambda where: create_channel(where, security, name=name))
    options: list[tuple[str, Any]] = [
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.max_receive_message_length", -1),  # the server sets the limit, in both directions
        ("grpc.max_send_message_length", -1),
        ("grpc.per_rpc_retry_buffer_size", RETRY_BUFFER_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    interceptors = _interceptors(security.token(), address)
    if security.tls is None:
        return grpc.aio.insecure_channel(address, options, interceptors=interceptors)
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    credentials = channel_credentials(security.tls)
    return grpc.aio.secure_channel(address, credentials, options, interceptors=interceptors)
