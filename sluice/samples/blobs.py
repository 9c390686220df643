"""Immutable blobs by content, with pins and a collector that never takes what is named.

<root>/blobs/<2 hex>/<digest>   content; digest = xxh3-128, 32 hex digits
<root>/blob_pins/<owner>        append-only lines "+<digest>" or "-<digest>"
<root>/blobs/tmp/               blobs in the making
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import xxhash

from sluice.durable import locked, replace_file, sync_path

DIGEST = re.compile(r"[0-9a-f]{32}")
LINE = 34  # sign, digest, newline
ABANDONED_SECONDS = 3600.0  # a put still writing after this long is taken for dead


class BlobNotFoundError(Exception):
    """No blob of this digest: never put, or collected."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        super().__init__(f"no blob {digest}")


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


class BlobStore:
    """Blobs in a shared directory; any number of processes and threads.

    `sync=False` leaves the moment of writing to the kernel: a crash of the process loses
    nothing, one of the machine may.
    """

    def __init__(self, root: Path | str, *, sync: bool = True) -> None:
        self.root = Path(root)
        self.sync = sync
        self._lock = self.root / "blobs.lock"
        self._temporary = self.root / "blobs" / "tmp"
        self._temporary.mkdir(parents=True, exist_ok=True)
        (self.root / "blob_pins").mkdir(exist_ok=True)

    def put(self, data: bytes | memoryview) -> BlobReference:
        """Store `data`; durable when it returns. Content already there is stored once."""
        reference = BlobReference(xxhash.xxh3_128_hexdigest(data), len(data))
        path = self._path(reference.digest)
        with locked(self._lock, shared=True):
            if self._is_intact(path, data):
                os.utime(path)  # young again, so that a collector leaves it alone
                return reference
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            if self.sync:
                sync_path(path.parent.parent)
        replace_file(path, data, temporary=self._temporary, sync=self.sync)
        return reference

    def get(self, reference: BlobReference) -> memoryview:
        """Content, mapped and checked; raises BlobNotFoundError or BlobDigestError."""
        try:
            with self._path(reference.digest).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except FileNotFoundError as error:
            raise BlobNotFoundError(reference.digest) from error
        actual = xxhash.xxh3_128_hexdigest(mapped)
        if actual != reference.digest:
            raise BlobDigestError(reference.digest, actual)
        return memoryview(mapped)

    def exists(self, reference: BlobReference) -> bool:
        """Whether the blob is there; without a pin it may be collected any moment."""
        return self._path(reference.digest).exists()

    def pin(self, owner: str, digests: Iterable[str]) -> None:
        """Keep blobs until `owner` unpins them; durable. Raises BlobNotFoundError, pins none."""
        digests = list(digests)
        with locked(self._lock, shared=True):
            for digest in digests:
                if not self._path(digest).exists():
                    raise BlobNotFoundError(digest)
            self._append(owner, "+", digests)

    def unpin(self, owner: str, digests: Iterable[str] | None = None) -> None:
        """Let go of `digests`, or of everything `owner` has pinned."""
        with locked(self._lock, shared=True):
            if digests is None:
                self._pin_path(owner).unlink(missing_ok=True)
                if self.sync:
                    sync_path(self.root / "blob_pins")
            else:
                self._append(owner, "-", list(digests))

    def pinned(self, owner: str) -> set[str]:
        """Digests that `owner` has pinned."""
        return _read_pins(self._pin_path(owner))

    def owners(self) -> list[str]:
        """Owners that have pinned something."""
        return sorted(unquote(path.name) for path in (self.root / "blob_pins").iterdir())

    def collect(self, grace_seconds: float, extra_live: Iterable[str] = ()) -> list[str]:
        """Remove blobs that nobody has pinned, that are not in `extra_live` and older than grace.

        The grace covers the time between a put and its pin. Returns the digests removed.
        """
        live = set(extra_live)
        removed = []
        with locked(self._lock):
            for path in (self.root / "blob_pins").iterdir():
                live |= _read_pins(path)
            for path in self._older(grace_seconds):
                if path.name not in live:
                    path.unlink()
                    removed.append(path.name)
        return removed

    def _older(self, grace_seconds: float) -> Iterator[Path]:
        oldest = time.time() - grace_seconds
        for directory in (self.root / "blobs").iterdir():
            if directory == self._temporary:
                continue
            for entry in os.scandir(directory):
                if entry.stat().st_mtime <= oldest:
                    yield Path(entry.path)

    def _append(self, owner: str, sign: str, digests: list[str]) -> None:
        for digest in digests:
            if not DIGEST.fullmatch(digest):
                raise BlobNotFoundError(digest)
        path = self._pin_path(owner)
        created = not path.exists()
        with path.open("ab", buffering=0) as file:
            file.write("".join(f"{sign}{digest}\n" for digest in digests).encode())
            if self.sync:
                os.fsync(file.fileno())
        if created and self.sync:
            sync_path(path.parent)

    def _path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise BlobNotFoundError(digest)
        return self.root / "blobs" / digest[:2] / digest

    def _pin_path(self, owner: str) -> Path:
        return self.root / "blob_pins" / quote(owner, safe="")

    def _is_intact(self, path: Path, data: bytes | memoryview) -> bool:
        try:
            return path.read_bytes() == data
        except FileNotFoundError:
            return False


def _read_pins(path: Path) -> set[str]:
    """Replay an owner's file; a torn last line was never acknowledged and counts for nothing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return set()
    live: set[str] = set()
    for start in range(0, len(data) - LINE + 1, LINE):
        line = data[start : start + LINE].decode()
        (live.add if line[0] == "+" else live.discard)(line[1:33])
    return live
