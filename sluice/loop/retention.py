"""What a run leaves in the shared store, and what it removes."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sluice import faults
from sluice.config import ConfigError
from sluice.loop.config import RetentionConfig
from sluice.loop.ledger import Ledger
from sluice.loop.run_directory import (
    RUN_CHECKPOINTS,
    RunCheckpoint,
    list_run_checkpoints,
    remove_run_checkpoint,
    write_run_checkpoint,
)
from sluice.place import Place, StoreCacheConfig, directory_of, within
from sluice.samples.blob_store import open_blobs
from sluice.samples.blobs import BlobNotFoundError, BlobReference
from sluice.weights.errors import VersionNotFoundError, WeightStoreError
from sluice.weights.store import WeightStore

if TYPE_CHECKING:
    from sluice.loop.run_archive import RunArchive  # nobody else needs obstore

logger = logging.getLogger(__name__)

CHECKPOINTS, CRITICS = "checkpoints", "critics"  # where trainers keep them in the store
RECORD = "checkpoint.json"  # makes one of them whole


class Retention:
    """Pins and removals of one run, in threads. Failures of the store are logged: work goes on."""

    def __init__(
        self,
        config: RetentionConfig,
        store: Place,
        run_dir: Path,
        ledger: Ledger,
        weights: str = "",
        cache: StoreCacheConfig | None = None,
        archive: RunArchive | None = None,
    ) -> None:
        """`weights` is where versions are, if not in `store`; `archive` has run checkpoints too.

        Raises ConfigError when `store` is neither a bucket nor a directory that is there.
        """
        root = directory_of(store)
        if root is not None and not root.is_dir():
            raise ConfigError(f"store: {store} does not exist; name the store of the services")
        self._config, self._store, self._ledger = config, store, ledger
        self._archive = archive
        self._run_checkpoints = run_dir / RUN_CHECKPOINTS
        self._owner = f"run/{ledger.run_id}"
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", run_dir.name).strip("-_")[:40] or "run"
        self._prefix, self._own = f"{readable}-{ledger.run_id}-", f"-{ledger.run_id}-"
        self._blobs = open_blobs(store, cache or StoreCacheConfig())
        self._weights = WeightStore(weights or within(store, "weights"))
        self._version: int | None = None  # that engines serve
        self._kept: list[RunCheckpoint] | None = None  # run checkpoints; None until they are read
        self._expected: set[int] = set()  # named by a run checkpoint that is being written
        self._reference = 0  # the version that is the reference of the KL; 0 where none is
        self._pinned: set[str] = set()
        self._unpinned: list[str] = []
        self._holding: asyncio.Task[None] | None = None
        self._removing: asyncio.Task[None] | None = None

    def new_checkpoint_id(self, step: int) -> str:
        """A name that was never used, by which the checkpoint is known as this run's."""
        return f"{self._prefix}{step:08}-{time.time_ns():x}"

    async def adopt(self) -> None:
        """Pin the versions that run checkpoints name; those of a copy are pinned by another run.

        At each start, as the one that found the copy may have come to no more than that.
        """
        for each in self._read_kept():
            for version in {each.weight_version, each.reference_version} - {0}:
                with suppress(VersionNotFoundError):
                    await asyncio.to_thread(self._weights.pin, version, self._owner)

    async def resume(self) -> None:
        """Hold what a run needs that went back to its run checkpoint.

        Groups whose blobs are gone are to be generated again.
        """
        self._expected, self._kept = set(), None
        await self.settle()
        needed = self._ledger.needed_blobs(self._oldest_step(self._read_kept()))
        for digest in await asyncio.to_thread(self._hold_again, needed):
            for group_id in self._ledger.lose_blob(digest):
                logger.warning("blob %s of group %s is gone", digest, group_id)

    async def settle(self) -> None:
        """Wait for what is being pinned or removed."""
        tasks = [task for task in (self._holding, self._removing) if task is not None]
        if tasks:
            await asyncio.wait(tasks)  # unlike gather it leaves them be when the run is stopped
        for task in tasks:
            task.result()

    async def close(self) -> None:
        """Wait for what is under way; the pins stay for a later resume."""
        await self.settle()

    def hold(self, *digests: str) -> None:
        """Pin blobs soon; their producer holds them until then. Those that come together share."""
        self._unpinned += digests
        if self._holding is None or self._holding.done():
            self._holding = asyncio.create_task(self._hold_all(), name="hold blobs")

    async def release_blobs(self) -> None:
        """Unpin all that this run holds: it will train on none of it."""
        await self.settle()
        await asyncio.to_thread(self._blobs.unpin, self._owner)
        self._pinned.clear()

    async def has_weights(self, version: int) -> bool:
        """Whether a version is durable."""
        return await asyncio.to_thread(self._weights.has, version)

    async def hold_weights(self, version: int, *, promised: bool = False) -> bool:
        """Pin the version that engines are about to serve; False for a promise that is broken.

        Raises ConfigError if the version is not here.
        """
        try:
            await asyncio.to_thread(self._weights.pin, version, self._owner)
            return True
        except VersionNotFoundError:
            if promised:
                return False
            raise ConfigError(
                f"{self._weights.location} has no weight version {version}, which the trainer "
                "published; name the `store`, or the `weights`, of the services"
            ) from None

    async def compare_weights(self, version: int, with_version: int) -> list[str] | None:
        """Name the tensors whose values differ.

        None where they cannot be compared: other tensors, shapes or types; or one is gone.
        """
        try:
            one, other = [
                (await asyncio.to_thread(self._weights.manifest, each)).tensors
                for each in (version, with_version)
            ]
        except WeightStoreError:
            return None
        if {n: (t.dtype, t.shape) for n, t in one.items()} != {
            n: (t.dtype, t.shape) for n, t in other.items()
        }:
            return None
        return sorted(name for name, t in one.items() if t.digest != other[name].digest)

    async def release_weights(self, version: int) -> None:
        """Engines serve `version`: let go of the former, if no run checkpoint names it."""
        self._version = version
        if self._kept is None:
            self._kept = list_run_checkpoints(self._run_checkpoints)
        await self._release_older(self._kept)

    def expect(self, run_checkpoint: RunCheckpoint) -> None:
        """It is going to be recorded, or the run goes back: hold what it names until then."""
        self._expected = {run_checkpoint.weight_version, run_checkpoint.reference_version}

    def hold_reference(self, version: int) -> None:
        """The run compares with this version, which is pinned, until another one is named."""
        self._reference = version

    async def record(self, run_checkpoint: RunCheckpoint) -> None:
        """Makes this the place to resume from, and begins to remove what it supersedes.

        `settle` before the next checkpoint is saved. Cancelled on the way it is recorded, or not:
        in the bucket as here.
        """
        recording = asyncio.ensure_future(asyncio.to_thread(self._write, run_checkpoint))
        try:
            await asyncio.shield(recording)
        except asyncio.CancelledError:
            await asyncio.wait([recording])
            raise
        await self.settle()
        every = list_run_checkpoints(self._run_checkpoints)
        for superseded in every[: -self._config.cuts]:
            remove_run_checkpoint(self._run_checkpoints, superseded)
        self._kept = kept = every[-self._config.cuts :]
        needed = self._ledger.needed_blobs(self._oldest_step(kept))
        spare = self._pinned - needed
        self._pinned -= spare
        self._expected = set()
        faults.point("run_checkpoints_removed")
        try:
            await self._release_older(kept)
        except OSError as error:
            logger.warning("store: versions were not unpinned: %s", error)
        work = asyncio.to_thread(self._remove, kept, spare)
        self._removing = asyncio.create_task(work, name="remove what is not needed")

    def _write(self, run_checkpoint: RunCheckpoint) -> None:
        if self._archive is not None:
            self._archive.record(run_checkpoint, self._ledger.run_id)
        write_run_checkpoint(self._run_checkpoints, run_checkpoint)
        faults.point("run_checkpoint")

    def _remove(self, kept: Sequence[RunCheckpoint], spare: set[str]) -> None:
        checkpoints = {Path(name).name for each in kept for name in each.checkpoints}
        try:
            if self._archive is not None:
                self._archive.retain(each.step for each in kept)
            self._remove_checkpoints(checkpoints)
            if spare:
                self._blobs.unpin(self._owner, spare)
            faults.point("unpinned")
            self._blobs.collect(self._config.blob_grace_seconds)
        except OSError as error:  # LockTimeoutError too
            logger.warning("store: not all was removed: %s", error)

    def _remove_checkpoints(self, kept: Collection[str]) -> None:
        """This run's other checkpoints, and what crashes left of some."""
        root = directory_of(self._store)
        if root is None:
            self._remove_from_bucket(kept)
            return
        owners = [root, *root.glob(f"{CRITICS}/*")]
        directories = [owner / CHECKPOINTS for owner in owners]
        for path in [path for each in directories if each.is_dir() for path in each.iterdir()]:
            name = path.name.lstrip(".").removeprefix("removed-")
            if self._own not in name or path.name in kept:
                continue
            gone = path.with_name(f".removed-{name}")
            if path != gone:
                path.rename(gone)  # a checkpoint is whole, or not there
            shutil.rmtree(gone)

    def _remove_from_bucket(self, kept: Collection[str]) -> None:
        from sluice.bucket import ObjectBucket  # nobody else needs obstore

        bucket = ObjectBucket(str(self._store))
        critics = [f"{CRITICS}/{name}/{CHECKPOINTS}" for name in bucket.folders(CRITICS)]
        gone = [
            f"{folder}/{name}"
            for folder in [CHECKPOINTS, *critics]
            for name in bucket.folders(folder)
            if self._own in name and name not in kept
        ]
        if self._archive is not None:
            self._archive.verify()  # what was listed is no other loop's
        for folder in gone:
            bucket.delete([f"{folder}/{RECORD}"])  # whole, or not there
            bucket.delete(bucket.keys(folder))

    async def _release_older(self, kept: Iterable[RunCheckpoint]) -> None:
        """Unpin versions that nobody goes back to. Later ones than engines serve are on the way."""
        if self._version is not None:
            needed = {self._reference, *self._expected}
            for each in kept:
                needed |= {each.weight_version, each.reference_version}
            await asyncio.to_thread(self._unpin_weights, self._version, needed)

    def _unpin_weights(self, served: int, needed: Collection[int]) -> None:
        for version, owners in self._weights.pins().items():
            if self._owner in owners and version < served and version not in needed:
                self._weights.unpin(version, self._owner)

    async def _hold_all(self) -> None:
        while self._unpinned:
            digests, self._unpinned = self._unpinned, []
            await asyncio.to_thread(self._pin, digests)

    def _hold_again(self, needed: set[str]) -> set[str]:
        """Pin what is needed; the digests of blobs that are gone."""
        self._pinned = self._blobs.pinned(self._owner)
        gone = {digest for digest in needed if not self._blobs.exists(BlobReference(digest, 0))}
        self._pin(needed - self._pinned - gone)
        return gone

    def _pin(self, digests: Iterable[str]) -> None:
        wanted = set(digests)
        while wanted:
            try:
                self._blobs.pin(self._owner, wanted)
                self._pinned |= wanted
                return
            except BlobNotFoundError as error:  # the trainer will say so
                logger.warning("blob %s is gone before it was pinned", error.digest)
                wanted.discard(error.digest)
            except OSError as error:
                logger.warning("store: blobs were not pinned: %s", error)
                return

    def _read_kept(self) -> Sequence[RunCheckpoint]:
        return list_run_checkpoints(self._run_checkpoints)[-self._config.cuts :]

    def _oldest_step(self, kept: Sequence[RunCheckpoint]) -> int:
        """Groups that were trained on after it are needed."""
        return kept[0].step if kept and not self._config.keep_blobs else 0
