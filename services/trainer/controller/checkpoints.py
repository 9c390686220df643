"""Checkpoints: a directory that the ranks fill, and `checkpoint.json`, written last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from services.trainer import metrics
from services.trainer.checkpoint_files import check_path
from services.trainer.config import TrainerConfig
from services.trainer.controller.checkpoint_record import (
    PREFIX,
    CheckpointRecord,
    Checkpoints,
    id_of,
)
from services.trainer.controller.checkpoint_store import open_checkpoints
from services.trainer.controller.incarnation import RankIncarnation
from services.trainer.controller.publication import Publisher
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import (
    PolicyState,
    TrainerState,
    Turns,
    Undone,
    in_turn,
)
from services.trainer.controller.uploads import TrainerBatches
from services.trainer.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    disk_errors,
)
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import ServiceError
from sluice.samples.images import processor_digest
from sluice.weights.adapter import ADAPTER_CONFIG, AdapterSpec, decode_adapter_config
from sluice.weights.errors import InvalidAdapterError
from sluice.weights.manifest import FileEntry

logger = logging.getLogger(__name__)

_LOST = {CheckpointDamagedError.reason, "CHECKPOINT_NOT_FOUND"}


def record_state(
    state: PolicyState,
    backend: str,
    layout: dict[str, int],
    files: dict[str, FileEntry],
    processor: str | None,
) -> CheckpointRecord:
    return CheckpointRecord(
        backend=backend,
        step=state.step,
        skipped_count=state.skipped_count,
        weights=state.weights,
        layout=layout,
        files=files,
        processor=processor,
        adapter=state.adapter,
    )


def restore_state(state: PolicyState, name: str, record: CheckpointRecord) -> None:
    """Take on what a checkpoint says; gradients are gone."""
    state.step = record.step
    state.skipped_count = record.skipped_count
    state.skips_in_a_row = 0
    state.weights = record.weights
    state.checkpoint = name
    state.undone = None
    state.ledger = type(state.ledger)()
    if not state.adapter:
        metrics.STEP.set(state.step)
        metrics.SKIPS_IN_A_ROW.set(0)


def files_of(results: Iterable[pb.CommandResult]) -> dict[str, FileEntry]:
    """Gather the files of a checkpoint that ranks say they wrote."""
    return {
        file.name: FileEntry(file.size_bytes, file.digest)
        for result in results
        for file in result.checkpoint_files
    }


@contextmanager
def _forgetting_lost(policy: PolicyState, name: str) -> Iterator[None]:
    """Have ranks that restart begin anew where the block finds that their checkpoint is lost."""
    try:
        yield
    except ServiceError as error:
        if policy.checkpoint == name and error.reason in _LOST:
            logger.error("ranks that restart begin anew: %s is lost: %s", name, error)
            policy.checkpoint = ""
        raise


def check_adapter_files(
    directory: Path, name: str, record: CheckpointRecord, spec: AdapterSpec
) -> None:
    """Read every byte of a checkpoint `name`, which is to be of adapters of `spec`.

    Raises CheckpointDamagedError and CheckpointMismatchError.
    """
    for file, entry in (record.files or {}).items():
        check_path(directory / file, file, entry)
    try:
        saved = decode_adapter_config((directory / ADAPTER_CONFIG).read_bytes())
        spec.check_same(f"the checkpoint {name!r}", saved)
    except FileNotFoundError:
        raise CheckpointMismatchError(
            f"the checkpoint {name!r} is of no adapters", name=name
        ) from None
    except InvalidAdapterError as error:
        raise CheckpointMismatchError(str(error), name=name) from None


class TrainerCheckpoints:
    """Saves and loads checkpoints of a trainer."""

    def __init__(
        self,
        config: TrainerConfig,
        state: TrainerState,
        ranks: RankGroup,
        batches: TrainerBatches,
        publisher: Publisher,
        turns: Turns,
    ) -> None:
        self.store: Checkpoints = open_checkpoints(
            config.store_root, config.store_cache, durable=config.durable
        )
        self.turns = turns
        self._backend, self._state = config.backend, state
        self._processor = processor_digest(Path(config.model))
        self._ranks, self._batches, self._publisher = ranks, batches, publisher
        self._writing: asyncio.Task[int] | None = None  # beside other calls

    async def save(self, checkpoint_id: str, *, behind: bool = False, adapter: str = "") -> int:
        """Write everything a resumed run needs; returns the step it holds, once it is durable.

        With `behind` the turn ends when the ranks have taken in their state, and later calls go on.
        One is so written at a time: another save waits for it.
        """
        if not behind:
            return await self._save(checkpoint_id, adapter)
        return await asyncio.shield(await self._begin(checkpoint_id, adapter))

    async def close(self) -> None:
        """Give up what is being written beside other calls."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def settle(self) -> None:
        """Wait for the end of what is being written, which the command timeout bounds."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    @in_turn
    async def _begin(self, checkpoint_id: str, adapter: str) -> asyncio.Task[int]:
        """Have the ranks take in their state; the task waits for their files and finishes."""
        self._state.check_awake()
        policy = self._state.policy(adapter)
        await self.settle()
        ranks = self._ranks.incarnation
        partial = await asyncio.to_thread(self.store.begin, checkpoint_id)
        began = time.monotonic()
        try:
            command = pb.SaveCommand(directory=partial, write_behind=True)
            message = pb.FollowResponse(save=command, adapter=adapter)
            written = await ranks.run_behind(message)
        except BaseException:
            await self._abandon(partial)
            raise
        metrics.CHECKPOINT_SECONDS.labels("stage").observe(time.monotonic() - began)
        record = record_state(policy, self._backend, self._layout(), {}, self._processor)
        durable = self._publisher.durability()
        work = self._finish_behind(policy, checkpoint_id, partial, record, written, durable, began)
        self._writing = task = asyncio.create_task(work, name=f"write {checkpoint_id}")
        return task

    async def _finish_behind(
        self,
        policy: PolicyState,
        checkpoint_id: str,
        partial: str,
        record: CheckpointRecord,
        written: Awaitable[list[pb.CommandResult]],
        durable: Callable[[], Awaitable[None]],
        began: float,
    ) -> int:
        try:
            with disk_errors():
                try:
                    record = replace(record, files=files_of(await written))
                    await durable()  # the weights that it names
                except BaseException:
                    await self._abandon(partial)
                    raise
                finish = asyncio.to_thread(self.store.finish, checkpoint_id, partial, record)
                await asyncio.shield(finish)
            metrics.CHECKPOINT_SECONDS.labels("save").observe(time.monotonic() - began)
            policy.checkpoint = PREFIX + checkpoint_id
        finally:
            self._writing = None
        return record.step

    @in_turn
    async def _save(self, checkpoint_id: str, adapter: str) -> int:
        self._state.check_awake()
        policy = self._state.policy(adapter)
        await self.settle()
        ranks = self._ranks.incarnation
        partial = await asyncio.to_thread(self.store.begin, checkpoint_id)
        with metrics.CHECKPOINT_SECONDS.labels("save").time():
            try:
                command = pb.SaveCommand(directory=partial)
                results = await ranks.run(pb.FollowResponse(save=command, adapter=adapter))
                files = files_of(results)
                record = record_state(policy, self._backend, self._layout(), files, self._processor)
                await self._publisher.durability()()
            except BaseException:
                await self._abandon(partial)
                raise
            # Outside of the `try`: a thread that is cancelled goes on, and must not be abandoned.
            await asyncio.shield(
                asyncio.to_thread(self.store.finish, checkpoint_id, partial, record)
            )
        policy.checkpoint = PREFIX + checkpoint_id
        return record.step

    @in_turn
    async def load(
        self,
        name: str,
        adapter: str = "",
        *,
        saved_adapter: str | None = None,
        weights_only: bool = False,
    ) -> int:
        """Go back to a checkpoint; batches and gradients are dropped. Returns its step.

        Those of other policies stay, whatever is wrong with a checkpoint of adapters. One that was
        saved of another adapter, or of which the weights alone are taken, begins a line of its own:
        ranks that restart do not come back to it.
        """
        saved = adapter if saved_adapter is None else saved_adapter
        self._state.check_awake()
        policy = self._state.policy(adapter)
        await self.settle()
        ranks = self._ranks.incarnation
        record = await self._read(name, saved)  # refused before anything is dropped
        if self._state.adapters:
            await self._check_ahead(policy, name, record)
        await self._publisher.forget_loss()
        await self._batches.drop_all(ranks, adapter)
        if saved == adapter and not weights_only:
            await self._load_into(ranks, policy, name)
            return policy.step
        await self._load_recorded(ranks, name, record, adapter, weights_only=weights_only)
        begun = replace(record, weights=None)
        if weights_only:
            begun = replace(begun, step=0, skipped_count=0)
        restore_state(policy, policy.checkpoint, begun)
        return policy.step

    async def _check_ahead(self, policy: PolicyState, name: str, record: CheckpointRecord) -> None:
        """Read all of a checkpoint of adapters: ranks that cannot load one lose all others too.

        Raises CheckpointDamagedError and CheckpointMismatchError.
        """
        spec = await asyncio.to_thread(self._publisher.describe_adapter, policy)

        def check() -> None:
            with self.store.files(name, record) as directory:
                check_adapter_files(directory, id_of(name), record, spec)

        with _forgetting_lost(policy, name):
            await asyncio.to_thread(check)

    async def restore(self, ranks: RankIncarnation, policy: PolicyState) -> None:
        """Bring a policy on fresh ranks to where that of the lost ones was saved last."""
        await self.settle()  # all ranks may have written a checkpoint that is not finished yet
        step = max(policy.step, policy.undone.step if policy.undone else 0)
        if policy.checkpoint:
            await self._load_into(ranks, policy, policy.checkpoint)
        elif ranks.number > 1:
            blank = CheckpointRecord(
                backend=self._backend,
                step=0,
                skipped_count=0,
                weights=None,
                layout={},
                files=None,
            )
            restore_state(policy, "", blank)
        if step > policy.step:
            policy.undone = Undone(step, self._ranks.failure)

    async def _load_into(self, ranks: RankIncarnation, policy: PolicyState, name: str) -> None:
        with _forgetting_lost(policy, name):
            record = await self._read(name, policy.adapter)
            await self._load_recorded(ranks, name, record, policy.adapter)
        restore_state(policy, name, record)

    async def _abandon(self, partial: str) -> None:
        await asyncio.shield(asyncio.to_thread(self.store.abandon, partial))

    async def _read(self, name: str, adapter: str) -> CheckpointRecord:
        """Raises CheckpointDamagedError and CheckpointMismatchError."""
        record = await asyncio.to_thread(self.store.read, name, self._backend)
        if record.adapter != adapter:
            whose, asked = (
                f"adapter {n!r}" if n else "the policy" for n in (record.adapter, adapter)
            )
            raise CheckpointMismatchError(
                f"{name} is of {whose}, not of {asked}",
                name=name,
                expected=adapter,
                actual=record.adapter,
            )
        if record.processor not in (None, self._processor):
            raise CheckpointMismatchError(
                f"{name} was trained on images of another processor: with this model's "
                "preprocessor_config.json it would see other pixels",
                name=name,
                expected=record.processor,
                actual=self._processor or "",
            )
        return record

    async def _load_recorded(
        self,
        ranks: RankIncarnation,
        name: str,
        record: CheckpointRecord,
        adapter: str,
        *,
        weights_only: bool = False,
    ) -> None:
        location = self.store.location(name, record)
        command = pb.LoadCommand(directory=location, weights_only=weights_only)
        if record.files is None:
            metrics.UNVERIFIED_CHECKPOINTS.inc()
            logger.warning("%s names no digests of its files: damage would not be found", name)
        for path, entry in (record.files or {}).items():
            command.files.add(name=path, size_bytes=entry.size, digest=entry.digest)
        if record.layout and record.layout != self._layout():
            logger.warning(
                "%s was saved by ranks laid out as %s, these are as %s: numbers will differ from "
                "those of a run that went on there",
                name,
                record.layout,
                self._layout(),
            )
        try:
            with metrics.CHECKPOINT_SECONDS.labels("load").time():
                await ranks.run(pb.FollowResponse(load=command, adapter=adapter))
        except ServiceError as error:  # what the ranks hold now is neither old nor new
            ranks.fail(error)
            raise

    def _layout(self) -> dict[str, int]:
        return {field.name: value for field, value in self._ranks.layout.ListFields()}
