"""Prepares and commits versions of weights, from the store or over a transfer group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.rollout import metrics
from services.rollout.engine.interface import Engine, EngineStatus, IncomingWeights, PauseMode
from services.rollout.engine.streaming import WeightStream
from services.rollout.engine.versions import mismatch_of
from services.rollout.errors import (
    DigestMismatchError,
    NoTransferError,
    OtherAdapterError,
    StoreUnreachableError,
    TransferFailedError,
    TransferGroupNotJoinedError,
    UnfitWeightsError,
    VersionNotPreparedError,
    WeightsPromisedError,
)
from sluice import faults
from sluice.runtime.errors import NotFoundError, ServiceError
from sluice.weights.errors import TransferBrokenError, VersionNotFoundError, WeightStoreError
from sluice.weights.host_cache import CachedVersion, HostCache
from sluice.weights.store import StoredVersion, WeightStore
from sluice.weights.transfer.plan import Membership, plan_buckets

GRACE_SECONDS = 3.0  # beyond the deadline of a transfer, for the engine to notice it itself


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How a version comes: over which group, and which files of its manifest each sender owns."""

    group: str
    files: Sequence[Sequence[str]]
    bucket_bytes: int
    seconds: float
    mode: PauseMode = PauseMode.IN_PLACE


class EngineTransfers:
    """Keeps the transfer group that an engine is in: one at a time, none after a failure."""

    def __init__(self, engine: Engine, store: WeightStore) -> None:
        self._engine, self._store = engine, store
        self._joining = asyncio.Lock()
        self._senders = 0
        self.group = ""

    async def join(self, group: str, members: Sequence[Membership], seconds: float) -> None:
        """Joins `group` and leaves the one before; free for the group it is in.

        Raises NoTransferError or TransferFailedError.
        """
        _check_takes_part(self._engine.status())
        async with self._joining:
            if group == self.group:
                return
            self.group = ""
            try:
                async with asyncio.timeout(seconds + GRACE_SECONDS):
                    await self._engine.join_transfer(members, seconds)
            except (TransferBrokenError, TimeoutError) as error:
                raise _broken(group, error) from error
            self.group, self._senders = group, len(members)

    async def receive(self, version: int, transfer: Transfer) -> None:
        """Has the engine take a version. Raises typed errors; the group is then left."""
        group = transfer.group
        began = time.monotonic()
        try:
            async with asyncio.timeout(transfer.seconds + GRACE_SECONDS):
                manifest = await asyncio.to_thread(self._store.expected, version)
                self._check(transfer)  # nothing else runs from here until the engine receives
                buckets = [
                    plan_buckets(manifest, files, transfer.bucket_bytes) for files in transfer.files
                ]
                await self._engine.receive(
                    IncomingWeights(
                        manifest=manifest,
                        buckets=buckets,
                        seconds=transfer.seconds,
                        mode=transfer.mode,
                    )
                )
        except (WeightStoreError, TimeoutError) as error:
            await self.leave(group)
            raise typed_error(version, error) from error
        except ServiceError:
            await self.leave(group)
            raise
        metrics.TRANSFER_SECONDS.observe(time.monotonic() - began)
        metrics.TRANSFERRED_BYTES.inc(sum(bucket.size for sent in buckets for bucket in sent))

    def _check(self, transfer: Transfer) -> None:
        group = transfer.group
        if not group or group != self.group:
            raise TransferGroupNotJoinedError(
                f"in transfer group {self.group or 'none'!r}, not {group!r}", joined=self.group
            )
        if len(transfer.files) != self._senders:
            raise TransferFailedError(
                f"{len(transfer.files)} senders for the {self._senders} that were joined"
            )

    async def leave(self, group: str) -> None:
        """Leaves `group`, if that is the one it is in: its members wait for this one no longer."""
        if group and self.group == group:
            self.group = ""
            await self._engine.leave_transfer()


def is_held(status: EngineStatus, version: int, digest: str) -> bool:
    """Whether it is a version of an adapter of several, which serves those that name it already."""
    held = [(weights.version, weights.digest) for weights in status.adapters]
    return version in status.lines and (version, digest) in held


def typed_error(version: int, error: WeightStoreError | OSError) -> ServiceError:
    """Returns the typed error for weights that cannot be read or received."""
    match error:
        case WeightStoreError() if (mismatch := mismatch_of(error)) is not None:
            return mismatch
        case TransferBrokenError():
            return _broken(error.group, error)
        case TimeoutError():
            return TransferFailedError(f"version {version} did not come in time")
        case _:
            return UnfitWeightsError(f"version {version} cannot be had: {error}", version=version)


def _check_takes_part(status: EngineStatus) -> None:
    """Raises NoTransferError. A server that is started by its first version has no ranks before."""
    if status.transfer_ranks:
        return
    if status.version is None:
        raise NoTransferError("this engine has no weights yet: it reads its first from the store")
    raise NoTransferError("this engine reads weights from the store only")


def _broken(group: str, error: Exception) -> TransferFailedError:
    return TransferFailedError(str(error) or f"the members of {group!r} did not meet in time")


T = TypeVar("T")


class EngineWeights:
    """Prepares and commits versions of the store.

    A version is pinned in the store, under `owner`, from before it is read until it neither
    serves nor is ready; so is its directory on this host, if it needs one besides the store's.
    `on_commit` is awaited before a commit is answered.
    """

    def __init__(
        self,
        engine: Engine,
        store: WeightStore,
        owner: str,
        on_commit: Callable[[], Awaitable[None]],
        *,
        cache: HostCache,
        in_place: bool = True,
    ) -> None:
        """`in_place`: whole versions are read where the store has them, without a copy."""
        self._engine, self._store, self._owner = engine, store, owner
        self._on_commit = on_commit
        self._cache, self._in_place = cache, in_place
        self._cached: dict[int, CachedVersion] = {}
        self._ready: dict[int, str] = {}  # digests of what was prepared
        self.transfers = EngineTransfers(engine, store)
        self._stream = WeightStream(engine, store, cache, in_place=in_place)
        self._preparations: dict[tuple[int, str], asyncio.Task[float]] = {}
        self._groups: dict[tuple[int, str], str] = {}  # that these come over; empty: the store
        self._committing = asyncio.Lock()
        self._pinned: set[int] | None = None  # versions; unknown before the first
        # Of one thread: what unpins all but some comes after the pins it knows of, and before
        # those that it does not list.
        self._pinning = ThreadPoolExecutor(1, "weight-pins")

    async def prepare(
        self, version: int, digest: str, transfer: Transfer | None = None, line: str = ""
    ) -> float:
        """Makes a version ready and returns the seconds; the same call again joins it or is free.

        It comes over `transfer` if that is given, else from the store. The preparation goes on
        when the caller goes away. `line` is the adapter that the caller takes it for, if that is
        one of several. Raises OtherAdapterError, NotFoundError, DigestMismatchError,
        TransferFailedError, TransferGroupNotJoinedError, WeightsPromisedError for a version that
        the store does not hold yet, and what the engine raises.
        """
        try:
            await self._check_line(version, line)
        except ServiceError:
            if transfer is not None:  # before a byte has come: nobody should wait for this one
                await self.transfers.leave(transfer.group)
            raise
        status = self._engine.status()
        if (status.version, status.digest) == (version, digest):
            return 0.0
        if is_held(status, version, digest):
            return 0.0
        if version in status.prepared_versions and self._ready.get(version) == digest:
            return 0.0
        key = (version, digest)
        if transfer is not None and self._groups.get(key, transfer.group) != transfer.group:
            await asyncio.wait([self._preparations[key]])  # of a group that was left since
        task = self._preparations.get(key)
        if task is None or task.done():
            work = self._prepare(version, digest, transfer)
            task = self._preparations[key] = asyncio.ensure_future(work)
            self._groups[key] = "" if transfer is None else transfer.group
            task.add_done_callback(partial(self._forget, key))
        return await asyncio.shield(task)

    async def stage(self, version: int, seconds: float) -> tuple[int, int]:
        """Reads files of a version in the making until it is committed; how many, and bytes.

        Nothing of it stays when this fails or is cancelled. Raises DigestMismatchError naming
        the tensor, UnfitWeightsError or TimeoutError.
        """
        status = self._engine.status()
        if version == status.version or version in status.prepared_versions:
            return 0, 0
        files, size = await self._stream.follow(version, seconds)
        metrics.STAGED_BYTES.inc(size)
        return files, size

    async def check_transfer(self, version: int, digest: str) -> None:
        """Raises what keeps this engine from receiving a version over a group.

        That is NoTransferError, NotFoundError, DigestMismatchError, UnfitWeightsError or
        StoreUnreachableError.
        """
        _check_takes_part(self._engine.status())
        await self._check_digest(version, digest)
        try:
            manifest = await asyncio.to_thread(self._store.expected, version)
        except WeightStoreError as error:
            raise typed_error(version, error) from error
        self._engine.check_incoming(manifest)

    def _forget(self, key: tuple[int, str], task: asyncio.Task[float]) -> None:
        if self._preparations.get(key) is task:
            del self._preparations[key], self._groups[key]

    async def commit(self, version: int, digest: str, mode: PauseMode, line: str = "") -> float:
        """Swaps a version in; returns the seconds without decoding, 0 when it serves already.

        `line` as for `prepare`.
        """
        await self._check_line(version, line)
        async with self._committing:
            status = self._engine.status()
            if (status.version, status.digest) == (version, digest):
                return 0.0
            if is_held(status, version, digest):
                return 0.0
            if version not in status.prepared_versions:
                raise VersionNotPreparedError(
                    f"version {version} is not prepared",
                    version=version,
                    prepared=list(status.prepared_versions),
                )
            if self._ready.get(version) != digest:  # else it was compared before it was read
                await self._check_digest(version, digest)
            pause = await self._engine.commit(version, mode)
            metrics.PAUSE_SECONDS.observe(pause)
            faults.point("engine.swapped")
            await self._unpin_unused()
            await self._on_commit()
            return pause

    async def announce(self) -> None:
        """Reports that the serving weights have changed or are gone."""
        await self._on_commit()

    async def close(self) -> None:
        """Stops preparing and releases all pins."""
        running = list(self._preparations.values())
        for task in running:
            task.cancel()
        self._cache.close()  # or a thread of theirs waits on, and the process with it
        await asyncio.gather(*running, return_exceptions=True)
        await self._stream.drop()
        self._release_all_but(frozenset())
        await self._in_order(self._unpin_all_but, frozenset())
        self._pinning.shutdown(wait=False)

    async def forget_old_pins(self) -> None:
        """Unpins what an earlier process of this name has pinned."""
        await self._unpin_unused()

    async def _prepare(self, version: int, digest: str, transfer: Transfer | None) -> float:
        start = time.monotonic()
        try:
            try:
                record = await self._check_digest(version, digest, pin=True)
            except ServiceError:
                if transfer is not None:  # before a byte has come: nobody should wait for this one
                    await self.transfers.leave(transfer.group)
                raise
            if transfer is not None:
                await self.transfers.receive(version, transfer)
                if self._engine.status().version == version:  # it cannot hold two
                    await self._on_commit()
            elif record.promised:
                raise WeightsPromisedError(
                    f"version {version} is still being written: ask again", version=version
                )
            else:
                await self._stream.settle(version)
                await self._prepare_from_store(record)
            self._ready[version] = digest
            faults.point("engine.prepared")
        except DigestMismatchError:
            metrics.DIGEST_FAILURES.inc()
            raise
        finally:
            await self._unpin_unused(besides=(version, digest))
        seconds = time.monotonic() - start
        metrics.PREPARE_SECONDS.observe(seconds)
        return seconds

    async def _prepare_from_store(self, record: StoredVersion) -> None:
        if record.directory is not None and record.base is None and self._in_place:
            await self._engine.prepare(record.version, record.digest, record.directory)
            return
        directory = await self._on_host(record)
        try:
            await self._engine.prepare(record.version, record.digest, directory)
        except (DigestMismatchError, UnfitWeightsError):
            # Perhaps the disk of this host, or a crash of it: the store was checked on the way.
            self._cached.pop(record.version).release()
            await asyncio.to_thread(self._cache.discard, record.version)
            directory = await self._on_host(record)
            await self._engine.prepare(record.version, record.digest, directory)

    async def _on_host(self, record: StoredVersion) -> Path:
        """Returns its directory in the host cache, kept as long as the engine needs it."""
        if record.version not in self._cached:
            began = time.monotonic()
            try:
                cached = await asyncio.to_thread(self._cache.take, record.version)
            except (WeightStoreError, OSError) as error:
                raise typed_error(record.version, error) from error
            self._cached[record.version] = cached
            metrics.FETCH_SECONDS.observe(time.monotonic() - began)
        return self._cached[record.version].directory

    async def _check_line(self, version: int, line: str) -> None:
        """Raises OtherAdapterError where a version is of another adapter than `line`, if any."""
        if not line:
            return
        found = self._engine.status().lines.get(version)
        if found is None:
            found = (await self._in_order(self._open, version, False)).line
        if found != line:
            whose = f"adapter {found!r}" if found else "no adapter of several"
            raise OtherAdapterError(
                f"version {version} is of {whose}, not of {line!r}", version=version, adapter=found
            )

    async def _check_digest(self, version: int, digest: str, *, pin: bool = False) -> StoredVersion:
        """Returns the version, committed or promised, once its manifest has the digest."""
        record = await self._in_order(self._open, version, pin)
        if record.digest != digest:
            raise DigestMismatchError(
                f"version {version} has digest {record.digest}, not {digest}",
                version=version,
                expected=digest,
                actual=record.digest,
            )
        return record

    def _open(self, version: int, pin: bool) -> StoredVersion:
        try:
            if pin:
                self._own_pins().add(version)  # also where the pin fails, and may be there
                self._store.pin(version, self._owner)
            return self._store.find(version)
        except VersionNotFoundError:
            raise NotFoundError("weight version", str(version), self._store.location) from None
        except WeightStoreError as error:
            raise typed_error(version, error) from error
        except OSError as error:
            raise StoreUnreachableError(f"weight store: {error}") from None

    async def _unpin_unused(self, besides: tuple[int, str] | None = None) -> None:
        """Unpins what the engine does not need; `besides` is a preparation that ends here."""
        status = self._engine.status()
        used = {version for version, _ in self._preparations.keys() - {besides}}
        used |= {status.version or 0, status.restorable_version or 0, *status.prepared_versions}
        used |= {weights.version for weights in status.adapters}
        self._release_all_but(frozenset(used))
        # What is pinned just now and not used is looked for again as its preparation ends.
        if self._pinned is None or self._pinned - used:
            await self._in_order(self._unpin_all_but, frozenset(used))

    async def _in_order(self, call: Callable[..., T], *arguments: object) -> T:
        """Calls off the event loop, after all that was called before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pinning, call, *arguments)

    def _release_all_but(self, used: frozenset[int]) -> None:
        for version in self._cached.keys() - used:
            self._cached.pop(version).release()
        for version in self._ready.keys() - used:
            del self._ready[version]

    def _unpin_all_but(self, used: frozenset[int]) -> None:
        pinned = self._own_pins()
        for version in pinned - used:
            self._store.unpin(version, self._owner)
            pinned.remove(version)

    def _own_pins(self) -> set[int]:
        """The versions that this engine has pinned: what was left of it is looked for once, not at
        every commit of every engine among the pins of all of them."""
        if self._pinned is None:
            pins = self._store.pins()
            self._pinned = {version for version, owners in pins.items() if self._owner in owners}
        return self._pinned
