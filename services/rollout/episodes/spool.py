"""Writes finished groups to the store; many that finish together share the waits for the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import grpc

from services.rollout import metrics
from services.rollout.episodes.journal import Journals, Progress
from sluice.runtime.errors import ServiceError
from sluice.samples.arrow import InvalidGroupError, decode_group, encode_group
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobReference, BlobStore
from sluice.samples.sample import Sample

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class StoreFailedError(ServiceError):
    """The shared store could not be written; the message is the system's."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STORE_FAILED"


@dataclass(frozen=True)
class _Entry:
    request_id: str
    group_id: str
    samples: Sequence[Sample]
    metadata: Mapping[str, str]
    done: asyncio.Future[BlobReference]


class Spool:
    """One writer at a time, in a thread; it takes whatever has come meanwhile."""

    def __init__(self, blobs: BlobStore, journals: Journals) -> None:
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

    async def open(self, request_id: str, body: str) -> Progress:
        """What an earlier run of this request left. Raises StoreFailedError."""
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
        """Samples by group; a group whose blob is gone or damaged is left out."""
        return await asyncio.to_thread(self._read, blobs)

    async def close(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            await asyncio.gather(self._writer, return_exceptions=True)

    async def _write_all(self) -> None:
        while self._entries:
            entries, self._entries = self._entries, []
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
        blobs, groups = [], dict[str, dict[str, BlobReference]]()
        for entry in entries:
            blob = self._blobs.put(encode_group(entry.samples, entry.metadata))
            groups.setdefault(entry.request_id, {})[entry.group_id] = blob
            blobs.append(blob)
        for request_id, finished in groups.items():
            self._journals.record(request_id, finished)
        return blobs

    def _read(
        self, blobs: Mapping[str, BlobReference]
    ) -> dict[str, tuple[list[Sample], BlobReference]]:
        groups = {}
        for group_id, blob in blobs.items():
            try:
                groups[group_id] = (decode_group(self._blobs.get(blob)), blob)
            except (BlobNotFoundError, BlobDigestError, InvalidGroupError) as error:
                logger.warning("group %s is run again: %s", group_id, error)
        return groups


async def _in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    try:
        return await asyncio.to_thread(function, *arguments, **named)
    except OSError as error:
        raise StoreFailedError(str(error)) from error
