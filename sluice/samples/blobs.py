"""What a blob is, read from its file, and what keeps blobs does.

Those of a directory are in `blob_store.py`, those of a bucket in `bucket_blobs.py`.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

logger = logging.getLogger(__name__)

DIGEST = re.compile(r"[0-9a-f]{32}")
MAPPED_BYTES = 1 << 16  # a smaller content is read: its pages cost more to map than to copy
ALIGNMENT = 64  # of a content that shares its file, as Arrow has it
PACK_MARK = b"\x89sluice\n"  # ends a file of several contents; before it their table and its length
PACK_ENTRY = struct.Struct("<16sQQ")  # digest, offset, size
PACK_TAIL = struct.Struct("<Q8s")  # count, mark


class BlobNotFoundError(Exception):
    """No blob of this digest: never put, collected, or not even a digest."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        super().__init__(f"no blob {digest!r}")


class BlobDigestError(Exception):
    """The bytes of a blob are not those that were put."""

    def __init__(self, expected: str, actual: str) -> None:
        self.expected, self.actual = expected, actual
        super().__init__(f"blob {expected} has digest {actual}")


@dataclass(frozen=True)
class BlobReference:
    """Name of a blob: xxh3-128 of its content in hex, and its size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class BlobFile:
    """Where the content of a blob lies in an open file, which may hold others too."""

    descriptor: int
    offset: int
    size: int

    def read(self, start: int, size: int) -> bytes:
        """Return up to `size` bytes of the content, from `start` on."""
        size = max(0, min(size, self.size - start))
        return os.pread(self.descriptor, size, self.offset + start)

    def view(self) -> memoryview:
        """Return the content, a large one mapped; it outlives the file."""
        if self.size <= MAPPED_BYTES:
            return memoryview(self.read(0, self.size))
        whole = memoryview(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ))
        return whole[self.offset : self.offset + self.size]


@contextmanager
def open_blob(path: Path) -> Iterator[BlobFile]:
    """Open the blob that is named like `path`, unchecked. Raises BlobNotFoundError.

    A file whose table does not name it is taken for the content: that has a digest to tell.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise BlobNotFoundError(path.name) from error
    try:
        size = os.fstat(descriptor).st_size
        yield _find_in_pack(descriptor, size, path.name) or BlobFile(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _find_in_pack(descriptor: int, size: int, digest: str) -> BlobFile | None:
    for name, offset, length in _pack_entries(descriptor, size):
        if name.hex() == digest:
            return BlobFile(descriptor, offset, length)
    return None


def _pack_entries(descriptor: int, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield digest, offset and size of the contents that share a file; nothing of another file."""
    if size < PACK_TAIL.size:
        return
    count, mark = PACK_TAIL.unpack(os.pread(descriptor, PACK_TAIL.size, size - PACK_TAIL.size))
    start = size - PACK_TAIL.size - count * PACK_ENTRY.size
    if mark != PACK_MARK or start < 0:
        return
    for name, offset, length in PACK_ENTRY.iter_unpack(
        os.pread(descriptor, count * PACK_ENTRY.size, start)
    ):
        if offset + length <= start:
            yield name, offset, length


def check_content(digest: str, content: bytes | memoryview) -> None:
    """Raise BlobDigestError for content of another digest."""
    if (actual := xxhash.xxh3_128_hexdigest(content)) != digest:
        raise BlobDigestError(digest, actual)


class BlobReads:
    """Reads blobs one after the other; each file stays open until the next one is."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._stack = ExitStack()
        self._together: dict[str, BlobFile] = {}  # what the file that is open holds, by digest

    def open(self, reference: BlobReference) -> BlobFile:
        """Open a blob as `Blobs.open` does, or find it in the file of the one before it."""
        if (found := self._together.get(reference.digest)) is not None:
            return found
        self.close()
        file = self._stack.enter_context(self._blobs.open(reference))
        size = os.fstat(file.descriptor).st_size
        if file.size < size:  # it shares the file
            self._together = {
                name.hex(): BlobFile(file.descriptor, offset, length)
                for name, offset, length in _pack_entries(file.descriptor, size)
            }
        return file

    def get(self, reference: BlobReference) -> memoryview:
        """Return content as `Blobs.get` does."""
        content = self.open(reference).view()
        try:
            check_content(reference.digest, content)
        except BlobDigestError:  # it may have been stored again since, in a file of its own
            return self._blobs.get(reference)
        return content

    def close(self) -> None:
        self._together = {}
        self._stack.close()


class Blobs(ABC):
    """Immutable contents by digest; any number of processes and threads.

    A blob is safe from the collector while it is pinned and, before that, for the collector's
    grace period after its last put: put, then pin, then tell others. Calls block, and raise
    OSError besides what they say.
    """

    def put(self, data: bytes | memoryview) -> BlobReference:
        """Store `data`; durable when it returns. Content already there is young again."""
        (reference,) = self.put_all([data])
        return reference

    @abstractmethod
    def put_all(self, contents: Iterable[bytes | memoryview]) -> list[BlobReference]:
        """Store contents, as `put` does each; all are durable when it returns.

        A content is taken when the one before is dealt with. When it raises, some may be there
        and others not.
        """

    @abstractmethod
    def get(self, reference: BlobReference) -> memoryview:
        """Return content, checked, a large one mapped; raises BlobNotFoundError or BlobDigestError.

        The view stays valid even if the blob is collected meanwhile.
        """

    @abstractmethod
    def open(self, reference: BlobReference) -> AbstractContextManager[BlobFile]:
        """Open a blob, unchecked, for readers of parts with a digest of their own.

        Raises BlobNotFoundError.
        """

    @contextmanager
    def reads(self) -> Iterator[BlobReads]:
        """For many blobs in the order that they were stored in: of those that share a file only
        the first is looked for."""
        reads = BlobReads(self)
        try:
            yield reads
        finally:
            reads.close()

    @abstractmethod
    def exists(self, reference: BlobReference) -> bool:
        """Tell whether the blob is there; without a pin it may be collected any moment."""

    @abstractmethod
    def pin(self, owner: str, digests: Iterable[str]) -> None:
        """Keep blobs until `owner` unpins them; durable when it returns.

        Raises BlobNotFoundError, and then pins none of them.
        """

    @abstractmethod
    def unpin(self, owner: str, digests: Iterable[str] | None = None) -> None:
        """Let go of `digests`, or of everything `owner` has pinned."""

    @abstractmethod
    def pinned(self, owner: str) -> set[str]:
        """Return digests that `owner` has pinned."""

    @abstractmethod
    def owners(self) -> list[str]:
        """Return owners that may have pins."""

    @abstractmethod
    def collect(self, grace_seconds: float, extra_live: Iterable[str] = ()) -> list[str]:
        """Remove blobs unpinned, not in `extra_live` and last put more than the grace ago.

        The grace must exceed the time between a put and its pin, and the differences of clocks.
        Returns the digests removed.
        """
