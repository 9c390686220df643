"""google.longrunning.Operations over asyncio tasks."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.longrunning import operations_pb2 as pb
from google.longrunning import operations_pb2_grpc as pb_grpc
from google.protobuf import empty_pb2
from google.protobuf import message as pb_message
from google.rpc import status_pb2

from sluice.runtime.errors import (
    InvalidFieldError,
    NotFoundError,
    QueueFullError,
    ServiceError,
    forget_frames,
)
from sluice.runtime.idempotency import RequestTable, cancel_all, request_digest, share_of
from sluice.runtime.wire import seconds_of

logger = logging.getLogger(__name__)

Progress = Callable[[], pb_message.Message]

DEFAULT_PAGE, LARGEST_PAGE = 100, 1000
_FILTERS = {"": (False, True), "done=true": (True,), "done=false": (False,)}


@dataclass(eq=False)
class _Operation:
    """Work that runs, or what came of it: an ended task would keep all that its caller held."""

    name: str
    number: int  # in the order of their starts
    progress: Progress
    task: asyncio.Task[pb_message.Message] | None
    result: pb.Operation | None = None

    def to_proto(self) -> pb.Operation:
        if self.result is not None:
            return self.result
        operation = pb.Operation(name=self.name)
        operation.metadata.Pack(self.progress())
        return operation

    def has_failed(self) -> bool:
        return self.result is not None and self.result.HasField("error")

    def end(self, task: asyncio.Task[pb_message.Message]) -> None:
        """Put the result of the task in its place."""
        operation = self.to_proto()
        operation.done = True
        if task.cancelled():
            operation.error.code = grpc.StatusCode.CANCELLED.value[0]
            operation.error.message = "cancelled"
        elif (error := task.exception()) is not None:
            operation.error.CopyFrom(_status(error))
        else:
            operation.response.Pack(task.result())
        self.result, self.task, self.progress = operation, None, pb.Operation


def _status(error: BaseException) -> status_pb2.Status:
    if isinstance(error, ServiceError):
        return error.to_status()
    return status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message=type(error).__name__)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        if isinstance(error, ServiceError):
            logger.info("operation %s: %s %s", task.get_name(), error.reason, error)
        else:
            logger.error("operation %s failed", task.get_name(), exc_info=error)
        forget_frames(error)  # the request is in them


def _place_of(token: str, pages: str) -> int:
    """The number after which the page of a token begins. Raises InvalidFieldError."""
    if not token:
        return 0
    given, _, number = token.rpartition(".")
    if given != pages or not (number.isascii() and number.isdecimal() and len(number) < 19):
        raise InvalidFieldError("page_token", "is none that this process gave for this filter")
    return int(number)


class Operations(pb_grpc.OperationsServicer):
    """Owns the operations of a process.

    Of those that have ended the last `capacity` are kept, and those of no more than `max_bytes`.
    """

    def __init__(
        self,
        capacity: int = 256,
        max_bytes: int = 1 << 24,
        *,
        max_running: int = 1024,
        longest_wait: float = 60.0,
    ) -> None:
        self._operations: RequestTable[_Operation] = RequestTable(
            max_bytes, weigh=share_of(max_bytes, capacity, _Operation.to_proto)
        )
        self._longest_wait, self._max_running = longest_wait, max_running
        self._count = 0
        self._tokens_of = secrets.token_hex(4)  # page tokens of another process are unknown here

    def start(
        self,
        kind: str,
        request: pb_message.Message,
        run: Callable[[], Awaitable[pb_message.Message]],
        progress: Progress,
    ) -> pb.Operation:
        """Start `run`, or join the operation that has this request's request_id.

        A finished, failed operation of the same id is run again. Raises
        RequestIdReusedError when the id came with another body, QueueFullError when too many
        run.
        """
        digest = request_digest(request)
        request_id = getattr(request, "request_id", "")
        self._count += 1
        name = f"operations/{kind}-{request_id or self._count}"
        known = self._operations.find(name, digest)
        if known is None or known.has_failed():
            running = sum(operation.task is not None for operation in self._operations)
            if running >= self._max_running:
                raise QueueFullError(
                    f"{running} operations run or wait", limit=self._max_running, kind="operations"
                )
            task: asyncio.Task[pb_message.Message] = asyncio.ensure_future(run())
            task.set_name(name)
            task.add_done_callback(_log_failure)
            operation = _Operation(name, self._count, progress, task)
            task.add_done_callback(lambda _: self._end(operation, task))
            known = self._operations.add(name, digest, operation)
        return known.to_proto()

    def _end(self, operation: _Operation, task: asyncio.Task[pb_message.Message]) -> None:
        operation.end(task)
        self._operations.done(operation.name, operation)

    def _find(self, name: str) -> _Operation:
        operation = self._operations.get(name)
        if operation is None:
            raise NotFoundError("operation", name)
        return operation

    def describe(self, name: str) -> pb.Operation:
        """Return what is known of an operation now. Raises NotFoundError."""
        return self._find(name).to_proto()

    async def wait(self, name: str, seconds: float) -> None:
        """Return once an operation has ended, after `seconds` if not. Raises NotFoundError."""
        task = self._find(name).task
        if task is not None:
            await asyncio.wait([task], timeout=seconds)

    async def GetOperation(self, request: pb.GetOperationRequest, context: object) -> pb.Operation:
        return self._find(request.name).to_proto()

    async def ListOperations(
        self, request: pb.ListOperationsRequest, context: object
    ) -> pb.ListOperationsResponse:
        """List by start, a page at a time; the filter is `done=true` or `done=false`."""
        if request.name not in ("", "operations"):
            raise InvalidFieldError("name", "must be `operations`")
        if request.page_size < 0:
            raise InvalidFieldError("page_size", "must not be negative")
        filter_text = request.filter.replace(" ", "").lower()
        wanted = _FILTERS.get(filter_text)
        if wanted is None:
            raise InvalidFieldError("filter", "must be empty, `done=true` or `done=false`")
        pages = f"{self._tokens_of}.{filter_text}"
        after = _place_of(request.page_token, pages)
        rest = sorted(
            (o for o in self._operations if o.number > after and (o.task is None) in wanted),
            key=lambda operation: operation.number,
        )
        page = rest[: min(request.page_size or DEFAULT_PAGE, LARGEST_PAGE)]
        return pb.ListOperationsResponse(
            operations=[operation.to_proto() for operation in page],
            next_page_token=f"{pages}.{page[-1].number}" if len(page) < len(rest) else "",
        )

    async def WaitOperation(
        self, request: pb.WaitOperationRequest, context: grpc.aio.ServicerContext
    ) -> pb.Operation:
        """Wait at most `timeout` (else 30 s; never over a minute), then answer what is known."""
        operation = self._find(request.name)
        timeout = seconds_of(request.timeout) if request.HasField("timeout") else 30.0
        remaining = context.time_remaining()
        if remaining is not None:  # answer before the caller's own deadline
            timeout = max(0.0, min(timeout, remaining - 0.2))
        await self.wait(request.name, min(timeout, self._longest_wait))
        return operation.to_proto()

    async def CancelOperation(
        self, request: pb.CancelOperationRequest, context: object
    ) -> empty_pb2.Empty:
        task = self._find(request.name).task
        if task is not None:
            task.cancel()
        return empty_pb2.Empty()

    async def DeleteOperation(
        self, request: pb.DeleteOperationRequest, context: object
    ) -> empty_pb2.Empty:
        if self._find(request.name).task is not None:
            raise InvalidFieldError("name", "names an operation that still runs")
        self._operations.discard(request.name)
        return empty_pb2.Empty()

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        await cancel_all([operation.task for operation in self._operations if operation.task])
