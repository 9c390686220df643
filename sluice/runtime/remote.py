"""Errors of other services, as their callers see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


class RemoteError(Exception):
    """A service refused or failed: `code` and `reason` are for programs, the text for people.

    `retry_seconds`: when the server asks to be tried again, 0 where it does not say.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        metadata: dict[str, str],
        retry_seconds: float = 0.0,
    ) -> None:
        super().__init__(f"{code.name}/{reason or '-'}: {message}")
        self.code, self.reason, self.message, self.metadata = code, reason, message, metadata
        self.retry_seconds = retry_seconds


def error_from_status(status: status_pb2.Status) -> RemoteError:
    """The error that a google.rpc.Status describes."""
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(retry)
    delay = retry.retry_delay.ToNanoseconds() / 1e9
    return RemoteError(code, info.reason, status.message, dict(info.metadata), delay)


def status_of(error: RemoteError) -> status_pb2.Status:
    """What `error_from_status` reads, for one service to pass on what another said."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain="sluice")
    info.metadata.update(error.metadata)
    status.details.add().Pack(info)
    return status


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turn grpc's errors into RemoteError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        if status is not None:
            raise error_from_status(status) from None
        details = error.details() or ""
        raise RemoteError(error.code(), _reason_of(error.code(), details), details, {}) from None


def _reason_of(code: grpc.StatusCode, details: str) -> str:
    """grpc itself refuses messages beyond its limit, and knows no reasons."""
    too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than" in details
    return "MESSAGE_TOO_LARGE" if too_large else ""
