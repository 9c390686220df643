"""google.longrunning.Operations over asyncio tasks."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
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
    RequestIdReusedError,
    ServiceError,
)

logger = logging.getLogger(__name__)

Progress = Callable[[], pb_message.Message]


@dataclass(eq=False)
class _Operation:
    name: str
    body: bytes
    task: asyncio.Task[pb_message.Message]
    progress: Progress

    def to_proto(self) -> pb.Operation:
        operation = pb.Operation(name=self.name, done=self.task.done())
        operation.metadata.Pack(self.progress())
        if not self.task.done():
            return operation
        if self.task.cancelled():
            operation.error.code = grpc.StatusCode.CANCELLED.value[0]
            operation.error.message = "cancelled"
        elif (error := self.task.exception()) is not None:
            operation.error.CopyFrom(_status(error))
        else:
            operation.response.Pack(self.task.result())
        return operation


def _status(error: BaseException) -> status_pb2.Status:
    if isinstance(error, ServiceError):
        return error.to_status()
    return status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message=type(error).__name__)


def _log_bug(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        level = logging.INFO if isinstance(error, ServiceError) else logging.ERROR
        logger.log(level, "operation %s failed", task.get_name(), exc_info=error)


class Operations(pb_grpc.OperationsServicer):
    """Owns the operations of a process; finished ones are kept up to `capacity`."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._operations: OrderedDict[str, _Operation] = OrderedDict()
        self._count = 0

    def start(
        self,
        kind: str,
        request: pb_message.Message,
        run: Callable[[], Awaitable[pb_message.Message]],
        progress: Progress,
    ) -> pb.Operation:
        """Start `run`, or join the operation that has this request's request_id.

        A finished, failed operation of the same id is run again. Raises
        RequestIdReusedError when the id came with another body.
        """
        body = request.SerializeToString(deterministic=True)
        request_id = getattr(request, "request_id", "")
        self._count += 1
        name = f"operations/{kind}-{request_id or self._count}"
        known = self._operations.get(name)
        if known is not None and known.body != body:
            raise RequestIdReusedError(
                f"request_id {request_id} was used for another request", request_id=request_id
            )
        if known is None or _has_failed(known.task):
            task: asyncio.Task[pb_message.Message] = asyncio.ensure_future(run())
            task.set_name(name)
            task.add_done_callback(_log_bug)
            known = self._operations[name] = _Operation(name, body, task, progress)
            self._trim()
        return known.to_proto()

    def _find(self, name: str) -> _Operation:
        if name not in self._operations:
            raise NotFoundError("operation", name)
        return self._operations[name]

    async def GetOperation(self, request: pb.GetOperationRequest, context: object) -> pb.Operation:
        return self._find(request.name).to_proto()

    async def ListOperations(
        self, request: pb.ListOperationsRequest, context: object
    ) -> pb.ListOperationsResponse:
        operations = [operation.to_proto() for operation in self._operations.values()]
        return pb.ListOperationsResponse(operations=operations)

    async def WaitOperation(
        self, request: pb.WaitOperationRequest, context: grpc.aio.ServicerContext
    ) -> pb.Operation:
        """Wait at most `timeout` (else 30 s), then answer what is known."""
        operation = self._find(request.name)
        timeout = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else 30.0
        remaining = context.time_remaining()
        if remaining is not None:  # answer before the caller's own deadline
            timeout = max(0.0, min(timeout, remaining - 0.2))
        await asyncio.wait([operation.task], timeout=timeout)
        return operation.to_proto()

    async def CancelOperation(
        self, request: pb.CancelOperationRequest, context: object
    ) -> empty_pb2.Empty:
        self._find(request.name).task.cancel()
        return empty_pb2.Empty()

    async def DeleteOperation(
        self, request: pb.DeleteOperationRequest, context: object
    ) -> empty_pb2.Empty:
        if not self._find(request.name).task.done():
            raise InvalidFieldError("name", "names an operation that still runs")
        del self._operations[request.name]
        return empty_pb2.Empty()

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        running = [op.task for op in self._operations.values() if not op.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _trim(self) -> None:
        for name in [key for key, op in self._operations.items() if op.task.done()]:
            if len(self._operations) <= self._capacity:
                return
            del self._operations[name]


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
