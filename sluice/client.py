"""Typed clients of the services, for the loop and for other programs.

Every call has a deadline (`sluice.runtime.channel.DEADLINES`), every mutation a request_id, so
that a retry after a lost answer changes nothing. A refusal raises RemoteError.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import message as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.common.v1 import (
    profile_pb2,
    sample_pb2,
    store_service_pb2,
    store_service_pb2_grpc,
    wait_service_pb2,
    wait_service_pb2_grpc,
)
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc, rollout_service_pb2_grpc
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.router.v1 import router_service_pb2_grpc
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc
from sluice.runtime import waits, wire
from sluice.runtime.addresses import MovingChannel
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import RemoteError as RemoteError
from sluice.runtime.errors import error_from_status as error_from_status
from sluice.runtime.errors import typed_errors as typed_errors
from sluice.runtime.security import SecurityConfig
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample

M = TypeVar("M", bound=pb.Message)
C = TypeVar("C", bound="Client")

PUT_BYTES = 1 << 20  # of one message of PutColumns, unless a row alone is larger
OPEN_SECONDS = 300.0  # of an environment, whose code is imported and may load data
BLOBS_TOGETHER = 4096  # in one message of UploadBatch


def new_request_id() -> str:
    return str(uuid.uuid4())


class Client:
    """A channel to one server, with what every server serves. Use as a context manager.

    role: what the server is to the caller, for errors to name it where several are alike.
    """

    def __init__(
        self, address: str, security: SecurityConfig | None = None, *, role: str = ""
    ) -> None:
        self._address, self.role = address, role
        self.channel = create_channel(address, security)
        self._operations = operations_pb2_grpc.OperationsStub(self.channel)
        self._waits = wait_service_pb2_grpc.WaitServiceStub(self.channel)
        self._stores = store_service_pb2_grpc.StoreServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """host:port of the server; of one that moves where it is by now."""
        return self.channel.address if isinstance(self.channel, MovingChannel) else self._address

    @property
    def where(self) -> str:
        """The role and where it is: its address now, and the services.json that names it."""
        file, mark, name = self._address.rpartition("#")
        named = f" ({name} of {file})" if mark else ""
        return f"{self.role or 'server'} at {self.address}{named}"

    async def close(self) -> None:
        await self.channel.close()

    async def list_waits(self) -> list[wait_service_pb2.Wait]:
        """What the server waits for, longest first."""
        response = await self._call(self._waits.ListWaits, wait_service_pb2.ListWaitsRequest())
        return list(response.waits)

    async def check_store(self, nonce: str) -> store_service_pb2.CheckStoreResponse:
        """Has the server read what was written as `checks/<nonce>` into its store, and write."""
        request = store_service_pb2.CheckStoreRequest(nonce=nonce)
        return await self._call(self._stores.CheckStore, request)

    async def is_serving(self, service: str = "") -> bool:
        """Whether a service, by its full name, takes work; by default whether the server lives."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = await self._call(self._health.Check, request)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _call(self, method: Callable[..., Awaitable[M]], request: Any) -> M:
        began = time.monotonic()
        with self._named():
            try:
                with typed_errors():
                    return await method(request)
            except RemoteError as error:
                if not error.is_late or error.message != "Deadline Exceeded":
                    raise
                what = type(request).__name__.removesuffix("Request")
                told = f"no answer to {what} in {time.monotonic() - began:.0f} s"
                raise RemoteError(error.code, "", told, {}) from None

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Have errors say whose they are."""
        try:
            yield
        except RemoteError as error:
            if self.role:
                error.where = self.where
            raise

    async def _operate(
        self,
        method: Callable[..., Awaitable[operations_pb2.Operation]],
        request: Any,
        kind: type[M],
        heed: Callable[[operations_pb2.Operation], bool] = lambda operation: True,
    ) -> M:
        """Start an operation and wait for its response.

        `heed` sees it again and again, soon, until it has seen what it looks for.
        """
        operation = await self._call(method, request)
        what = type(request).__name__.removesuffix("Request")
        return await self._finish(what, operation, kind, heed)

    async def _finish(
        self,
        what: str,
        operation: operations_pb2.Operation,
        kind: type[M],
        heed: Callable[[operations_pb2.Operation], bool] = lambda operation: True,
    ) -> M:
        """Wait for the response of an operation. Raises RemoteError."""
        with waits.waiting(what, on=[self.address]):
            has_seen, late = heed(operation), 0
            while not operation.done:
                wait = operations_pb2.WaitOperationRequest(name=operation.name)
                if not has_seen:
                    wait.timeout.CopyFrom(wire.duration_of(HEED_SECONDS))
                try:
                    operation = await self._call(self._operations.WaitOperation, wait)
                except RemoteError as error:
                    late += 1
                    if not error.is_late or late > LATE_WAITS:
                        raise
                    continue
                late, has_seen = 0, has_seen or heed(operation)
        if operation.HasField("error"):
            with self._named():
                raise error_from_status(operation.error)
        response = kind()
        operation.response.Unpack(response)
        return response


class _Started(Awaitable[M]):
    """An operation that was begun: its end is looked for when somebody awaits it."""

    def __init__(self, finish: Callable[[], Coroutine[Any, Any, M]]) -> None:
        self._finish = finish

    def __await__(self) -> Generator[Any, Any, M]:
        return self._finish().__await__()


HEED_SECONDS = 0.02  # between two looks at what an operation says of itself
LATE_WAITS = 9  # in a row, each of a minute without an answer: the server stands still


class ClientCache(Generic[C]):
    """Clients by address: each is made when it is first asked for, and `close` closes them all."""

    def __init__(
        self, kind: Callable[[str, SecurityConfig | None], C], security: SecurityConfig | None
    ) -> None:
        self._kind, self._security = kind, security
        self._clients: dict[str, C] = {}

    def __getitem__(self, address: str) -> C:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._kind(address, self._security)
        return client

    async def discard(self, address: str) -> None:
        """Close the client of an address that nobody calls any more."""
        if (client := self._clients.pop(address, None)) is not None:
            await client.close()

    async def close(self) -> None:
        while self._clients:
            await self._clients.popitem()[1].close()


class TrainerClient(Client):
    """TrainerService."""

    def __init__(
        self, address: str, security: SecurityConfig | None = None, *, role: str = "trainer"
    ) -> None:
        super().__init__(address, security, role=role)
        self.stub = trainer_service_pb2_grpc.TrainerServiceStub(self.channel)

    async def get(self) -> trainer_pb.Trainer:
        response = await self._call(self.stub.GetTrainer, trainer_pb.GetTrainerRequest())
        return response.trainer

    async def upload_batch(
        self,
        batch_id: str,
        sample_count: int,
        *,
        samples: Iterable[Sample] = (),
        blobs: Iterable[BlobReference] = (),
        adapter: str = "",
    ) -> trainer_pb.UploadBatchResponse:
        """Register rows, inline (small callers) or by reference to the shared store."""
        header = trainer_pb.BatchHeader(
            batch_id=batch_id,
            sample_count=sample_count,
            request_id=new_request_id(),
            adapter=adapter,
        )

        async def messages() -> AsyncIterator[trainer_pb.UploadBatchRequest]:
            yield trainer_pb.UploadBatchRequest(header=header)
            named = [wire.blob_to_proto(blob) for blob in blobs]
            for first in range(0, len(named), BLOBS_TOGETHER):
                blob, *more = named[first : first + BLOBS_TOGETHER]
                yield trainer_pb.UploadBatchRequest(blob=blob, more_blobs=more)
            for sample in samples:
                yield trainer_pb.UploadBatchRequest(sample=wire.sample_to_proto(sample))

        return await self._call(self.stub.UploadBatch, messages())

    async def delete_batch(self, batch: str) -> None:
        request = trainer_pb.DeleteBatchRequest(batch=batch, request_id=new_request_id())
        await self._call(self.stub.DeleteBatch, request)

    async def compute_logprobs(
        self,
        batch: str,
        *,
        reference: bool = False,
        temperature: float | None = None,
        allow_other_temperature: bool = False,
        adapter: str = "",
        top_count: int = 0,
        reference_version: int = 0,
    ) -> trainer_pb.ComputeLogprobsResponse:
        """Add `old_logprobs`, or `reference_logprobs`.

        `reference_version`: the published version that is the reference; 0 is the settings'.
        `allow_other_temperature`: also to rows that were sampled at another one. `top_count`: name
        as many likeliest tokens at each place besides, `top_columns` of `sluice.samples.sample`.
        """
        kind = trainer_pb.ComputeLogprobsRequest
        model = kind.MODEL_REFERENCE if reference else kind.MODEL_POLICY
        request = kind(
            batch=batch,
            model=model,
            temperature=temperature,
            request_id=new_request_id(),
            allow_other_temperature=allow_other_temperature,
            adapter=adapter,
            top_count=top_count,
            reference_version=reference_version,
        )
        return await self._call(self.stub.ComputeLogprobs, request)

    async def compute_advantages(
        self, batch: str, spec: AdvantageSpec
    ) -> trainer_pb.ComputeAdvantagesResponse:
        request = trainer_pb.ComputeAdvantagesRequest(
            batch=batch, advantage=wire.advantage_to_proto(spec), request_id=new_request_id()
        )
        return await self._call(self.stub.ComputeAdvantages, request)

    async def describe_algorithm(
        self, loss: LossSpec, advantage: AdvantageSpec
    ) -> trainer_pb.DescribeAlgorithmResponse:
        """What the two read; refused where a setting is wrong or a name may not be imported."""
        request = trainer_pb.DescribeAlgorithmRequest(
            loss=wire.loss_to_proto(loss), advantage=wire.advantage_to_proto(advantage)
        )
        return await self._call(self.stub.DescribeAlgorithm, request)

    async def compute_values(self, batch: str) -> trainer_pb.ComputeValuesResponse:
        """Add `values`; the trainer must be a critic."""
        request = trainer_pb.ComputeValuesRequest(batch=batch, request_id=new_request_id())
        return await self._call(self.stub.ComputeValues, request)

    async def plan_batch(
        self, request: trainer_pb.PlanBatchRequest
    ) -> trainer_pb.PlanBatchResponse:
        """How rows would be packed; nothing runs."""
        return await self._call(self.stub.PlanBatch, request)

    async def forward_backward(
        self,
        batch: str,
        loss: LossSpec,
        *,
        expected_step: int,
        part_id: str,
        sample_ids: Sequence[str] = (),
        allow_other_temperature: bool = False,
        adapter: str = "",
        keep_logprobs: bool = False,
    ) -> trainer_pb.ForwardBackwardResponse:
        """Add gradients of rows; `keep_logprobs`: and their `old_logprobs`, of the same pass."""
        request = trainer_pb.ForwardBackwardRequest(
            batch=batch,
            loss=wire.loss_to_proto(loss),
            expected_step=expected_step,
            part_id=part_id,
            sample_ids=sample_ids,
            request_id=new_request_id(),
            allow_other_temperature=allow_other_temperature,
            adapter=adapter,
            keep_logprobs=keep_logprobs,
        )
        return await self._call(self.stub.ForwardBackward, request)

    async def step_optimizer(
        self,
        expected_step: int,
        part_ids: Sequence[str],
        learning_rate: float | None = None,
        *,
        adapter: str = "",
        adam: trainer_pb.AdamSettings | None = None,
    ) -> trainer_pb.StepOptimizerResponse:
        """Apply the parts; `adam` has numbers of this step alone, of a trainer with `lora`."""
        request = trainer_pb.StepOptimizerRequest(
            expected_step=expected_step,
            part_ids=part_ids,
            learning_rate=learning_rate,
            request_id=new_request_id(),
            adapter=adapter,
            adam=adam,
        )
        return await self._call(self.stub.StepOptimizer, request)

    async def discard_gradients(self, *, adapter: str = "") -> list[str]:
        request = trainer_pb.DiscardGradientsRequest(request_id=new_request_id(), adapter=adapter)
        response = await self._call(self.stub.DiscardGradients, request)
        return list(response.part_ids)

    async def get_columns(
        self, batch: str, columns: Sequence[str], *, sample_ids: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """Columns by sample id: arrays for per-token columns, floats for the others.

        sample_ids: rows to read; empty is all.
        """
        request = trainer_pb.GetColumnsRequest(batch=batch, columns=columns, sample_ids=sample_ids)
        rows: dict[str, dict[str, Any]] = {}
        with typed_errors():
            async for response in self.stub.GetColumns(request):
                for row in response.rows:
                    rows[row.sample_id] = wire.columns_from_proto(row.columns, "columns")
        return rows

    async def refer_columns(self, batch: str, columns: Sequence[str]) -> list[BlobReference]:
        """Blobs of the store that hold columns of all rows, for `take_columns`.

        They are kept for the grace period of the store's collector.
        """
        request = trainer_pb.GetColumnsRequest(batch=batch, columns=columns, by_reference=True)
        blobs: list[BlobReference] = []
        with typed_errors():
            async for response in self.stub.GetColumns(request):
                blobs += [wire.blob_from_proto(blob) for blob in response.blobs]
        return blobs

    async def take_columns(
        self, batch: str, blobs: Sequence[BlobReference], columns: Mapping[str, str]
    ) -> int:
        """Set columns that lie in blobs, of a trainer on the same store; returns the rows changed.

        columns: which of them, with the names that they get.
        """
        request = trainer_pb.PutColumnsRequest(
            batch=batch,
            request_id=new_request_id(),
            blobs=[wire.blob_to_proto(blob) for blob in blobs],
            columns=columns,
        )

        async def messages() -> AsyncIterator[trainer_pb.PutColumnsRequest]:
            yield request

        response = await self._call(self.stub.PutColumns, messages())
        return int(response.row_count)

    async def put_columns(
        self, batch: str, rows: Mapping[str, Mapping[str, np.ndarray | float]]
    ) -> int:
        """Set columns by sample id, as `get_columns` gives them; returns the rows changed."""
        request_id = new_request_id()

        async def messages() -> AsyncIterator[trainer_pb.PutColumnsRequest]:
            message = trainer_pb.PutColumnsRequest(batch=batch, request_id=request_id)
            size = 0
            for sample_id, columns in rows.items():
                row = trainer_pb.RowColumns(
                    sample_id=sample_id,
                    columns={n: wire.column_to_proto(values) for n, values in columns.items()},
                )
                if size and size + row.ByteSize() > PUT_BYTES:
                    yield message
                    message = trainer_pb.PutColumnsRequest(batch=batch, request_id=request_id)
                    size = 0
                message.rows.append(row)
                size += row.ByteSize()
            yield message

        response = await self._call(self.stub.PutColumns, messages())
        return int(response.row_count)

    async def save_checkpoint(
        self, checkpoint_id: str, *, adapter: str = ""
    ) -> trainer_pb.SaveCheckpointResponse:
        return await (await self._begin_save(checkpoint_id, adapter))

    async def begin_checkpoint(
        self, checkpoint_id: str, *, adapter: str = ""
    ) -> Awaitable[trainer_pb.SaveCheckpointResponse]:
        """Have the state of now saved beside the calls that follow; the answer tells its end.

        What goes wrong meanwhile is raised where that is awaited.
        """
        return await self._begin_save(checkpoint_id, adapter, write_behind=True)

    async def _begin_save(
        self, checkpoint_id: str, adapter: str, *, write_behind: bool = False
    ) -> Awaitable[trainer_pb.SaveCheckpointResponse]:
        request = trainer_pb.SaveCheckpointRequest(
            checkpoint_id=checkpoint_id,
            request_id=new_request_id(),
            write_behind=write_behind,
            adapter=adapter,
        )
        operation = await self._call(self.stub.SaveCheckpoint, request)
        return _Started(
            partial(self._finish, "SaveCheckpoint", operation, trainer_pb.SaveCheckpointResponse)
        )

    async def load_checkpoint(
        self,
        checkpoint: str,
        *,
        adapter: str = "",
        saved_adapter: str = "",
        weights_only: bool = False,
    ) -> trainer_pb.LoadCheckpointResponse:
        """Go back to a checkpoint; `saved_adapter`: of another adapter that is alike."""
        request = trainer_pb.LoadCheckpointRequest(
            checkpoint=checkpoint,
            request_id=new_request_id(),
            adapter=adapter,
            saved_adapter=saved_adapter,
            weights_only=weights_only,
        )
        return await self._operate(
            self.stub.LoadCheckpoint, request, trainer_pb.LoadCheckpointResponse
        )

    async def sleep(self, timeout_seconds: float | None = None) -> trainer_pb.SleepResponse:
        """Have the devices freed, once the trainer is not busy; what became free."""
        request = trainer_pb.SleepRequest(request_id=new_request_id())
        return await self._call(partial(self.stub.Sleep, timeout=timeout_seconds), request)

    async def wake(self, timeout_seconds: float | None = None) -> int:
        """Have the devices taken back; optimizer steps, fewer where ranks were lost meanwhile."""
        request = trainer_pb.WakeRequest(request_id=new_request_id())
        response = await self._call(partial(self.stub.Wake, timeout=timeout_seconds), request)
        return response.step

    async def profile(
        self,
        *,
        steps: int = 1,
        ranks: Iterable[int] = (),
        options: profile_pb2.ProfileOptions | None = None,
        name: str = "",
    ) -> profile_pb2.Profile:
        """Have ranks, none for the first, record what they do until so many steps are taken.

        `get` tells what became of it.
        """
        request = trainer_pb.ProfileRequest(
            step_count=steps,
            ranks=ranks,
            options=options,
            name=name,
            request_id=new_request_id(),
        )
        response = await self._call(self.stub.Profile, request)
        return response.profile

    async def publish_weights(
        self,
        engines: Iterable[trainer_pb.TransferTarget] = (),
        pause_mode: engine_pb.PauseMode = engine_pb.PAUSE_MODE_UNSPECIFIED,
        on_allocated: Callable[[int], None] | None = None,
        *,
        adapter: str = "",
    ) -> trainer_pb.PublishWeightsResponse:
        """Publish to the store, then send to `engines`; the answer says which have it.

        `on_allocated` hears the number of the version once, while it is being written.
        """

        def heed(operation: operations_pb2.Operation) -> bool:
            if on_allocated is None:
                return True
            metadata = trainer_pb.PublishWeightsMetadata()
            operation.metadata.Unpack(metadata)
            if metadata.version and not operation.done:
                on_allocated(metadata.version)
            return operation.done or metadata.version > 0

        request = trainer_pb.PublishWeightsRequest(
            request_id=new_request_id(), engines=engines, pause_mode=pause_mode, adapter=adapter
        )
        return await self._operate(
            self.stub.PublishWeights, request, trainer_pb.PublishWeightsResponse, heed
        )

    async def create_adapter(
        self,
        adapter: str,
        *,
        rank: int | None = None,
        alpha: float | None = None,
        targets: Iterable[str] = (),
        learning_rate: float | None = None,
        seed: int | None = None,
    ) -> trainer_pb.TrainedAdapter:
        """Begin another adapter, which calls then name; what is not given is as the trainer's."""
        request = trainer_pb.CreateAdapterRequest(
            adapter=adapter,
            rank=rank,
            alpha=alpha,
            targets=targets,
            learning_rate=learning_rate,
            seed=seed,
            request_id=new_request_id(),
        )
        return (await self._call(self.stub.CreateAdapter, request)).adapter

    async def delete_adapter(self, adapter: str) -> None:
        request = trainer_pb.DeleteAdapterRequest(adapter=adapter, request_id=new_request_id())
        await self._call(self.stub.DeleteAdapter, request)


class EngineClient(Client):
    """EngineService of one engine, or of the router as a proxy."""

    def __init__(self, address: str, security: SecurityConfig | None = None) -> None:
        super().__init__(address, security)
        self.stub = engine_service_pb2_grpc.EngineServiceStub(self.channel)

    async def get(self, seconds: float | None = None) -> engine_pb.GetEngineResponse:
        """`seconds` are in place of the usual deadline."""
        with typed_errors():
            response: engine_pb.GetEngineResponse = await self.stub.GetEngine(
                engine_pb.GetEngineRequest(), timeout=seconds
            )
            return response

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sample_count: int = 1,
        temperature: float | None = None,
        seeds: Sequence[int] = (),
        dp_rank: int = 0,
        adapter: str = "",
    ) -> list[engine_pb.Completion]:
        """Samples of what serves, or of an adapter that is held: `policy@<version>`, or `base`."""
        request = engine_pb.GenerateRequest(
            request_id=new_request_id(),
            prompt_token_ids=prompt_token_ids,
            sampling=engine_pb.SamplingParams(
                max_new_tokens=max_new_tokens, temperature=temperature, seeds=seeds
            ),
            sample_count=sample_count,
            dp_rank=dp_rank,
            adapter=adapter,
        )
        response = await self._call(self.stub.Generate, request)
        return list(response.completions)

    async def check_transfer(self, weights: sample_pb2.WeightVersion) -> None:
        """Raises RemoteError with what keeps the engine from receiving a version."""
        request = engine_pb.CheckTransferRequest(weights=weights)
        await self._call(self.stub.CheckTransfer, request)

    async def join_transfer_group(self, request: engine_pb.JoinTransferGroupRequest) -> None:
        """Returns when all members have met."""
        await self._call(self.stub.JoinTransferGroup, request)

    async def prepare_weights(
        self,
        weights: sample_pb2.WeightVersion,
        transfer: engine_pb.WeightTransfer | None = None,
    ) -> float:
        """Seconds it took; generation went on. Without `transfer` they come from the store."""
        request = engine_pb.PrepareWeightsRequest(weights=weights, transfer=transfer)
        response = await self._call(self.stub.PrepareWeights, request)
        return wire.seconds_of(response.duration)

    async def stage_weights(self, version: int, timeout_seconds: float) -> int:
        """Have files of a version read while it is published; bytes, once it is committed."""
        request = engine_pb.StageWeightsRequest(version=version)
        request.timeout.CopyFrom(wire.duration_of(timeout_seconds))
        response = await self._call(self.stub.StageWeights, request)
        return response.size_bytes

    async def commit_weights(
        self,
        weights: sample_pb2.WeightVersion,
        mode: engine_pb.PauseMode = engine_pb.PAUSE_MODE_IN_PLACE,
    ) -> float:
        """Seconds nothing was decoded."""
        request = engine_pb.CommitWeightsRequest(weights=weights, mode=mode)
        response = await self._call(self.stub.CommitWeights, request)
        return wire.seconds_of(response.pause)

    async def pause(self, mode: engine_pb.PauseMode = engine_pb.PAUSE_MODE_WAIT) -> None:
        """Stop decoding; WAIT returns when nothing is in flight."""
        await self._call(self.stub.Pause, engine_pb.PauseRequest(mode=mode))

    async def resume(self) -> None:
        """Decode again."""
        await self._call(self.stub.Resume, engine_pb.ResumeRequest())

    async def sleep(self) -> None:
        """Have a paused engine give up the device: its weights and cache are gone."""
        await self._call(self.stub.Sleep, engine_pb.SleepRequest())

    async def profile(
        self,
        *,
        passes: int | None = None,
        options: profile_pb2.ProfileOptions | None = None,
        name: str = "",
    ) -> profile_pb2.Profile:
        """Have passes of the model recorded from now on; `get` tells what became of it."""
        request = engine_pb.ProfileRequest(
            pass_count=passes, options=options, name=name, request_id=new_request_id()
        )
        response = await self._call(self.stub.Profile, request)
        return response.profile

    async def wake(self) -> None:
        """Have an engine take the device back; weights must be committed before it serves."""
        await self._call(self.stub.Wake, engine_pb.WakeRequest())


class RolloutClient(Client):
    """RolloutService of one episode worker."""

    def __init__(self, address: str, security: SecurityConfig | None = None) -> None:
        super().__init__(address, security)
        self.stub = rollout_service_pb2_grpc.RolloutServiceStub(self.channel)

    async def rollout(
        self, request: rollout_pb.RolloutRequest
    ) -> AsyncIterator[rollout_pb.RolloutResponse]:
        """Finished and failed groups as they come, one by one; repeat the request to resume."""
        with typed_errors():
            async for response in self.stub.Rollout(request):
                more = list(response.more)
                response.ClearField("more")
                yield response
                for each in more:
                    yield each

    async def evaluate(
        self, request: rollout_pb.EvaluateRequest
    ) -> AsyncIterator[rollout_pb.EvaluateResponse]:
        """Groups as they settle, the report last; repeat the request to resume."""
        with typed_errors():
            async for response in self.stub.Evaluate(request):
                yield response

    async def cancel(self, rollout_request_id: str, group_ids: Sequence[str] = ()) -> list[str]:
        request = rollout_pb.CancelRolloutRequest(
            rollout_request_id=rollout_request_id, group_ids=group_ids
        )
        response = await self._call(self.stub.CancelRollout, request)
        return list(response.cancelled_group_ids)

    async def list_environments(self) -> list[rollout_pb.Environment]:
        return list((await self._describe(omits_schemas=False)).environments)

    async def vocabulary(self) -> str:
        """Digest of what prompts are encoded with; empty where nobody can say."""
        return (await self._describe(omits_schemas=True)).vocabulary

    async def check_environment(self, spec: rollout_pb.EnvironmentSpec) -> None:
        """Have an environment opened by its settings. Raises RemoteError with what is wrong."""
        request = rollout_pb.ListEnvironmentsRequest(omits_schemas=True, checked=spec)
        await self._call(partial(self.stub.ListEnvironments, timeout=OPEN_SECONDS), request)

    async def _describe(self, *, omits_schemas: bool) -> rollout_pb.ListEnvironmentsResponse:
        request = rollout_pb.ListEnvironmentsRequest(omits_schemas=omits_schemas)
        return await self._call(self.stub.ListEnvironments, request)


class RouterClient(Client):
    """RouterService, as far as a loop needs it; `sluice.router_client` holds leases."""

    def __init__(self, address: str, security: SecurityConfig | None = None) -> None:
        super().__init__(address, security)
        self.stub = router_service_pb2_grpc.RouterServiceStub(self.channel)

    async def list_engines(
        self, role: router_pb.Role = router_pb.ROLE_UNSPECIFIED
    ) -> list[router_pb.Engine]:
        """Engines and episode workers, by id."""
        request = router_pb.ListEnginesRequest(role=role)
        response = await self._call(self.stub.ListEngines, request)
        return list(response.engines)
