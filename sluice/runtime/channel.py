"""Channels to other services: retries on UNAVAILABLE only, a deadline on every call."""

from __future__ import annotations

import json
from typing import Any

import grpc

from sluice import logs
from sluice.address import check_address
from sluice.config import ConfigError
from sluice.runtime import waits
from sluice.runtime.addresses import ForwardingChannel, MovingChannel
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
    "Profile": 600.0,
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


class ServiceChannel(ForwardingChannel):
    """A channel whose calls have a deadline, the token and the request id, and are listed.

    What interceptors of grpc.aio would do takes a task more for each call, and leaves garbage that
    only a search finds.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str | None, address: str) -> None:
        self._channel, self._address = channel, address
        self._token = () if token is None else (("authorization", f"Bearer {token}"),)

    def _current(self) -> grpc.aio.Channel:
        return self._channel

    def _method(self, kind: str, name: str, settings: tuple[tuple, dict[str, Any]]) -> Any:
        positional, named = settings
        method = getattr(self._channel, kind)(name, *positional, **named)
        service, _, short = name.rpartition("/")
        usual = DEADLINES.get(short, DEFAULT_DEADLINE)
        what = f"{service.rpartition('.')[2]}.{short}"

        def call(
            *request: Any, timeout: float | None = None, metadata: Any = None, **options: Any
        ) -> Any:
            sent = (*(metadata or ()), *self._token)
            if (request_id := logs.request_id.get()) != "-":
                sent += (("x-request-id", request_id),)
            timeout = usual if timeout is None else timeout
            made = method(*request, timeout=timeout, metadata=sent, **options)
            if (listed := waits.of_context()) is not None and short not in NOT_LISTED:
                wait = listed.begin(what, on=(self._address,), timeout=timeout)
                made.add_done_callback(lambda _: listed.end(wait))
            return made

        return call


def create_channel(
    address: str, security: SecurityConfig | None = None, *, name: str = ""
) -> grpc.aio.Channel:
    """Returns a channel to an address; the caller closes it. Raises ConfigError.

    address: host:port, or FILE#NAME for a service of a services.json, which is followed.
    name: host that the server's certificate must be for, where that is not the address's.
    """
    security = security or SecurityConfig()
    if "#" in address:
        return MovingChannel(address, lambda where: create_channel(where, security, name=name))
    try:
        check_address(address)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    options: list[tuple[str, Any]] = [
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.max_receive_message_length", -1),  # the server sets the limit, in both directions
        ("grpc.max_send_message_length", -1),
        ("grpc.per_rpc_retry_buffer_size", RETRY_BUFFER_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if security.tls is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        if name:
            options.append(("grpc.ssl_target_name_override", name))
        channel = grpc.aio.secure_channel(address, channel_credentials(security.tls), options)
    return ServiceChannel(channel, security.token(), address)
