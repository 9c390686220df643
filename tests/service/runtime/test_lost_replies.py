"""Answers that get lost after the work was done: clients ask again and get them."""

import pytest

from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from sluice.client import TrainerClient
from sluice.runtime.idempotency import RequestLog
from sluice.runtime.server import Server, ServerConfig
from sluice.samples.blobs import BlobReference


class Trainer(pb_grpc.TrainerServiceServicer):
    """Counts how often it works."""

    def __init__(self) -> None:
        self.uploads = self.discards = 0
        self._requests = RequestLog()

    async def DiscardGradients(self, request, context):
        async def run():
            self.discards += 1
            return pb.DiscardGradientsResponse(part_ids=["a"])

        return await self._requests.once(request.request_id, request, run)

    async def UploadBatch(self, request_iterator, context):
        messages = [message async for message in request_iterator]

        async def run():
            self.uploads += 1
            count = sum(1 + len(message.more_blobs) for message in messages[1:])
            return pb.UploadBatchResponse(batch="batches/1", sample_count=count)

        return await self._requests.once(messages[0].header.request_id, messages[0], run)


@pytest.fixture
async def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "_directory", str(tmp_path))
    server, servicer = Server(ServerConfig(drain_seconds=0.1)), Trainer()
    server.add(pb_grpc.add_TrainerServiceServicer_to_server, servicer, "trainer")
    await server.start()
    async with TrainerClient(server.address) as client:
        yield servicer, client
    await server.stop()


async def test_a_lost_answer_is_asked_for_again_and_no_work_is_done_twice(trainer, tmp_path):
    servicer, client = trainer
    faults.arm(tmp_path, "reply.DiscardGradients")
    assert await client.discard_gradients() == ["a"]
    assert servicer.discards == 1
    assert not (tmp_path / "reply.DiscardGradients").exists()  # it was lost once


async def test_that_holds_for_calls_that_stream_their_request(trainer, tmp_path):
    servicer, client = trainer
    faults.arm(tmp_path, "reply.UploadBatch")
    blobs = [BlobReference(f"{number:032x}", 1) for number in range(10_000)]
    answer = await client.upload_batch("1", 10_000, blobs=blobs)
    assert (answer.sample_count, servicer.uploads) == (10_000, 1)
    assert not (tmp_path / "reply.UploadBatch").exists()
