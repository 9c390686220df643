"""Checkpoints: a directory that the ranks fill, and `checkpoint.json`, written last."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from services.trainer import metrics
from services.trainer.checkpoint_files import check_path, check_size
from services.trainer.config import TrainerConfig
from services.trainer.controller.incarnation import RankIncarnation
from services.trainer.controller.publication import Publisher
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import (
    PolicyState,
    PublishedWeights,
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
from sluice import faults
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.durable import sync_path, write_new
from sluice.place import Place, StoreCacheConfig, directory_of, within
from sluice.runtime.errors import (
    AlreadyExistsError,
    InvalidFieldError,
    NotFoundError,
    ServiceError,
)
from sluice.samples.images import processor_digest
from sluice.weights.adapter import ADAPTER_CONFIG, AdapterSpec, decode_adapter_config
from sluice.weights.errors import FileDigestError, InvalidAdapterError
from sluice.weights.manifest import FileEntry, seal, unseal

logger = logging.getLogger(__name__)

PREFIX = "checkpoints/"
RECORD = "checkpoint.json"
FORMAT = 2
UNDIGESTED_FORMAT = 1  # of earlier releases
SEAL = "record_digest"
_LOST = {CheckpointDamagedError.reason, "CHECKPOINT_NOT_FOUND"}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_id(checkpoint_id: str) -> None:
    """Raises InvalidFieldError for an id that names no directory of its own."""
    if not _ID.fullmatch(checkpoint_id):
        raise InvalidFieldError("checkpoint_id", f"{checkpoint_id!r} must match {_ID.pattern}")


def id_of(name: str) -> str:
    """Return the id in `checkpoints/<id>`. Raises InvalidFieldError."""
    checkpoint_id = name.removeprefix(PREFIX)
    if checkpoint_id == name or not _ID.fullmatch(checkpoint_id):
        raise InvalidFieldError("checkpoint", f"{name!r} is not of the form {PREFIX}<id>")
    return checkpoint_id


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """What the controller itself needs of a checkpoint.

    `files` are all others of its directory; None where the release that wrote it did not say.
    `processor`: digest of how images were prepared; None for a model of text, or of such a release.
    `adapter`: the one of several that it is of; empty is the policy of the settings.
    `folder` is where files are in a bucket.
    """

    backend: str
    step: int
    skipped_count: int
    weights: PublishedWeights | None
    layout: dict[str, int]
    files: dict[str, FileEntry] | None
    processor: str | None = None
    adapter: str = ""
    folder: str = ""


class Checkpoints(ABC):
    """Where checkpoints are. Calls block, and raise OSError besides what they say."""

    @abstractmethod
    def begin(self, checkpoint_id: str) -> str:
        """Return the place that ranks fill. Raises InvalidFieldError and AlreadyExistsError."""

    @abstractmethod
    def finish(self, checkpoint_id: str, partial: str, record: CheckpointRecord) -> None:
        """Make what the ranks wrote a checkpoint, in one step; it is dropped when that fails.

        Raises AlreadyExistsError, and CheckpointDamagedError where other files are there.
        """

    @abstractmethod
    def abandon(self, partial: str) -> None:
        """Drop what nobody finishes."""

    @abstractmethod
    def location(self, name: str, record: CheckpointRecord) -> str:
        """Return the place of the files of `checkpoints/<id>`, as ranks know it."""

    @abstractmethod
    def files(self, name: str, record: CheckpointRecord) -> AbstractContextManager[Path]:
        """Have a directory with the files of `checkpoints/<id>` for the block.

        Raises CheckpointDamagedError where what comes from elsewhere is not as it was written.
        """

    @abstractmethod
    def read(self, name: str, backend: str) -> CheckpointRecord:
        """Read the record of a checkpoint. Raises InvalidFieldError, NotFoundError,
        CheckpointDamagedError, and CheckpointMismatchError for another backend's.
        """


def open_checkpoints(store: Place, cache: StoreCacheConfig, *, durable: bool) -> Checkpoints:
    """Open the checkpoints of a store; those of a bucket have the `cache` of this host."""
    place = within(store, "checkpoints")
    if (directory := directory_of(place)) is not None:
        return CheckpointStore(directory, durable=durable)
    from services.trainer.controller.bucket_checkpoints import BucketCheckpoints  # needs obstore

    return BucketCheckpoints(str(place), cache)


class CheckpointStore(Checkpoints):
    """`<root>/<id>/`: complete, or not there. Unfinished ones are `<root>/.<id>-<nonce>`."""

    def __init__(self, root: Path, *, durable: bool) -> None:
        self._root, self._durable = root, durable
        root.mkdir(parents=True, exist_ok=True)

    def begin(self, checkpoint_id: str) -> str:
        check_id(checkpoint_id)
        if (self._root / checkpoint_id).exists():
            raise AlreadyExistsError("checkpoint", PREFIX + checkpoint_id)
        partial = self._root / f".{checkpoint_id}-{secrets.token_hex(8)}"
        partial.mkdir()
        return str(partial.resolve())

    def finish(self, checkpoint_id: str, partial: str, record: CheckpointRecord) -> None:
        try:
            self._finish(checkpoint_id, Path(partial), record)
        except BaseException:
            self.abandon(partial)
            raise

    def abandon(self, partial: str) -> None:
        shutil.rmtree(partial, ignore_errors=True)

    def _finish(self, checkpoint_id: str, partial: Path, record: CheckpointRecord) -> None:
        faults.point("checkpoint.files")
        found = {
            str(path.relative_to(partial)): path.stat().st_size
            for path in partial.rglob("*")
            if path.is_file()
        }
        check_complete(str(partial), found, record)
        if self._durable:
            for path in partial.rglob("*"):
                sync_path(path)
        data = seal(document_of(record), SEAL)
        write_new(partial / RECORD, data, sync=self._durable)
        if self._durable:
            sync_path(partial)
        faults.point("checkpoint.record")
        try:
            os.rename(partial, self._root / checkpoint_id)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise AlreadyExistsError("checkpoint", PREFIX + checkpoint_id) from None
        if self._durable:
            sync_path(self._root)
        faults.point("checkpoint.renamed")

    def directory(self, name: str) -> Path:
        """Find the directory of `checkpoints/<id>`. Raises InvalidFieldError, NotFoundError, and
        CheckpointDamagedError for one without its record."""
        directory = self._root / id_of(name)
        if not directory.is_dir():
            raise NotFoundError("checkpoint", name)
        if not (directory / RECORD).is_file():
            raise CheckpointDamagedError(RECORD, f"{name}: file {RECORD!r} is missing")
        return directory

    def location(self, name: str, record: CheckpointRecord) -> str:
        return str(self.directory(name).resolve())

    def files(self, name: str, record: CheckpointRecord) -> AbstractContextManager[Path]:
        return nullcontext(self.directory(name))

    def read(self, name: str, backend: str) -> CheckpointRecord:
        directory = self.directory(name)
        record = decode_record((directory / RECORD).read_bytes(), name, backend)
        for file, entry in (record.files or {}).items():  # ranks that read them keep no state
            check_size(directory / file, file, entry)
        return record


def document_of(record: CheckpointRecord) -> dict[str, Any]:
    """A record as it is stored."""
    document = {"format": FORMAT, **asdict(record)}
    for name in ("adapter", "folder"):
        if not document[name]:  # earlier releases do not know these
            del document[name]
    return document


def check_complete(partial: str, found: Mapping[str, int], record: CheckpointRecord) -> None:
    """What the ranks say they wrote is here, and nothing else: the store is one for all.

    `found` are the sizes of files by name. Raises CheckpointDamagedError.
    """
    stated = {name: entry.size for name, entry in (record.files or {}).items()}
    if found != stated:
        different = ", ".join(sorted({name for name, _ in found.items() ^ stated.items()})[:8])
        raise CheckpointDamagedError(
            different.split(", ")[0],
            f"the ranks wrote other files than are in {partial.rpartition('/')[2]}: {different}; "
            "the store must be a directory that all of them share, or a bucket",
        )


def decode_record(data: bytes, name: str, backend: str) -> CheckpointRecord:
    """Raises CheckpointDamagedError, and CheckpointMismatchError for another backend's."""
    try:
        record = _decode_record(data, name)
    except FileDigestError as error:
        raise CheckpointDamagedError(RECORD, f"{name}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"{name}: file {RECORD!r} is malformed: {error}"
        raise CheckpointDamagedError(RECORD, detail) from None
    if record.backend != backend:
        raise CheckpointMismatchError(
            f"{name} is of backend {record.backend}, this one is {backend}: set backend to that, "
            "or start from the weights that were published, as model",
            name=name,
        )
    return record


def _decode_record(data: bytes, name: str) -> CheckpointRecord:
    document: dict[str, Any] = json.loads(data)
    if SEAL in document:
        document = unseal(data, SEAL, RECORD)
    elif document["format"] == FORMAT:
        raise ValueError("it has lost its digest")
    if document.pop("format") not in (FORMAT, UNDIGESTED_FORMAT):
        raise CheckpointMismatchError(
            f"{name} has a format that this release does not know", name=name
        )
    weights, files = document.pop("weights"), document.pop("files", None)
    return CheckpointRecord(
        weights=None if weights is None else PublishedWeights(**weights),
        files=files and {path: FileEntry(**entry) for path, entry in files.items()},
        **document,
    )


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
