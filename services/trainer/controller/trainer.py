"""The front's trainer: one policy, its batches and its ranks, one operation at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from services.trainer import metrics
from services.trainer.config import TrainerConfig
from services.trainer.controller import checkpoints, commands
from services.trainer.controller.batches import Batch
from services.trainer.controller.checkpoints import CheckpointStore
from services.trainer.controller.passes import (
    AdvantageScalars,
    GradientsRequest,
    StepScalars,
    TrainerPasses,
)
from services.trainer.controller.planning import (
    BareRow,
    DryPlan,
    Planner,
    PlanOptions,
    describe_bare,
    limits_of,
    packing_of,
)
from services.trainer.controller.publication import Publication, Publisher
from services.trainer.controller.rank_group import ExternalLauncher, LocalLauncher, RankGroup
from services.trainer.controller.rank_incarnation import RankIncarnation
from services.trainer.controller.state import PassScalars, TrainerState
from services.trainer.controller.transfer import Target
from services.trainer.controller.uploads import (
    ColumnUpdate,
    Upload,
    check_names,
    in_upload_order,
    read_batch,
    set_columns,
)
from services.trainer.rows import RowLimits, blob_errors, read_shape
from sluice.algo.spec import AdvantageSpec
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.balance.planner import GroupTooLargeError
from sluice.runtime.errors import InvalidFieldError, NotFoundError, QueueFullError, ServiceError
from sluice.runtime.waits import Waits
from sluice.runtime.wire import blob_from_proto
from sluice.samples.arrow import decode_group
from sluice.samples.blobs import BlobNotFoundError, BlobReference, BlobStore
from sluice.samples.sample import Sample
from sluice.weights.store import WeightStore

T = TypeVar("T")


class Trainer:
    """Takes work for the policy. Methods raise the errors that clients see.

    What needs the ranks runs in the order of the calls, one at a time, and goes on when its
    caller goes away.
    """

    def __init__(self, config: TrainerConfig, waits: Waits) -> None:
        self.config = config
        self.state = TrainerState()
        launcher = LocalLauncher(config) if config.ranks.launch == "local" else ExternalLauncher()
        self.ranks = RankGroup(config.ranks, launcher, waits, self._restore)
        self.blobs = BlobStore(config.store, sync=config.durable)
        self._checkpoints = CheckpointStore(config.kept / "checkpoints", durable=config.durable)
        self.limits = RowLimits.from_config(config)
        limits = limits_of(config, trainer_pb.ParallelLayout())
        self._planner = Planner(read_shape(config.model), limits)
        self._passes = TrainerPasses(config.optim, self.state, self.ranks, self._planner)
        weights = WeightStore(config.weights_location, durable=config.durable)
        self._publisher = Publisher(config, weights, self.state, self.ranks, waits)
        self._waits = waits
        self._lock = asyncio.Lock()
        self._turn = ""  # what holds the lock
        self._running: set[asyncio.Task[object]] = set()

    async def start(self, front: str) -> None:
        """Launch the ranks and wait until they are active or have failed."""
        await asyncio.to_thread(self.blobs.unpin, self.config.name)  # of a former life
        self.ranks.start(front)
        await self.ranks.wait_settled()

    async def close(self) -> None:
        await self.ranks.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._publisher.close()

    async def upload(self, batch_id: str, references: list[BlobReference], count: int) -> Batch:
        """Register the rows of blobs that exist already."""
        return await self._alone("upload", lambda: self._upload(batch_id, references, count))

    def begin_upload(self) -> Upload:
        """Where rows are gathered before they become a batch. Raises while there are no ranks."""
        assert self.ranks.generation  # before, the context ranks that share a row are not known
        return Upload(self.blobs, self.limits)

    async def delete(self, name: str) -> None:
        """Forget a batch and let go of its blobs."""
        await self._alone("delete", lambda: self._delete(name))

    async def put_columns(
        self, update: ColumnUpdate, spooled: Sequence[tuple[BlobReference, list[int]]]
    ) -> int:
        """Give the ranks columns that were spooled before; returns the rows changed."""
        return await self._alone("put columns", lambda: self._put_columns(update, spooled))

    async def get_columns(self, name: str, columns: Sequence[str]) -> Iterator[Sample]:
        """Rows in the order of the upload, with the named columns that they have."""
        check_names(columns)
        return await self._alone("get columns", lambda: self._get_columns(name, columns))

    async def compute_logprobs(self, name: str, model: int, temperature: float) -> PassScalars:
        return await self._alone(
            "compute logprobs",
            lambda: self._passes.compute_logprobs(self.state.batches.get(name), model, temperature),
        )

    async def compute_advantages(self, name: str, spec: AdvantageSpec) -> AdvantageScalars:
        return await self._alone(
            "compute advantages",
            lambda: self._passes.compute_advantages(self.state.batches.get(name), spec),
        )

    async def compute_values(self, name: str) -> PassScalars:
        return await self._alone(
            "compute values",
            lambda: self._passes.compute_values(self.state.batches.get(name)),
        )

    async def plan(
        self,
        name: str,
        sample_ids: Sequence[str],
        bare: Sequence[BareRow],
        options: PlanOptions,
    ) -> DryPlan:
        """How rows of a batch, or bare ones, would be packed; runs nothing, so needs no turn."""
        assert self.ranks.generation  # before, the degrees of the mesh are not known
        limits = options.apply(self._planner.limits)
        if bare:
            facts = describe_bare(bare)
            owners, selection = self._planner.own(facts), np.arange(len(bare))
        else:
            batch = self.state.batches.get(name)
            facts, owners, selection = batch.facts, batch.owners, batch.select(sample_ids)
        solve = self._planner.solve
        try:
            plan = await asyncio.to_thread(solve, facts, owners, selection, limits)
        except GroupTooLargeError as error:
            raise InvalidFieldError("max_micro_batches", str(error)) from None
        return DryPlan(facts, plan, self._planner.packing.shares_prompts)

    async def forward_backward(self, name: str, request: GradientsRequest) -> PassScalars:
        return await self._alone(
            "forward backward",
            lambda: self._passes.forward_backward(self.state.batches.get(name), request),
        )

    async def step(
        self, expected_step: int, part_ids: Sequence[str], rate: float | None
    ) -> StepScalars:
        return await self._alone("step", lambda: self._passes.step(expected_step, part_ids, rate))

    async def discard(self) -> list[str]:
        return await self._alone("discard", self._passes.discard)

    async def publish(
        self,
        on_allocated: Callable[[int], None],
        targets: Sequence[Target] = (),
        pause_mode: engine_pb.PauseMode = engine_pb.PAUSE_MODE_UNSPECIFIED,
    ) -> Publication:
        return await self._alone(
            "publish", lambda: self._publisher.publish(on_allocated, targets, pause_mode)
        )

    async def save_checkpoint(self, checkpoint_id: str) -> int:
        """Write everything a resumed run needs; returns the step it holds."""
        return await self._alone("save checkpoint", lambda: self._save(checkpoint_id))

    async def load_checkpoint(self, name: str) -> int:
        """Go back to a checkpoint; batches and gradients are dropped."""
        return await self._alone("load checkpoint", lambda: self._load(name))

    @property
    def layout(self) -> trainer_pb.ParallelLayout:
        links = [link for link in self.ranks.links if link.layout is not None]
        return links[0].layout if links and links[0].layout else trainer_pb.ParallelLayout()

    async def _alone(self, what: str, run: Callable[[], Awaitable[T]]) -> T:
        """Run while nothing else does, to the end even if the caller is cancelled.

        Raises QueueFullError when too many calls wait for their turn already.
        """
        limit = self.config.max_waiting_calls
        if len(self._running) >= limit:
            raise QueueFullError(f"{limit} calls wait for their turn", limit=limit, kind="calls")

        task = asyncio.ensure_future(self._in_turn(what, run))
        self._running.add(task)  # type: ignore[arg-type]
        metrics.WAITING_CALLS.set(len(self._running))
        task.add_done_callback(self._end_turn)
        return await asyncio.shield(task)

    async def _in_turn(self, what: str, run: Callable[[], Awaitable[T]]) -> T:
        with self._waits.waiting(f"turn of {what}", on=lambda: [self._turn]):
            await self._lock.acquire()
        self._turn = what
        try:
            return await run()
        finally:
            self._lock.release()

    def _end_turn(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        metrics.WAITING_CALLS.set(len(self._running))

    async def _upload(self, batch_id: str, references: list[BlobReference], count: int) -> Batch:
        generation = self.ranks.generation
        batches = self.state.batches
        batches.check_new(batch_id)
        limit = self.config.max_batches
        if len(batches.all()) >= limit:
            raise QueueFullError(
                f"{limit} batches are held: delete one", limit=limit, kind="batches"
            )
        await self._pin(references)
        try:
            batch = await asyncio.to_thread(
                read_batch, batch_id, references, self.blobs, self.limits, self._planner
            )
            if batch.row_count != count:
                raise InvalidFieldError(
                    "header.sample_count", f"is {count}, {batch.row_count} samples came"
                )
            await self._register(generation, batch)
        except BaseException:
            await self._unpin({blob.digest for blob in references} - batches.digests())
            raise
        batches.add(batch)
        metrics.BATCHES.set(len(batches.all()))
        if self.state.weights is not None:
            sampled = batch.facts.oldest_versions
            metrics.note_lags(sampled[sampled >= 0].tolist(), self.state.weights.version)
        return batch

    async def _register(self, generation: RankIncarnation, batch: Batch) -> None:
        """Give the ranks their rows. What some have is dropped again if others fail: a later
        batch of that id would have it among its rows."""
        try:
            for build in commands.add_rows(batch):
                await self.ranks.run_on(generation, build)
        except ServiceError:
            with contextlib.suppress(ServiceError):  # ranks that are lost hold nothing
                await self._drop(generation, batch)
            raise

    async def _drop(self, generation: RankIncarnation, batch: Batch) -> None:
        command = pb.FollowResponse(drop_batch=pb.DropBatch(batch_id=batch.batch_id))
        await self.ranks.run_on(generation, commands.same_for_all(command))

    async def _delete(self, name: str) -> None:
        batch = self.state.batches.get(name)
        await self._drop(self.ranks.generation, batch)
        await self._forget(batch)

    async def _forget(self, batch: Batch) -> None:
        unnamed = self.state.batches.remove(batch)
        metrics.BATCHES.set(len(self.state.batches.all()))
        await self._unpin(unnamed)

    async def _put_columns(
        self, update: ColumnUpdate, spooled: Sequence[tuple[BlobReference, list[int]]]
    ) -> int:
        if self.state.batches.get(update.batch.name) is not update.batch:
            raise NotFoundError("batch", update.batch.name)  # deleted meanwhile
        generation = self.ranks.generation
        try:
            for blob, rows in spooled:
                await self.ranks.run_on(generation, set_columns(update.batch, blob, rows))
        except ServiceError:
            await self._reset(generation, update.batch)
            raise
        return update.apply()

    async def _reset(self, generation: RankIncarnation, batch: Batch) -> None:
        """Back to the columns of the upload: some ranks have taken others, which the front does
        not know of, such as a mask that its divisors leave out. A batch that cannot is gone."""
        if generation.lost.done():
            return  # the next ranks get what was uploaded
        batch.forget_derived()
        try:
            await self._drop(generation, batch)
            await self._register(generation, batch)
        except ServiceError:
            if not generation.lost.done():
                await self._forget(batch)

    async def _get_columns(self, name: str, columns: Sequence[str]) -> Iterator[Sample]:
        generation = self.ranks.generation
        batch = self.state.batches.get(name)
        command = pb.ReadColumns(batch_id=batch.batch_id, columns=columns)
        message = commands.same_for_all(pb.FollowResponse(read_columns=command))
        results = await self.ranks.run_on(generation, message)
        blobs = [blob_from_proto(result.columns) for result in generation.reporting(results)]
        parts = [await asyncio.to_thread(self._read_columns, blob) for blob in blobs]
        return in_upload_order(batch, parts)

    def _read_columns(self, blob: BlobReference) -> list[Sample]:
        with blob_errors(blob):
            return decode_group(self.blobs.get(blob))

    async def _pin(self, references: list[BlobReference]) -> None:
        digests = [reference.digest for reference in references]
        try:
            await asyncio.to_thread(self.blobs.pin, self.config.name, digests)
        except BlobNotFoundError as error:
            raise NotFoundError("blob", error.digest) from None

    async def _unpin(self, digests: set[str]) -> None:
        if digests:
            await asyncio.to_thread(self.blobs.unpin, self.config.name, sorted(digests))

    async def _save(self, checkpoint_id: str) -> int:
        generation = self.ranks.generation
        partial = self._checkpoints.begin(checkpoint_id)
        with metrics.CHECKPOINT_SECONDS.labels("save").time():
            try:
                command = pb.SaveCommand(directory=str(partial.resolve()))
                message = commands.same_for_all(pb.FollowResponse(save=command))
                await self.ranks.run_on(generation, message)
                layout = {field.name: value for field, value in self.layout.ListFields()}
                record = checkpoints.record_state(self.state, self.config.backend, layout)
            except BaseException:
                self._checkpoints.abandon(partial)
                raise
            # Outside of the `try`: a thread that is cancelled goes on, and must not be abandoned.
            await asyncio.shield(
                asyncio.to_thread(self._checkpoints.finish, checkpoint_id, partial, record)
            )
        self.state.checkpoint = checkpoints.PREFIX + checkpoint_id
        return record.step

    async def _load(self, name: str) -> int:
        generation = self.ranks.generation
        self._checkpoints.read(name, self.config.backend)
        for batch in self.state.batches.all():
            await self._drop(generation, batch)
        await self._unpin(self.state.batches.clear())
        metrics.BATCHES.set(0)
        await self._load_into(generation, name)
        return self.state.step

    async def _load_into(self, generation: RankIncarnation, name: str) -> None:
        record = self._checkpoints.read(name, self.config.backend)
        directory = str(self._checkpoints.directory(name).resolve())
        message = pb.FollowResponse(load=pb.LoadCommand(directory=directory))
        try:
            with metrics.CHECKPOINT_SECONDS.labels("load").time():
                await self.ranks.run_on(generation, commands.same_for_all(message))
        except ServiceError as error:  # what the ranks hold now is neither old nor new
            generation.fail(error)
            raise
        checkpoints.restore_state(self.state, name, record)
        metrics.STEP.set(self.state.step)

    async def _restore(self, generation: RankIncarnation) -> None:
        """Bring fresh ranks to where the lost ones were saved last.

        What still runs for those, such as the end of a save, comes first: it changes state too.
        """
        await self._in_turn("restore", lambda: self._restore_into(generation))

    async def _restore_into(self, generation: RankIncarnation) -> None:
        self._planner.limits = limits_of(self.config, self.layout)
        self._planner.packing = packing_of(self.config, self._planner.limits.context_size)
        self.limits = replace(self.limits, max_tokens=self._planner.limits.cap)
        state = self.state
        if state.checkpoint:
            await self._load_into(generation, state.checkpoint)
        elif generation.number > 1:
            blank = checkpoints.CheckpointRecord(
                backend=self.config.backend, step=0, skipped_count=0, weights=None, layout={}
            )
            checkpoints.restore_state(state, "", blank)
        for batch in state.batches.all():
            batch.forget_derived()
            await self._register(generation, batch)
