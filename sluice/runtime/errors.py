"""Errors that services raise, and the gRPC status each one becomes."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import grpc
from google.protobuf import duration_pb2
from google.protobuf import message as pb
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from sluice.logs import printable

DOMAIN = "sluice"
TOO_LARGE = "MESSAGE_TOO_LARGE"

# A status travels as a header, and clients refuse more than 8 KiB of those.
MESSAGE_BYTES = 1000
METADATA_BYTES = 1500
DETAIL_BYTES = 300


class ServiceError(Exception):
    """An error the caller can act on; anything else becomes INTERNAL.

    Subclasses set `code` and `reason`; keyword arguments become ErrorInfo metadata, so that
    a program need not parse the message.
    """

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def details(self) -> list[pb.Message]:
        """Further status details; ErrorInfo always comes first."""
        return []

    def to_status(self) -> status_pb2.Status:
        return _status(self.code, self.reason, str(self), self.metadata, self.details())


class InvalidFieldError(ServiceError):
    """A request field is missing or wrong; the path names it."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, description: str, **metadata: object) -> None:
        super().__init__(f"{field}: {description}", field=field, **metadata)
        self._description = description
        self._violation = error_details_pb2.BadRequest.FieldViolation(
            field=_clipped(field, DETAIL_BYTES), description=_clipped(description, DETAIL_BYTES)
        )

    def details(self) -> list[pb.Message]:
        return [error_details_pb2.BadRequest(field_violations=[self._violation])]

    def within(self, path: str) -> InvalidFieldError:
        """The same fault, as told of a message in which this one's is at `path`."""
        metadata = self.metadata | {"field": f"{path}.{self.metadata['field']}"}
        return InvalidFieldError(description=self._description, **metadata)


class RequestIdReusedError(ServiceError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "REQUEST_ID_REUSED"


class UnauthenticatedError(ServiceError):
    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "TOKEN_MISSING_OR_WRONG"


class NotFoundError(ServiceError):
    """A named resource is not there; `reason` becomes `<KIND>_NOT_FOUND`.

    `where` is the place that was looked at, if others could be meant.
    """

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, kind: str, name: str, where: str = "") -> None:
        place = f" in {where}" if where else ""
        super().__init__(f"{kind} {name!r} does not exist{place}", name=name)
        self.reason = f"{kind.upper().replace(' ', '_')}_NOT_FOUND"
        self._kind, self._name = kind, name

    def details(self) -> list[pb.Message]:
        name = _clipped(self._name, DETAIL_BYTES)
        return [error_details_pb2.ResourceInfo(resource_type=self._kind, resource_name=name)]


class AlreadyExistsError(ServiceError):
    """A named resource is there already; `reason` becomes `<KIND>_EXISTS`."""

    code = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name!r} exists already", name=name)
        self.reason = f"{kind.upper().replace(' ', '_')}_EXISTS"


class StepMismatchError(ServiceError):
    code = grpc.StatusCode.ABORTED
    reason = "STEP_MISMATCH"


class QueueFullError(ServiceError):
    """Back-pressure: try again after `retry_seconds`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_seconds: float = 1.0, **metadata: object) -> None:
        super().__init__(message, **metadata)
        self._retry_seconds = retry_seconds

    def details(self) -> list[pb.Message]:
        delay = duration_pb2.Duration(nanos=0)
        delay.FromNanoseconds(int(self._retry_seconds * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


class DataLossError(ServiceError):
    """Bytes differ from their digest."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "DIGEST_MISMATCH"


class LoadingError(ServiceError):
    """Not ready yet; a retry helps."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "LOADING"


class DeadlineError(ServiceError):
    """Something this server waited for took too long; the message names it."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "WAIT_TIMED_OUT"


class RemoteError(Exception):
    """A service refused or failed: `code` and `reason` are for programs, the text for people.

    `retry_seconds`: when the server asks to be tried again, 0 where it does not say. `where`: what
    the server is to the caller, and its address, of clients that know it.
    """

    where = ""

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

    @property
    def is_too_large(self) -> bool:
        """Whether a request or an answer is larger than a message may be, and would be again."""
        return self.reason == TOO_LARGE

    @property
    def is_late(self) -> bool:
        """Whether gRPC gave the call up: a deadline of the server's own has a reason."""
        return self.code is grpc.StatusCode.DEADLINE_EXCEEDED and not self.reason


def text_of(error: BaseException) -> str:
    """An error for people, with who it is of where several could be."""
    where = error.where if isinstance(error, RemoteError) else ""
    return f"{where}: {error}" if where else str(error)


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Where files of libraries begin; to ask for it takes longer than most imports."""
    return tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))


def place_of(error: BaseException) -> str:
    """Says behind a message where an error was raised, of the lines that are no library's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_libraries(), "<")):
            return f", at {frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def error_from_status(status: status_pb2.Status) -> RemoteError:
    """The error that a google.rpc.Status describes."""
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(retry)
    delay = retry.retry_delay.ToNanoseconds() / 1e9
    return RemoteError(code, info.reason, status.message, dict(info.metadata), delay)


def status_of(error: RemoteError) -> status_pb2.Status:
    """Returns what `error_from_status` reads, for one service to pass on what another said."""
    return _status(error.code, error.reason, error.message, error.metadata)


def _status(
    code: grpc.StatusCode,
    reason: str,
    message: str,
    metadata: Mapping[str, str],
    details: Sequence[pb.Message] = (),
) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=_clipped(message, MESSAGE_BYTES))
    info, left = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN), METADATA_BYTES
    for key, value in metadata.items():
        info.metadata[key] = _clipped(value, max(left, 1))
        left -= len(info.metadata[key].encode())
    for detail in (info, *details):
        status.details.add().Pack(detail)
    return status


def _clipped(text: str, size: int) -> str:
    """The text without control characters, cut to so many bytes."""
    data = printable(text).encode()
    if len(data) <= size:
        return data.decode()
    return data[: max(size - 3, 0)].decode(errors="ignore") + "…"


def forget_frames(error: BaseException | None) -> None:
    """Let go of the frames that an error and its causes came through, with all they hold.

    They are not cleared: of an error that several calls are ended by some are of coroutines that
    have not ended yet, and clearing those would end them wherever they wait.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turn grpc's errors into RemoteError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        if status is not None:
            raise error_from_status(status) from None
        code, details = error.code(), error.details() or ""
        if has_lost_status(error):
            code, details = grpc.StatusCode.UNKNOWN, "the answer of the server was lost"
        # grpc itself refuses messages beyond its limit, and knows no reasons
        too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than" in details
        if too_large:
            details += ", the server's server.max_message_bytes"
        raise RemoteError(code, TOO_LARGE if too_large else "", details, {}) from None


def has_lost_status(error: grpc.aio.AioRpcError) -> bool:
    """Whether grpc's client cannot tell how the call ended.

    Where a server ends a stream at its very beginning, the client may miss the status (grpcio
    1.76, `_AioCall.initiate_stream_stream`) and says this in its place.
    """
    lost = "Internal error from Core"
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == lost
