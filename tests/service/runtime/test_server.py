"""A real server on port 0 with a servicer that can do everything wrong."""

import asyncio
import json
import socket
import urllib.error
import urllib.request

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from sluice.api.common.v1 import wait_service_pb2, wait_service_pb2_grpc
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from sluice.api.trainer.v1 import worker_service_pb2 as worker_pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as worker_grpc
from sluice.client import RemoteError, typed_errors
from sluice.config import ConfigError
from sluice.runtime import interceptors
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import NotFoundError, QueueFullError
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE

NAME = "sluice.api.trainer.v1.TrainerService"


class Servicer(pb_grpc.TrainerServiceServicer):
    def __init__(self, server: Server) -> None:
        self.server, self.gate, self.failure = server, asyncio.Event(), ""

    async def DeleteBatch(self, request, context):
        raise NotFoundError("batch", request.batch)

    async def DiscardGradients(self, request, context):
        raise QueueFullError("no room", retry_seconds=2.5, limit=4)

    async def ComputeAdvantages(self, request, context):
        raise ZeroDivisionError("secret path /home/x")

    async def UploadBatch(self, requests, context):
        count = 0
        async for request in requests:
            count += request.HasField("sample")
        return pb.UploadBatchResponse(sample_count=count)

    async def GetColumns(self, request, context):
        yield pb.GetColumnsResponse()
        raise NotFoundError("batch", request.batch)

    async def GetTrainer(self, request, context):
        with self.server.waits.waiting(
            "the gate", on=["rank 1"], timeout=9, explain=lambda: "shut"
        ):
            await self.gate.wait()
        return pb.GetTrainerResponse(trainer=pb.Trainer(failure=self.failure))

    async def SaveCheckpoint(self, request, context):
        async def run():
            await self.gate.wait()
            if request.checkpoint_id == "bad":
                raise NotFoundError("directory", "bad")
            return pb.SaveCheckpointResponse(checkpoint=request.checkpoint_id)

        return self.server.operations.start("save", request, run, pb.CheckpointMetadata)


class Refusing(worker_grpc.WorkerServiceServicer):
    async def Follow(self, requests, context):
        raise NotFoundError("rank", "0")
        yield


async def running(config: ServerConfig) -> tuple[Server, Servicer]:
    server = Server(config)
    servicer = Servicer(server)
    server.add(pb_grpc.add_TrainerServiceServicer_to_server, servicer, NAME)
    await server.start()
    return server, servicer


@pytest.fixture
async def served():
    server, servicer = await running(ServerConfig(drain_seconds=0.2))
    async with create_channel(server.address) as channel:
        yield server, servicer, channel, pb_grpc.TrainerServiceStub(channel)
    servicer.gate.set()
    await server.stop()


async def refusal(call) -> RemoteError:
    with pytest.raises(RemoteError) as caught, typed_errors():
        await call
    return caught.value


async def test_errors_carry_code_reason_and_metadata(served):
    _, _, _, stub = served
    error = await refusal(stub.DeleteBatch(pb.DeleteBatchRequest(batch="batches/x")))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "BATCH_NOT_FOUND")
    assert error.metadata == {"name": "batches/x"}


async def test_back_pressure_says_when_to_come_back(served):
    _, _, _, stub = served
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.DiscardGradients(pb.DiscardGradientsRequest())
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(caught.value).details[1].Unpack(retry)
    assert retry.retry_delay.ToNanoseconds() == 2_500_000_000


async def test_missing_required_field_is_named(served):
    _, _, _, stub = served
    error = await refusal(stub.DeleteBatch(pb.DeleteBatchRequest()))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.metadata["field"] == "batch"


async def test_streamed_requests_are_checked_too(served):
    _, _, _, stub = served

    async def messages():
        yield pb.UploadBatchRequest(header=pb.BatchHeader(batch_id="a", sample_count=1))
        yield pb.UploadBatchRequest(sample={"sample_id": "s"})

    error = await refusal(stub.UploadBatch(messages()))
    assert error.metadata["field"] == "sample.group_id"


async def test_who_still_sends_when_refused_learns_why_every_time(monkeypatch):
    """Each time, for a grpc.aio caller told while it writes says INTERNAL: some in ten."""
    monkeypatch.setattr(interceptors, "HEAR_OUT_SECONDS", 60.0)  # they end at once
    server = Server(ServerConfig(drain_seconds=0.1))
    server.add(worker_grpc.add_WorkerServiceServicer_to_server, Refusing(), "refusing")
    await server.start()

    async def messages():
        for _ in range(3):
            yield worker_pb.FollowRequest()

    async def call(channel) -> str:
        with pytest.raises(RemoteError) as caught, typed_errors():
            async for _ in worker_grpc.WorkerServiceStub(channel).Follow(messages()):
                pass
        return caught.value.reason

    async with create_channel(server.address) as channel:
        told = [await asyncio.gather(*(call(channel) for _ in range(20))) for _ in range(20)]
    await server.stop()
    assert {reason for reasons in told for reason in reasons} == {"RANK_NOT_FOUND"}


async def test_errors_in_a_streamed_answer_are_typed(served):
    _, _, _, stub = served
    received = []
    with pytest.raises(RemoteError) as caught, typed_errors():
        async for response in stub.GetColumns(pb.GetColumnsRequest(batch="b", columns=["c"])):
            received.append(response)
    assert len(received) == 1
    assert caught.value.reason == "BATCH_NOT_FOUND"


async def test_a_bug_is_internal_and_keeps_its_message_to_the_log(served, caplog):
    _, _, _, stub = served
    request = pb.ComputeAdvantagesRequest(batch="b", advantage={"name": "grpo"})
    error = await refusal(stub.ComputeAdvantages(request))
    assert error.code is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error)
    assert "secret" in caplog.text


async def test_a_method_left_out_is_unimplemented(served):
    _, _, _, stub = served
    error = await refusal(
        stub.StepOptimizer(pb.StepOptimizerRequest(expected_step=0, part_ids=["a"]))
    )
    assert error.code is grpc.StatusCode.UNIMPLEMENTED


async def test_oversize_message_is_refused():
    server, servicer = await running(ServerConfig(max_message_bytes=1024, drain_seconds=0.1))
    servicer.failure = "y" * 2048
    servicer.gate.set()
    async with create_channel(server.address) as channel:
        stub = pb_grpc.TrainerServiceStub(channel)
        error = await refusal(stub.DeleteBatch(pb.DeleteBatchRequest(batch="x" * 2048)))
        answer = await refusal(stub.GetTrainer(pb.GetTrainerRequest()))
        after = await refusal(stub.DeleteBatch(pb.DeleteBatchRequest(batch="x")))
    await server.stop()
    for refused in (error, answer):
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.reason == "MESSAGE_TOO_LARGE"
    assert after.reason == "BATCH_NOT_FOUND"  # the server goes on


async def test_alive_before_ready(served):
    server, _, channel, _ = served
    check = health_pb2_grpc.HealthStub(channel).Check
    alive = await check(health_pb2.HealthCheckRequest())
    before = await check(health_pb2.HealthCheckRequest(service=NAME))
    await server.set_serving()
    after = await check(health_pb2.HealthCheckRequest(service=NAME))
    states = health_pb2.HealthCheckResponse
    assert [alive.status, before.status, after.status] == [
        states.SERVING,
        states.NOT_SERVING,
        states.SERVING,
    ]


async def test_reflection_lists_the_services(served):
    _, _, channel, _ = served

    async def ask():
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    async for answer in stub.ServerReflectionInfo(ask()):
        names = {service.name for service in answer.list_services_response.service}
    assert {NAME, "sluice.api.common.v1.WaitService", "google.longrunning.Operations"} <= names


async def test_waits_name_what_on_whom_and_why(served):
    _, servicer, channel, stub = served
    call = asyncio.ensure_future(stub.GetTrainer(pb.GetTrainerRequest(), timeout=PATIENCE))
    waits = wait_service_pb2_grpc.WaitServiceStub(channel)
    async with asyncio.timeout(PATIENCE):
        while not (listed := (await waits.ListWaits(wait_service_pb2.ListWaitsRequest())).waits):
            await asyncio.sleep(0.01)
    servicer.gate.set()
    await call
    assert (listed[0].what, list(listed[0].on), listed[0].explanation) == (
        "the gate",
        ["rank 1"],
        "shut",
    )
    assert listed[0].HasField("deadline_time")
    assert not (await waits.ListWaits(wait_service_pb2.ListWaitsRequest())).waits


async def test_an_operation_runs_once_and_answers_its_result(served):
    _, servicer, channel, stub = served
    operations = operations_pb2_grpc.OperationsStub(channel)
    request = pb.SaveCheckpointRequest(checkpoint_id="a", request_id="1")
    first, again = await stub.SaveCheckpoint(request), await stub.SaveCheckpoint(request)
    assert first.name == again.name
    assert not first.done
    servicer.gate.set()
    done = await operations.WaitOperation(operations_pb2.WaitOperationRequest(name=first.name))
    response = pb.SaveCheckpointResponse()
    assert done.done
    assert done.response.Unpack(response)
    assert response.checkpoint == "a"
    error = await refusal(
        stub.SaveCheckpoint(pb.SaveCheckpointRequest(checkpoint_id="b", request_id="1"))
    )
    assert error.reason == "REQUEST_ID_REUSED"


async def test_a_failed_operation_carries_its_error(served):
    _, servicer, channel, stub = served
    operations = operations_pb2_grpc.OperationsStub(channel)
    servicer.gate.set()
    started = await stub.SaveCheckpoint(pb.SaveCheckpointRequest(checkpoint_id="bad"))
    done = await operations.WaitOperation(operations_pb2.WaitOperationRequest(name=started.name))
    assert done.error.code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_an_operation_can_be_cancelled(served):
    _, _, channel, stub = served
    operations = operations_pb2_grpc.OperationsStub(channel)
    started = await stub.SaveCheckpoint(pb.SaveCheckpointRequest(checkpoint_id="a"))
    answer = await operations.CancelOperation(
        operations_pb2.CancelOperationRequest(name=started.name)
    )
    assert answer == empty_pb2.Empty()
    done = await operations.WaitOperation(operations_pb2.WaitOperationRequest(name=started.name))
    assert done.error.code == grpc.StatusCode.CANCELLED.value[0]


async def test_token_is_needed_on_every_port(tmp_path):
    token = tmp_path / "token"
    token.write_text("right\n")
    security = SecurityConfig(token_file=token)
    server, _ = await running(ServerConfig(security=security, drain_seconds=0.1))
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    request = pb.DeleteBatchRequest(batch="x")
    reasons = []
    for given in (None, SecurityConfig(token_file=wrong), security):
        async with create_channel(server.address, given) as channel:
            reasons.append(
                (await refusal(pb_grpc.TrainerServiceStub(channel).DeleteBatch(request))).reason
            )
    assert reasons == ["TOKEN_MISSING_OR_WRONG", "TOKEN_MISSING_OR_WRONG", "BATCH_NOT_FOUND"]
    url = f"http://{server.metrics_address}/metrics"
    with pytest.raises(urllib.error.HTTPError) as caught:
        await asyncio.to_thread(urllib.request.urlopen, url, timeout=PATIENCE)
    assert caught.value.code == 401
    allowed = urllib.request.Request(url, headers={"Authorization": "Bearer right"})
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(allowed, timeout=PATIENCE).read())
    assert b"sluice_rpc_duration_seconds" in page
    await server.stop()


@pytest.mark.parametrize("setting", ["port", "metrics_port"])
async def test_a_taken_port_is_an_error_of_the_setting(setting):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.{setting}: .*127\.0\.0\.1:{port}"):
            await Server(ServerConfig(**{setting: port})).start()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_host_may_be_of_ipv6(host, tmp_path):
    file = tmp_path / "address.json"
    server, _ = await running(ServerConfig(host=host, address_file=file, drain_seconds=0.2))
    told = json.loads(file.read_text())
    assert told["address"].startswith("[::1]:") and told["metrics_address"].startswith("[::1]:")
    try:
        async with create_channel(told["address"]) as channel:
            stub = pb_grpc.TrainerServiceStub(channel)
            error = await refusal(stub.DeleteBatch(pb.DeleteBatchRequest(batch="batches/x")))
            assert error.reason == "BATCH_NOT_FOUND"
        url = f"http://{told['metrics_address']}/metrics"
        page = await asyncio.to_thread(urllib.request.urlopen, url, timeout=PATIENCE)
        assert b"sluice_" in page.read()
        with pytest.raises(ConfigError, match=rf"server\.port: .*\[::1\]:{server.port}"):
            await Server(ServerConfig(host=host, port=server.port)).start()
    finally:
        await server.stop()


async def test_a_server_that_cannot_tell_its_address_opens_nothing(tmp_path):
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    server = Server(ServerConfig(address_file=nowhere / "address.json"))
    with pytest.raises(OSError, match=r"address\.json"):
        await server.start()
    for address in (server.address, server.metrics_address):
        host, _, port = address.rpartition(":")
        with socket.socket() as caller:
            assert caller.connect_ex((host, int(port)))
