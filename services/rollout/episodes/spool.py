"""Stores finished groups, and journals which groups of a rollout are finished, and where.

<store>/rollouts/<request id>.open      a rollout that may go on
<store>/rollouts/<request id>.settled   one in which every group is settled

JSON lines, each with its xxh3 after a tab: the first holds the digest of the request, each further
one a finished group and its blob, or groups that were cancelled. One that was changed counts for
nothing: its groups are sampled again. Any worker of the store can go on from it. The blobs are
pinned by `rollout/<request id>` until retention removes the journal; so are images, before the
first engine is asked about them.

Nobody locks a journal: only `open` creates one, lines are one write at its end, and a rename
takes the lines of those who write just then along. Each write begins on a new line, so that one
which a crash or a full disk cut off spoils no other; its groups are sampled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

import grpc

from services.rollout import metrics
from sluice import faults
from sluice.durable import decode_line, encode_line, naming, sync_path
from sluice.runtime.errors import ServiceError
from sluice.samples.arrow import InvalidGroupError, decode_group, encode_groups
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobReference, Blobs
from sluice.samples.sample import Sample, media_of

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TOGETHER = 256  # groups of a write, which share a file; each waits for all
TOKENS_TOGETHER = 1 << 22  # of them; some 50 MB
OPEN, SETTLED = ".open", ".settled"
OWNER = "rollout/"  # of pins; the request id follows
ABANDONED_SECONDS = 7 * 24 * 3600.0  # an unsettled rollout nobody came back for


class StoreFailedError(ServiceError):
    """The shared store could not be written; the message is the system's."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STORE_FAILED"


@dataclass
class SpoolProgress:
    """What a journal says."""

    body: str  # digest of the request
    finished: dict[str, BlobReference] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)


class Journals(ABC):
    """Keeps the journals of a store. Calls block."""

    @abstractmethod
    def open(self, request_id: str, body: str) -> SpoolProgress:
        """Returns what the journal of a rollout says; begins it if it is new."""

    @abstractmethod
    def record(self, request_id: str, groups: Mapping[str, BlobReference]) -> None:
        """Pin the blobs of finished groups and write where they are; durable when it returns.

        Raises FileNotFoundError when the rollout has been forgotten; `settle` unpins the blobs.
        """

    @abstractmethod
    def cancel(self, request_id: str, group_ids: Iterable[str]) -> None:
        """Remember that these groups are not to be run again."""

    @abstractmethod
    def settle(self, request_id: str, keep: int) -> None:
        """Close the journal of a settled rollout; forget all settled ones but the `keep` latest."""


class DirectoryJournals(Journals):
    """Keeps journals in a directory."""

    def __init__(self, store: Path, blobs: Blobs, *, sync: bool) -> None:
        self._root = store / "rollouts"
        self._root.mkdir(parents=True, exist_ok=True)
        if sync:
            sync_path(store)
        self._blobs, self._sync = blobs, sync

    def open(self, request_id: str, body: str) -> SpoolProgress:
        while (progress := self._read(request_id)) is None:  # whoever is first, its line counts
            line = {"body": body, "created": time.time()}
            self._write(self._path(request_id), [line], os.O_CREAT)
            if self._sync:
                sync_path(self._root)
            faults.point("journal.opened")
        return progress

    def record(self, request_id: str, groups: Mapping[str, BlobReference]) -> None:
        self._blobs.pin(owner_of(request_id), [blob.digest for blob in groups.values()])
        lines = [
            {"group": group_id, "blob": blob.digest, "size": blob.size}
            for group_id, blob in groups.items()
        ]
        self._append(request_id, lines)
        faults.point("journal.recorded")

    def cancel(self, request_id: str, group_ids: Iterable[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # forgotten: nobody runs any of them again
            self._append(request_id, [{"cancelled": sorted(group_ids)}])

    def settle(self, request_id: str, keep: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # another worker has settled it
            self._path(request_id).rename(self._settled_path(request_id))
            faults.point("journal.settled")
        own = self._settled_path(request_id).name  # the latest, whatever a clock says
        settled: list[tuple[bool, float, str]] = []
        abandoned: list[tuple[bool, float, str]] = []
        for entry in os.scandir(self._root):
            try:
                age = (entry.name == own, entry.stat().st_mtime, entry.name)
            except FileNotFoundError:  # settled or forgotten by another call meanwhile
                continue
            (settled if entry.name.endswith(SETTLED) else abandoned).append(age)
        oldest = time.time() - ABANDONED_SECONDS
        gone = [name for _, modified, name in abandoned if modified < oldest]
        gone += [name for *_, name in sorted(settled)[: max(0, len(settled) - keep)]]
        for name in gone:
            (self._root / name).unlink(missing_ok=True)
        self._unpin_forgotten()

    def _unpin_forgotten(self) -> None:
        """Unpin what belongs to no journal.

        The journals go first, so that no record pins behind this and is lost with its journal.
        What a crash or a late record leaves pinned, the next call finds.
        """
        owners, seen = self._blobs.owners(), set(os.listdir(self._root))
        for owner in owners:
            if not owner.startswith(OWNER):
                continue
            request_id = owner.removeprefix(OWNER)
            name = quote(request_id, safe="")
            if f"{name}{SETTLED}" in seen or f"{name}{OPEN}" in seen:
                continue
            paths = (self._path(request_id), self._settled_path(request_id))  # as it is renamed
            if not any(path.exists() for path in paths):  # nor renamed while they were listed
                self._blobs.unpin(owner)

    def _append(self, request_id: str, lines: Iterable[Mapping[str, Any]]) -> None:
        try:
            self._write(self._path(request_id), lines)
        except FileNotFoundError:  # it is only ever renamed this way round
            self._write(self._settled_path(request_id), lines)

    def _write(self, path: Path, lines: Iterable[Mapping[str, Any]], flags: int = 0) -> None:
        data = b"".join(b"\n" + encode_line(line) for line in lines)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o666)
        try:
            with naming(path):
                if os.write(file, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if self._sync:
                    os.fsync(file)
        finally:
            os.close(file)

    def _read(self, request_id: str) -> SpoolProgress | None:
        for path in (self._path(request_id), self._settled_path(request_id)):
            with contextlib.suppress(FileNotFoundError):
                if (progress := _read(path)) is not None:
                    return progress
        return None

    def _path(self, request_id: str) -> Path:
        return self._root / f"{quote(request_id, safe='')}{OPEN}"

    def _settled_path(self, request_id: str) -> Path:
        return self._root / f"{quote(request_id, safe='')}{SETTLED}"


def owner_of(request_id: str) -> str:
    """Names the owner of what a rollout pins."""
    return OWNER + request_id


def _read(path: Path) -> SpoolProgress | None:
    """Reads a journal; None for one without the line of its request."""
    progress = SpoolProgress("")
    for line in filter(None, path.read_bytes().split(b"\n")):
        try:
            add_line(progress, decode_line(line))
        except MALFORMED as error:  # cut off, or damaged
            logger.warning("%s: a line is left out: %s", path, error)
    return progress if progress.body else None


MALFORMED = (ValueError, KeyError, TypeError)


def add_line(progress: SpoolProgress, line: Mapping[str, Any]) -> None:
    """Adds what a line of a journal says; of two that differ the first counts. Raises MALFORMED."""
    if "body" in line:
        progress.body = progress.body or str(line["body"])
    elif "cancelled" in line:
        progress.cancelled.update(line["cancelled"])
    else:
        blob = BlobReference(line["blob"], line["size"])
        progress.finished.setdefault(line["group"], blob)


@dataclass(frozen=True)
class _Entry:
    request_id: str
    group_id: str
    samples: Sequence[Sample]
    metadata: Mapping[str, str]
    done: asyncio.Future[BlobReference]


class Spool:
    """Writes groups, one writer at a time in a thread; it takes whatever has come meanwhile."""

    def __init__(self, blobs: Blobs, journals: Journals) -> None:
        self._blobs, self._journals = blobs, journals
        self._entries: list[_Entry] = []
        self._writer: asyncio.Task[None] | None = None

    async def put(
        self, request_id: str, samples: Sequence[Sample], metadata: Mapping[str, str]
    ) -> BlobReference:
        """Store the samples of one group; durable and in the journal when it returns.

        Cancelling does not cut a write off, nor does it return before: whoever goes on with the
        rollout then finds the group in the journal. Raises StoreFailedError.
        """
        done: asyncio.Future[BlobReference] = asyncio.get_running_loop().create_future()
        group_id = samples[0].group_id
        self._entries.append(_Entry(request_id, group_id, samples, metadata, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all(), name="spool")
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            first: list[asyncio.Future[Any]] = [done, self._writer]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            raise

    async def open(self, request_id: str, body: str) -> SpoolProgress:
        """Returns what an earlier run of this request left. Raises StoreFailedError."""
        return await _in_thread(self._journals.open, request_id, body)

    async def cancel(self, request_id: str, group_ids: Sequence[str]) -> None:
        """Remember cancelled groups. Raises StoreFailedError."""
        await _in_thread(self._journals.cancel, request_id, group_ids)

    async def settle(self, request_id: str, keep: int) -> None:
        """Close the journal of a rollout. Raises StoreFailedError."""
        await _in_thread(self._journals.settle, request_id, keep)

    async def read(
        self, blobs: Mapping[str, BlobReference]
    ) -> dict[str, tuple[list[Sample], BlobReference]]:
        """Returns samples by group; one whose blob or image is gone or damaged is left out."""
        return await asyncio.to_thread(self._read, blobs)

    async def close(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            await asyncio.gather(self._writer, return_exceptions=True)

    async def _write_all(self) -> None:
        while self._entries:
            count = _count_together(self._entries)
            entries, self._entries = self._entries[:count], self._entries[count:]
            await self._write_batch(entries)

    async def _write_batch(self, entries: Sequence[_Entry]) -> None:
        """Settles every entry. A batch that fails is written again one by one: most are good."""
        write = _in_thread(self._write, entries)
        (written,) = await asyncio.gather(write, return_exceptions=True)
        if not isinstance(written, BaseException):
            for entry, blob in zip(entries, written, strict=True):
                metrics.SPOOLED_BYTES.inc(blob.size)
                entry.done.set_result(blob)
        elif len(entries) == 1:
            entries[0].done.set_exception(written)
        else:
            for entry in entries:
                await self._write_batch([entry])

    def _write(self, entries: Sequence[_Entry]) -> list[BlobReference]:
        """The groups share the waits for the disk: that of the blobs, and of each journal."""
        contents = encode_groups([(entry.samples, entry.metadata) for entry in entries])
        blobs = self._blobs.put_all(contents)
        groups: dict[str, dict[str, BlobReference]] = {}
        for entry, blob in zip(entries, blobs, strict=True):
            groups.setdefault(entry.request_id, {})[entry.group_id] = blob
        for request_id, finished in groups.items():
            self._journals.record(request_id, finished)
        return blobs

    def _read(
        self, blobs: Mapping[str, BlobReference]
    ) -> dict[str, tuple[list[Sample], BlobReference]]:
        groups = {}
        for group_id, blob in blobs.items():
            try:
                samples = decode_group(self._blobs.get(blob))
                for image in media_of(samples).values():
                    if not self._blobs.exists(image):
                        raise BlobNotFoundError(image.digest)
                groups[group_id] = (samples, blob)
            except (BlobNotFoundError, BlobDigestError, InvalidGroupError) as error:
                logger.warning("group %s is run again: %s", group_id, error)
        return groups


def _count_together(entries: Sequence[_Entry]) -> int:
    """How many of the first entries are written together; at least one."""
    tokens = 0
    for count, entry in enumerate(entries[:TOGETHER]):
        tokens += sum(len(sample.token_ids) for sample in entry.samples)
        if count and tokens > TOKENS_TOGETHER:
            return count
    return min(len(entries), TOGETHER)


async def _in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    try:
        return await asyncio.to_thread(function, *arguments, **named)
    except OSError as error:
        raise StoreFailedError(str(error)) from error
