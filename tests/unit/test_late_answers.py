"""Clients of a server that stands still for a while: what they wait for is asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from sluice import client
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from sluice.client import RemoteError, TrainerClient
from sluice.runtime.channel import DEADLINES
from tests.patience import PATIENCE


class Standing(pb_grpc.TrainerServiceServicer, operations_pb2_grpc.OperationsServicer):
    """Its operations are done when they are looked at after `late` looks without an answer."""

    late = 0
    looks = 0

    async def SaveCheckpoint(self, request, context):
        return operations_pb2.Operation(name="operations/1")

    async def WaitOperation(self, request, context):
        self.looks += 1
        if self.looks <= self.late:
            await asyncio.sleep(PATIENCE)  # until the caller's deadline
        operation = operations_pb2.Operation(name=request.name, done=self.looks > self.late + 1)
        operation.response.Pack(pb.SaveCheckpointResponse(checkpoint="there"))
        return operation

    async def DeleteBatch(self, request, context):
        await asyncio.sleep(PATIENCE)


@pytest.fixture
async def standing(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Standing, TrainerClient]]:
    for name in ("WaitOperation", "DeleteBatch"):
        monkeypatch.setitem(DEADLINES, name, 0.2)
    server, servicer = grpc.aio.server(), Standing()
    pb_grpc.add_TrainerServiceServicer_to_server(servicer, server)
    operations_pb2_grpc.add_OperationsServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with TrainerClient(f"127.0.0.1:{port}") as trainer:
        yield servicer, trainer
    await server.stop(None)


async def test_an_operation_is_waited_for_past_answers_that_do_not_come(standing) -> None:
    servicer, trainer = standing
    servicer.late = 3
    assert (await trainer.save_checkpoint("a")).checkpoint == "there"
    assert servicer.looks == 5  # one of which was answered before it was done


async def test_a_server_that_stands_still_for_good_is_given_up(standing, monkeypatch) -> None:
    monkeypatch.setattr(client, "LATE_WAITS", 2)
    servicer, trainer = standing
    servicer.late = 1000
    with pytest.raises(RemoteError, match=r"no answer to WaitOperation in \d+ s") as caught:
        await trainer.save_checkpoint("a")
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert servicer.looks == 3


async def test_a_call_that_is_given_up_is_named(standing) -> None:
    with pytest.raises(RemoteError, match=r"DEADLINE_EXCEEDED/-: no answer to DeleteBatch in 0 s"):
        await standing[1].delete_batch("batches/b")
