"""Serves TrainerService: decodes, calls the trainer, encodes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

import grpc
from google.longrunning import operations_pb2

from services.trainer.adam import optim_from_proto
from services.trainer.config import Head, TrainerConfig
from services.trainer.controller.checkpoint_record import check_id, id_of
from services.trainer.controller.passes import COLUMN_OF_MODEL, GradientsRequest
from services.trainer.controller.planning import BareRow, DryPlan, PlanOptions
from services.trainer.controller.publication import Publication
from services.trainer.controller.state import PassScalars, PolicyState
from services.trainer.controller.trainer import Trainer
from services.trainer.controller.transfer import Target
from services.trainer.controller.uploads import ColumnUpdate, ReferencedColumns
from services.trainer.description import LOSSES, describe_settings
from services.trainer.errors import AdaptersUnsupportedError, WrongHeadError
from sluice.algo.plugins import is_shipped
from sluice.algo.spec import LossSpec
from sluice.api.common.v1 import sample_pb2
from sluice.api.trainer.v1 import loss_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from sluice.api.trainer.v1 import worker_service_pb2 as worker_pb
from sluice.balance.planner import OversizePolicy
from sluice.profiler import NAME, new_name
from sluice.runtime.errors import InvalidFieldError, status_of
from sluice.runtime.idempotency import RequestLog, request_digest
from sluice.runtime.operations import Operations
from sluice.runtime.server import Server
from sluice.runtime.wire import (
    adapter_to_proto,
    advantage_from_proto,
    blob_from_proto,
    blob_to_proto,
    check_address,
    column_to_proto,
    columns_from_proto,
    duration_of,
    loss_from_proto,
    sample_from_proto,
    timestamp_of,
)
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import MOST_TOP, TEMPERATURES, is_temperature

MAX_PROFILED_STEPS = 100
ALLOCATION_SECONDS = 0.5  # that an answer waits for the number of a version
QUICK_SECONDS = 0.1  # and for its end, where the version before took no longer
MAX_RESPONSE_BYTES = 1 << 20  # of one message of a stream, unless a row alone is larger
OVERSIZE = {
    pb.OVERSIZE_POLICY_UNSPECIFIED: None,
    pb.OVERSIZE_POLICY_ERROR: OversizePolicy.ERROR,
    pb.OVERSIZE_POLICY_TRUNCATE: OversizePolicy.TRUNCATE,
    pb.OVERSIZE_POLICY_ALONE: OversizePolicy.ALONE,
}


def bound_requests(server: Server, config: TrainerConfig) -> None:
    """Have the server refuse requests about more rows than this trainer takes."""
    rows = config.max_rows, "max_rows"
    server.bound(pb.BatchHeader, "sample_count", *rows)
    server.bound(pb.PutColumnsRequest, "rows", *rows)
    server.bound(pb.PutColumnsRequest, "blobs", *rows)
    server.bound(pb.PlanBatchRequest, "bare_rows", *rows)
    server.bound(pb.PlanBatchRequest, "sample_ids", *rows)
    server.bound(pb.ForwardBackwardRequest, "sample_ids", *rows)
    server.bound(pb.GetColumnsRequest, "sample_ids", *rows)
    multiple = config.max_micro_batch_multiple, "max_micro_batch_multiple"
    server.bound(pb.PlanBatchRequest, "micro_batch_multiple", *multiple)
    engines = config.transfer.max_engines, "transfer.max_engines"
    server.bound(pb.PublishWeightsRequest, "engines", *engines)


class TrainerServicer(pb_grpc.TrainerServiceServicer):
    """Serves one Trainer; every call that changes something happens once for its request_id."""

    def __init__(self, trainer: Trainer, operations: Operations) -> None:
        self._trainer, self._operations = trainer, operations
        self._requests = RequestLog()

    async def close(self) -> None:
        await self._requests.close()

    async def GetTrainer(
        self, request: pb.GetTrainerRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainerResponse:
        return pb.GetTrainerResponse(trainer=describe(self._trainer))

    async def UploadBatch(
        self,
        request_iterator: AsyncIterator[pb.UploadBatchRequest],
        context: grpc.aio.ServicerContext,
    ) -> pb.UploadBatchResponse:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("payload") != "header":
            raise InvalidFieldError("header", "must come first")
        header = first.header
        if not header.request_id:
            self._trainer.state.batches.check_new(header.batch_id)
        upload, count = self._trainer.batches.begin_upload(), 0
        async for message in request_iterator:
            kind = message.WhichOneof("payload")
            count += 1 + len(message.more_blobs)
            if count > header.sample_count:
                raise InvalidFieldError(
                    "header.sample_count", f"is {header.sample_count}, more came"
                )
            if message.more_blobs and kind != "blob":
                raise InvalidFieldError("more_blobs", "come with a blob before them")
            if kind == "sample":
                upload.add_sample(sample_from_proto(message.sample))
                if upload.full:
                    await asyncio.to_thread(upload.spool)
            elif kind == "blob":
                if upload.pending:
                    await asyncio.to_thread(upload.spool)
                for blob in (message.blob, *message.more_blobs):
                    upload.add_blob(blob_from_proto(blob))
            else:
                raise InvalidFieldError("payload", "must be a sample or a blob after the header")
        if not count:
            raise InvalidFieldError("header.sample_count", f"is {header.sample_count}, none came")
        if upload.pending:
            await asyncio.to_thread(upload.spool)
        references = upload.finish()

        async def run() -> pb.UploadBatchResponse:
            batch = await self._trainer.batches.upload(
                header.batch_id, references, header.sample_count, header.adapter
            )
            return pb.UploadBatchResponse(
                batch=batch.name,
                sample_count=batch.row_count,
                token_count=int(batch.facts.lengths.sum()),
                group_count=len(set(batch.facts.group_ids)),
            )

        whose = f":{header.adapter}" if header.adapter else ""
        rows = worker_pb.AddRows(batch_id=f"{header.batch_id}:{header.sample_count}{whose}")
        rows.blobs.extend(worker_pb.BlobRows(blob=blob_to_proto(blob)) for blob in references)
        return await self._requests.once(header.request_id, rows, run)

    async def DeleteBatch(
        self, request: pb.DeleteBatchRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteBatchResponse:
        async def run() -> pb.DeleteBatchResponse:
            await self._trainer.batches.delete(request.batch)
            return pb.DeleteBatchResponse()

        return await self._requests.once(request.request_id, request, run)

    async def ComputeLogprobs(
        self, request: pb.ComputeLogprobsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ComputeLogprobsResponse:
        self._need_head(("policy",), "log-probabilities")
        if request.model not in COLUMN_OF_MODEL:
            raise InvalidFieldError("model", f"{request.model} is unknown")
        temperature = request.temperature if request.HasField("temperature") else 1.0
        if not is_temperature(temperature):
            raise InvalidFieldError("temperature", f"{TEMPERATURES}, got {temperature}")
        most = min(MOST_TOP, self._trainer.batches.limits.vocabulary_size)
        if not 0 <= request.top_count <= most:
            raise InvalidFieldError("top_count", f"must be within 0..{most}")
        if request.reference_version < 0:
            raise InvalidFieldError("reference_version", "must not be negative")
        if request.reference_version and request.model != request.MODEL_REFERENCE:
            raise InvalidFieldError("reference_version", "has no effect but with MODEL_REFERENCE")

        async def run() -> pb.ComputeLogprobsResponse:
            scalars = await self._trainer.passes.compute_logprobs(
                request.batch,
                request.model,
                temperature,
                any_temperature=request.allow_other_temperature,
                adapter=request.adapter,
                top_count=request.top_count,
                reference_version=request.reference_version,
            )
            return logprobs_to_proto(COLUMN_OF_MODEL[request.model], scalars)

        return await self._requests.once(request.request_id, request, run)

    async def ComputeValues(
        self, request: pb.ComputeValuesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ComputeValuesResponse:
        self._need_head(("value", "reward"), "values")

        async def run() -> pb.ComputeValuesResponse:
            scalars = await self._trainer.passes.compute_values(request.batch)
            return pb.ComputeValuesResponse(
                mean=scalars.metrics.get("value", 0.0), token_count=scalars.token_count
            )

        return await self._requests.once(request.request_id, request, run)

    async def ComputeAdvantages(
        self, request: pb.ComputeAdvantagesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ComputeAdvantagesResponse:
        spec = advantage_from_proto(request.advantage)
        self._trainer.passes.algorithms.check(spec)

        async def run() -> pb.ComputeAdvantagesResponse:
            totals = await self._trainer.passes.compute_advantages(request.batch, spec)
            return pb.ComputeAdvantagesResponse(
                reward_mean=totals.reward_mean,
                advantage_abs_mean=totals.advantage_abs_mean,
                silent_group_count=totals.silent_group_count,
                group_count=totals.group_count,
                metrics=totals.metrics,
            )

        return await self._requests.once(request.request_id, request, run)

    async def DescribeAlgorithm(
        self, request: pb.DescribeAlgorithmRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeAlgorithmResponse:
        loss = self._loss_from_proto(request.loss) if request.HasField("loss") else None
        advantage = None
        if request.HasField("advantage"):
            advantage = advantage_from_proto(request.advantage)
            self._trainer.passes.algorithms.check(advantage)
        if loss is None and advantage is None:
            raise InvalidFieldError("loss", "or advantage must be given")
        columns = await self._trainer.passes.describe(loss, advantage)
        return pb.DescribeAlgorithmResponse(
            loss_columns=sorted(columns[0]), advantage_columns=sorted(columns[1])
        )

    async def PutColumns(
        self,
        request_iterator: AsyncIterator[pb.PutColumnsRequest],
        context: grpc.aio.ServicerContext,
    ) -> pb.PutColumnsResponse:
        trainer = self._trainer
        inline: ColumnUpdate | None = None
        head, blobs = pb.PutColumnsRequest(), list[BlobReference]()
        async for message in request_iterator:
            if inline is None:
                head = pb.PutColumnsRequest(
                    batch=message.batch, request_id=message.request_id, columns=message.columns
                )
                inline = ColumnUpdate(trainer.state.batches.get(message.batch))
            elif (message.batch, message.request_id) != (head.batch, head.request_id):
                raise InvalidFieldError("batch", "and request_id must be the same in every message")
            elif dict(message.columns) != dict(head.columns):
                raise InvalidFieldError("columns", "must be the same in every message")
            for index, row in enumerate(message.rows):
                columns = columns_from_proto(row.columns, f"rows[{index}].columns")
                inline.add(row.sample_id, columns)
            blobs += [blob_from_proto(blob) for blob in message.blobs]
        if inline is None:
            raise InvalidFieldError("batch", "is required")
        update = _update_of(inline, blobs, head.columns)
        read = update.spool if isinstance(update, ColumnUpdate) else update.find
        stored = await asyncio.to_thread(read, trainer.batches.blobs)

        async def run() -> pb.PutColumnsResponse:
            return pb.PutColumnsResponse(
                row_count=await trainer.batches.put_columns(update, stored)
            )

        body = pb.PutColumnsRequest(batch=head.batch, columns=head.columns)
        body.blobs.extend(blob_to_proto(part.blob) for part in stored)
        return await self._requests.once(head.request_id, body, run)

    async def GetColumns(
        self, request: pb.GetColumnsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GetColumnsResponse]:
        response, size = pb.GetColumnsResponse(), 0
        batches = self._trainer.batches
        if request.by_reference:
            if request.sample_ids:
                raise InvalidFieldError("sample_ids", "have no effect with by_reference")
            found = await batches.refer_columns(request.batch, request.columns)
            yield pb.GetColumnsResponse(blobs=[blob_to_proto(blob) for blob in found])
            return
        rows = await batches.get_columns(request.batch, request.columns, request.sample_ids)
        for sample in rows:
            row = pb.RowColumns(
                sample_id=sample.sample_id,
                columns={name: column_to_proto(value) for name, value in sample.columns.items()},
            )
            if size and size + row.ByteSize() > MAX_RESPONSE_BYTES:
                yield response
                response, size = pb.GetColumnsResponse(), 0
            response.rows.append(row)
            size += row.ByteSize()
        yield response

    async def PlanBatch(
        self, request: pb.PlanBatchRequest, context: grpc.aio.ServicerContext
    ) -> pb.PlanBatchResponse:
        options, bare = plan_options_from_proto(request), bare_rows_from_proto(request)
        planned = await self._trainer.plan(request.batch, request.sample_ids, bare, options)
        return plan_to_proto(planned)

    async def ForwardBackward(
        self, request: pb.ForwardBackwardRequest, context: grpc.aio.ServicerContext
    ) -> pb.ForwardBackwardResponse:
        part = GradientsRequest(
            part_id=request.part_id,
            body=_digest_without_id(request),
            expected_step=request.expected_step,
            loss=self._loss_from_proto(request.loss),
            sample_ids=request.sample_ids,
            any_temperature=request.allow_other_temperature,
            adapter=request.adapter,
            keep_logprobs=request.keep_logprobs,
        )

        async def run() -> pb.ForwardBackwardResponse:
            scalars = await self._trainer.passes.forward_backward(request.batch, part)
            return pb.ForwardBackwardResponse(
                loss=scalars.loss,
                token_count=scalars.token_count,
                metrics=scalars.metrics,
                micro_batch_count=scalars.micro_batch_count,
                silent_row_count=scalars.silent_row_count,
                metric_weights=scalars.metric_weights,
            )

        return await self._requests.once(request.request_id, request, run)

    async def StepOptimizer(
        self, request: pb.StepOptimizerRequest, context: grpc.aio.ServicerContext
    ) -> pb.StepOptimizerResponse:
        rate = request.learning_rate if request.HasField("learning_rate") else None
        config, optim = self._trainer.config, None
        highest = config.highest_rate
        if request.HasField("adam"):
            if config.lora is None:
                raise AdaptersUnsupportedError(
                    "adam: steps of this trainer have the numbers of `optim`: set lora"
                )
            optim = optim_from_proto(
                request.adam, self._trainer.state.policy(request.adapter).optim
            )
            highest = optim.highest_rate
        if rate is not None and not 0 <= rate <= highest:
            raise InvalidFieldError("learning_rate", f"must be from 0 to {highest:g}, got {rate}")

        async def run() -> pb.StepOptimizerResponse:
            done = await self._trainer.passes.step(
                request.expected_step, request.part_ids, rate, request.adapter, optim
            )
            skipped = pb.StepOptimizerResponse.OUTCOME_SKIPPED
            applied = pb.StepOptimizerResponse.OUTCOME_APPLIED
            return pb.StepOptimizerResponse(
                step=done.step,
                outcome=skipped if done.skipped_reason else applied,
                skipped_reason=done.skipped_reason,
                grad_norm=done.grad_norm,
                learning_rate=done.learning_rate,
                skipped_count=done.skipped_count,
                consecutive_skipped_count=done.skips_in_a_row,
                duration=duration_of(done.seconds),
                metrics=done.metrics,
            )

        return await self._requests.once(request.request_id, request, run)

    async def DiscardGradients(
        self, request: pb.DiscardGradientsRequest, context: grpc.aio.ServicerContext
    ) -> pb.DiscardGradientsResponse:
        async def run() -> pb.DiscardGradientsResponse:
            part_ids = await self._trainer.passes.discard(request.adapter)
            return pb.DiscardGradientsResponse(part_ids=part_ids)

        return await self._requests.once(request.request_id, request, run)

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> operations_pb2.Operation:
        check_id(request.checkpoint_id)  # no operation fails over it later
        self._trainer.state.policy(request.adapter)
        name = f"checkpoints/{request.checkpoint_id}"

        async def run() -> pb.SaveCheckpointResponse:
            step = await self._trainer.checkpoints.save(
                request.checkpoint_id, behind=request.write_behind, adapter=request.adapter
            )
            return pb.SaveCheckpointResponse(checkpoint=name, step=step)

        metadata = pb.CheckpointMetadata(checkpoint=name, create_time=timestamp_of(time.time()))
        return self._operations.start("save", request, run, lambda: metadata)

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> operations_pb2.Operation:
        id_of(request.checkpoint)
        self._trainer.state.policy(request.adapter)
        for field in ("saved_adapter", "weights_only"):
            if getattr(request, field) and not request.adapter:
                raise InvalidFieldError(field, "is of adapters that a call began alone")

        async def run() -> pb.LoadCheckpointResponse:
            step = await self._trainer.checkpoints.load(
                request.checkpoint,
                request.adapter,
                saved_adapter=request.saved_adapter or request.adapter,
                weights_only=request.weights_only,
            )
            return pb.LoadCheckpointResponse(step=step)

        metadata = pb.CheckpointMetadata(
            checkpoint=request.checkpoint, create_time=timestamp_of(time.time())
        )
        return self._operations.start("load", request, run, lambda: metadata)

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: grpc.aio.ServicerContext
    ) -> operations_pb2.Operation:
        metadata = pb.PublishWeightsMetadata(create_time=timestamp_of(time.time()))
        targets = targets_from_proto(request)
        self._trainer.publisher.check_targets(targets)  # no operation fails over them later
        self._trainer.state.policy(request.adapter)

        allocated = asyncio.Event()

        def note(version: int) -> None:
            metadata.version = version
            allocated.set()

        async def run() -> pb.PublishWeightsResponse:
            try:
                return publication_to_proto(
                    await self._trainer.publisher.publish(
                        note, targets, request.pause_mode, request.adapter
                    )
                )
            finally:
                allocated.set()

        operation = self._operations.start("publish", request, run, lambda: metadata)
        with suppress(TimeoutError):  # the number is the caller's head start, and no more
            async with asyncio.timeout(ALLOCATION_SECONDS):
                await allocated.wait()
        is_quick = self._trainer.publisher.seconds < QUICK_SECONDS
        if allocated.is_set() and is_quick and not targets:
            await self._operations.wait(operation.name, QUICK_SECONDS)
        return self._operations.describe(operation.name)

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext
    ) -> pb.SleepResponse:
        deadline = _deadline_of(context)

        async def run() -> pb.SleepResponse:
            report = await self._trainer.sleep.sleep(deadline)
            return pb.SleepResponse(
                step=self._trainer.state.step,
                state_bytes=report.state_bytes,
                freed_bytes=report.freed_bytes,
            )

        return await self._requests.once(request.request_id, request, run)

    async def Wake(
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WakeResponse:
        deadline = _deadline_of(context)

        async def run() -> pb.WakeResponse:
            await self._trainer.sleep.wake(deadline)
            return pb.WakeResponse(step=self._trainer.state.step)

        return await self._requests.once(request.request_id, request, run)

    async def CreateAdapter(
        self, request: pb.CreateAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateAdapterResponse:
        adapters, optim = self._trainer.adapters, self._trainer.config.optim
        settings = adapters.settings(
            request.adapter,
            request.rank if request.HasField("rank") else None,
            request.alpha if request.HasField("alpha") else None,
            tuple(request.targets),
        )
        rate = request.learning_rate if request.HasField("learning_rate") else optim.learning_rate
        if not 0 < rate <= optim.highest_rate:
            raise InvalidFieldError(
                "learning_rate",
                f"must be positive and at most {optim.highest_rate:g}, got {rate}",
            )

        async def run() -> pb.CreateAdapterResponse:
            seed = request.seed if request.HasField("seed") else None
            policy = await adapters.create(request.adapter, settings, rate, seed)
            return pb.CreateAdapterResponse(adapter=describe_adapter(policy))

        return await self._requests.once(request.request_id, request, run)

    async def DeleteAdapter(
        self, request: pb.DeleteAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteAdapterResponse:
        async def run() -> pb.DeleteAdapterResponse:
            await self._trainer.adapters.delete(request.adapter)
            return pb.DeleteAdapterResponse()

        return await self._requests.once(request.request_id, request, run)

    async def Profile(
        self, request: pb.ProfileRequest, context: grpc.aio.ServicerContext
    ) -> pb.ProfileResponse:
        steps = request.step_count if request.HasField("step_count") else 1
        if not 1 <= steps <= MAX_PROFILED_STEPS:
            raise InvalidFieldError("step_count", f"must be 1 to {MAX_PROFILED_STEPS}")
        if request.name and not NAME.fullmatch(request.name):
            raise InvalidFieldError("name", f"must match {NAME.pattern}, or be empty")
        name, ranks = request.name or new_name(), list(request.ranks)

        async def run() -> pb.ProfileResponse:
            profile = await self._trainer.profiles.profile(name, ranks, steps, request.options)
            return pb.ProfileResponse(profile=profile)

        return await self._requests.once(request.request_id, request, run)

    def _loss_from_proto(self, message: loss_pb2.LossSpec) -> LossSpec:
        """Raises InvalidFieldError, also for a loss that the other head has."""
        loss, head = loss_from_proto(message), self._trainer.config.head
        self._trainer.passes.algorithms.check(loss)
        if is_shipped("loss", loss.name) and loss.name not in LOSSES[head]:
            raise InvalidFieldError(
                "loss.name", f"{loss.name} has no effect on a trainer of head {head}"
            )
        return loss

    def _need_head(self, heads: Sequence[Head], what: str) -> None:
        own = self._trainer.config.head
        if own not in heads:
            needed = " or ".join(heads)
            raise WrongHeadError(f"{what} need a trainer of head {needed}, this is {own}", head=own)


def _update_of(
    inline: ColumnUpdate, blobs: Sequence[BlobReference], columns: Mapping[str, str]
) -> ColumnUpdate | ReferencedColumns:
    """Rows that came inline, or else what lies in blobs. Raises InvalidFieldError."""
    if not blobs:
        if columns:
            raise InvalidFieldError("columns", "have no effect without blobs")
        return inline
    if not inline.empty:
        raise InvalidFieldError("blobs", "come in place of rows; leave either out")
    return ReferencedColumns(inline.batch, blobs, columns)


def _deadline_of(context: grpc.aio.ServicerContext) -> float:
    """Return until when the caller waits, by the monotonic clock."""
    remaining = context.time_remaining()
    return math.inf if remaining is None else time.monotonic() + remaining


def _digest_without_id(request: pb.ForwardBackwardRequest) -> str:
    """Digest a part, which is the same part under another request_id."""
    body = pb.ForwardBackwardRequest()
    body.CopyFrom(request)
    body.ClearField("request_id")
    return request_digest(body)


def logprobs_to_proto(column: str, scalars: PassScalars) -> pb.ComputeLogprobsResponse:
    means = scalars.metrics
    response = pb.ComputeLogprobsResponse(
        column=column, mean=means.get("logprob", 0.0), token_count=scalars.token_count
    )
    if "rollout_mismatch" in means:
        response.rollout_mismatch_mean = means["rollout_mismatch"]
        response.rollout_mismatch_max = means["rollout_mismatch_max"]
    return response


def targets_from_proto(request: pb.PublishWeightsRequest) -> list[Target]:
    """Raises InvalidFieldError for an address that is none and an engine that is named twice."""
    named: set[str] = set()
    for index, engine in enumerate(request.engines):
        check_address(engine.address, f"engines[{index}].address")
        if engine.engine_id in named:
            raise InvalidFieldError(f"engines[{index}].engine_id", "is named twice")
        named.add(engine.engine_id)
    return [Target(engine.engine_id, engine.address) for engine in request.engines]


def publication_to_proto(publication: Publication) -> pb.PublishWeightsResponse:
    record = publication.record
    return pb.PublishWeightsResponse(
        weights=sample_pb2.WeightVersion(
            version=record.version, digest=record.digest, adapter=record.line
        ),
        step=record.step,
        byte_count=publication.stored_bytes,
        full_byte_count=publication.full_bytes,
        engines=[
            pb.TransferOutcome(engine_id=engine_id, error=error and status_of(error))
            for engine_id, error in publication.outcomes.items()
        ],
        transfer=duration_of(publication.transfer_seconds),
        adapter=None if record.adapter is None else adapter_to_proto(record.adapter),
        promised=record.promised,
    )


def plan_options_from_proto(request: pb.PlanBatchRequest) -> PlanOptions:
    """Raises InvalidFieldError."""
    if request.oversize_policy not in OVERSIZE:
        raise InvalidFieldError("oversize_policy", f"{request.oversize_policy} is unknown")

    def given(name: str) -> int | None:
        return getattr(request, name) if request.HasField(name) else None  # type: ignore[arg-type]

    return PlanOptions(
        token_cap=given("max_tokens_per_micro_batch"),
        oversize=OVERSIZE[request.oversize_policy],
        micro_batch_multiple=given("micro_batch_multiple"),
        max_micro_batches=given("max_micro_batches"),
    )


def bare_rows_from_proto(request: pb.PlanBatchRequest) -> list[BareRow]:
    """Raises InvalidFieldError where rows and a batch are given, or neither."""
    if bool(request.batch) == bool(request.bare_rows):
        raise InvalidFieldError("batch", "or bare_rows must be given, not both")
    if request.bare_rows and request.sample_ids:
        raise InvalidFieldError("sample_ids", "have no effect with bare_rows; leave them out")
    return [
        BareRow(
            row.length,
            row.prompt_length,
            row.group if row.HasField("group") else None,
            tuple(row.prompt_patches),
            tuple(row.patches),
        )
        for row in request.bare_rows
    ]


def plan_to_proto(dry: DryPlan) -> pb.PlanBatchResponse:
    plan, statistics = dry.plan, dry.plan.statistics
    ids = dry.facts.sample_ids

    def named(rows: tuple[int, ...]) -> list[str]:
        return [ids[row] for row in rows if ids[row]]

    response = pb.PlanBatchResponse(
        micro_batch_count=statistics.micro_batch_count,
        dummy_count=statistics.dummy_count,
        imbalance=statistics.imbalance,
        lockstep_imbalance=statistics.lockstep_imbalance,
        fill=statistics.fill,
        leftover_rows=plan.leftover,
        leftover_sample_ids=named(plan.leftover),
    )
    for rank in plan.ranks:
        planned = response.ranks.add()
        for rows in rank:
            tokens = dry.token_count(rows)
            planned.micro_batches.add(rows=rows, sample_ids=named(rows), token_count=tokens)
            planned.token_count += tokens
        response.token_count += planned.token_count
    for row, length in sorted(plan.truncated.items()):
        response.truncated_rows.add(row=row, sample_id=ids[row], length=length)
    return response


def describe(trainer: Trainer) -> pb.Trainer:
    state, ranks = trainer.state, trainer.ranks
    described = describe_settings(trainer.config, trainer.vocabulary)
    of_now = pb.Trainer(
        state=ranks.state,
        step=state.step,
        part_ids=list(state.ledger.parts),
        layout=ranks.layout,
        ranks=[link.to_proto() for link in ranks.links],
        restart_count=ranks.restart_count,
        failure=ranks.failure,
        batches=[batch.name for batch in state.batches.all()],
        skipped_count=state.skipped_count,
        consecutive_skipped_count=state.skips_in_a_row,
        gradients_incomplete=bool(state.ledger.broken),
        checkpoint=state.checkpoint,
        asleep=state.asleep is not None,
        promised_version=trainer.publisher.promised,
        max_row_tokens=trainer.max_row_tokens,
        adapters=[describe_adapter(policy) for policy in state.adapters.values()],
    )
    described.MergeFrom(of_now)
    if state.weights is not None:
        described.weights.version = state.weights.version
        described.weights.digest = state.weights.digest
    if (profile := trainer.profiles.describe()) is not None:
        described.profile.CopyFrom(profile)
    return described


def describe_adapter(policy: PolicyState) -> pb.TrainedAdapter:
    settings = policy.settings
    assert settings is not None
    described = pb.TrainedAdapter(
        adapter=policy.adapter,
        rank=settings.rank,
        alpha=settings.rank if settings.alpha is None else settings.alpha,
        targets=sorted(settings.targets),
        learning_rate=policy.optim.learning_rate,
        step=policy.step,
        part_ids=list(policy.ledger.parts),
        checkpoint=policy.checkpoint,
        skipped_count=policy.skipped_count,
        consecutive_skipped_count=policy.skips_in_a_row,
        gradients_incomplete=bool(policy.ledger.broken),
    )
    if policy.weights is not None:
        described.weights.version = policy.weights.version
        described.weights.digest = policy.weights.digest
        described.weights.adapter = policy.adapter
    return described
