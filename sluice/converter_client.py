"""Client of a converter: operations with their progress."""

from __future__ import annotations

from collections.abc import AsyncIterator

from google.longrunning import operations_pb2
from google.protobuf import duration_pb2

from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.api.converter.v1 import converter_service_pb2_grpc as pb_grpc
from sluice.client import Client, error_from_status
from sluice.runtime.security import SecurityConfig


class ConverterClient(Client):
    """ConverterService. Refusals raise RemoteError."""

    def __init__(self, address: str, security: SecurityConfig | None = None) -> None:
        super().__init__(address, security)
        self.stub = pb_grpc.ConverterServiceStub(self.channel)

    async def convert(self, request: pb.ConvertCheckpointRequest) -> operations_pb2.Operation:
        """Start a conversion, or join the one of this request."""
        return await self._call(self.stub.ConvertCheckpoint, request)

    async def verify(self, request: pb.VerifyCheckpointRequest) -> operations_pb2.Operation:
        """Start a comparison, or join the one of this request."""
        return await self._call(self.stub.VerifyCheckpoint, request)

    async def list(self) -> list[pb.Conversion]:
        """What waits, runs and has ended, oldest first."""
        response = await self._call(self.stub.ListConversions, pb.ListConversionsRequest())
        return list(response.conversions)

    async def cancel(self, operation: str) -> None:
        """Stop a conversion; nothing is left of it."""
        request = operations_pb2.CancelOperationRequest(name=operation)
        await self._call(self._operations.CancelOperation, request)

    async def follow(
        self, operation: operations_pb2.Operation, *, seconds: float = 1.0
    ) -> AsyncIterator[operations_pb2.Operation]:
        """The operation now and every `seconds` until it is done. Raises RemoteError."""
        timeout = duration_pb2.Duration()
        timeout.FromNanoseconds(int(seconds * 1e9))
        while True:
            if operation.HasField("error"):
                raise error_from_status(operation.error)
            yield operation
            if operation.done:
                return
            wait = operations_pb2.WaitOperationRequest(name=operation.name, timeout=timeout)
            operation = await self._call(self._operations.WaitOperation, wait)
