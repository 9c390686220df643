"""Blobs in a directory that all processes share, and who names which of them.

The names of an owner are one append-only file, cheap to write, replayed to read.

A line is "+<digest>" or "-<digest>" and a newline: 34 bytes, so that a line torn by a crash is
known by the length of the file. The first line, "=<32 random hex digits>", names the file's
life: inode numbers are used again too soon to tell a new file from an old one. A pin is a set
member, not a count: one unpin undoes any number of pins. Callers hold the lock of the store:
shared to append, exclusive to drop or compact, so that no file vanishes under an append.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from urllib.parse import quote, unquote

import xxhash

from sluice import faults
from sluice.durable import (
    DirectoryError,
    locked,
    naming,
    replace_file,
    sync_path,
    temporary_path,
    write_all,
)
from sluice.place import Place, StoreCacheConfig, directory_of
from sluice.samples.blobs import (
    ALIGNMENT,
    DIGEST,
    PACK_ENTRY,
    PACK_MARK,
    PACK_TAIL,
    BlobFile,
    BlobNotFoundError,
    BlobReference,
    Blobs,
    check_content,
    open_blob,
)

logger = logging.getLogger(__name__)

PIN = re.compile(rb"[+-][0-9a-f]{32}\n")
LINE = 34
COMPACT_LINES = 4096  # shorter files are not worth a rewrite


def pin_path(directory: Path, owner: str) -> Path:
    """Return the file of an owner; any text is a name, except the empty one."""
    if not owner:
        raise ValueError("a pin needs an owner")
    return directory / ("owner." + quote(owner, safe=""))


def owner_of(path: Path) -> str:
    """Return the owner whose file `path` is."""
    return unquote(path.name.removeprefix("owner."))


def pin_files(directory: Path) -> list[Path]:
    """Return the files of all owners."""
    return sorted(directory.glob("owner.*"))


def append(path: Path, sign: str, digests: Iterable[str], *, sync: bool) -> None:
    """Append lines of one sign, whole and durable, behind whatever a crash left."""
    lines = "".join(f"{sign}{digest}\n" for digest in digests).encode()
    created = not path.exists()
    with naming(path), locked(path), path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        end = size - size % LINE
        if end != size:
            file.truncate(end)
            file.seek(end)
        if end == 0:
            lines = _birth_line() + lines
        view = memoryview(lines)
        while view:
            view = view[file.write(view) :]
        if sync:
            os.fsync(file.fileno())
    if created and sync:
        sync_path(path.parent)


def _birth_line() -> bytes:
    return f"={secrets.token_hex(16)}\n".encode()


@dataclass
class Replay:
    """The pins of one owner up to an offset of its file."""

    birth: bytes = b""
    offset: int = 0
    live: set[str] = field(default_factory=set)

    def refresh(self, path: Path) -> None:
        """Read what was appended since; everything, if it is another file than before."""
        try:
            with path.open("rb") as file:
                birth = file.read(LINE)
                if birth != self.birth or len(birth) < LINE:
                    self.birth, self.offset, self.live = birth, len(birth), set()
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            self.birth, self.offset, self.live = b"", 0, set()
            return
        whole = len(data) - len(data) % LINE
        for line in (data[start : start + LINE] for start in range(0, whole, LINE)):
            if PIN.fullmatch(line) is None:
                logger.warning("%s: a damaged line is left out: %r", path, line)
                continue
            digest = line[1:-1].decode("ascii")
            (self.live.add if line[:1] == b"+" else self.live.discard)(digest)
        self.offset += whole


class PinBoard:
    """The pins of all owners, kept current by reading only what was appended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._replays: dict[Path, Replay] = {}

    def refresh(self) -> None:
        """Catch up with the files."""
        paths = pin_files(self._directory)
        self._replays = {path: self._replays.get(path) or Replay() for path in paths}
        for path, replay in self._replays.items():
            replay.refresh(path)

    def names(self, digest: str) -> bool:
        """Tell whether any owner had pinned `digest` at the last refresh."""
        return any(digest in replay.live for replay in self._replays.values())

    def compact(self, temporary: Path, *, sync: bool) -> None:
        """Rewrite files that are mostly history; needs the exclusive lock and a fresh board."""
        for path, replay in self._replays.items():
            lines = replay.offset // LINE
            if lines > COMPACT_LINES and len(replay.live) < lines // 2:
                text = "".join(f"+{digest}\n" for digest in sorted(replay.live))
                data = _birth_line() + text.encode()
                replace_file(path, data, temporary=temporary, sync=sync)


ABANDONED_SECONDS = 3600.0  # a file in the making untouched for so long has lost its writer
UNLINKS_PER_LOCK = 64  # bounds how long the collector holds up others
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}  # of a file system


class _Draft:
    """Contents in the making: a file that nobody else looks at until it has their names.

    Several lie in it one after the other, with a table behind them, and each name is a link to
    it: they share the file and the wait for it, and the file is gone with the last of them.
    """

    def __init__(self, blobs: Path, directory: Path) -> None:
        self._blobs, self._directory = blobs, directory
        self._source = temporary_path(directory, "put")
        self._file = FileIO(self._source, "xb")
        self._parts: dict[str, tuple[int, int]] = {}  # offset and size, by digest
        self._end = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._parts

    def __len__(self) -> int:
        return len(self._parts)

    def write(self, digest: str, data: bytes | memoryview) -> None:
        """Add a content."""
        with naming(self._source):
            if padding := -self._end % ALIGNMENT:
                write_all(self._file, bytes(padding))
            write_all(self._file, data)
        size = memoryview(data).nbytes
        self._parts[digest] = (self._end + padding, size)
        self._end += padding + size

    def finish(self, *, sync: bool) -> None:
        """End the file; `sync` waits for the disk."""
        with naming(self._source):
            if len(self._parts) > 1:
                entries = (
                    PACK_ENTRY.pack(bytes.fromhex(digest), *part)
                    for digest, part in self._parts.items()
                )
                write_all(
                    self._file, b"".join(entries) + PACK_TAIL.pack(len(self._parts), PACK_MARK)
                )
            if sync:
                os.fsync(self._file.fileno())
            self._file.close()  # only now: a file that is closed may lose an error of the disk

    def name(self, *, sync: bool) -> None:
        """Give it the names of its blobs, as young as then; done again it does nothing else."""
        os.utime(self._source)
        for digest, (offset, size) in self._parts.items():
            path = f"{self._blobs}/{digest}"
            try:
                self._link(path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with self._source.open("rb") as file:
                    data = os.pread(file.fileno(), size, offset)
                replace_file(Path(path), data, temporary=self._directory, sync=sync)

    def _link(self, path: str) -> None:
        try:
            os.link(self._source, path)
        except FileExistsError:  # another was faster, or it is damaged
            again = temporary_path(self._directory, "put")
            os.link(self._source, again)
            again.replace(path)
            again.unlink(missing_ok=True)  # two links to one file are not replaced

    def discard(self) -> None:
        """Leave nothing but the names it was given."""
        with suppress(OSError):  # what it was to hold is given up
            self._file.close()
        self._source.unlink(missing_ok=True)


def read_blob(
    store: Place, reference: BlobReference, cache: StoreCacheConfig | None = None
) -> memoryview:
    """Return content of a store, checked; nothing is made or changed there.

    The view stays valid even if the blob is collected meanwhile. Raises BlobNotFoundError or
    BlobDigestError.
    """
    digest, root = reference.digest, directory_of(store)
    if root is None:
        return _bucket_blobs(str(store), cache or StoreCacheConfig()).get(reference)
    if not DIGEST.fullmatch(digest):
        raise BlobNotFoundError(digest)
    return _read_checked(_find(root / "blobs", digest))


def has_blob(store: Place, reference: BlobReference, cache: StoreCacheConfig | None = None) -> bool:
    """Whether a store has a blob; nothing is made or changed there, and no content read."""
    digest, root = reference.digest, directory_of(store)
    if root is None:
        return _bucket_blobs(str(store), cache or StoreCacheConfig()).exists(reference)
    return bool(DIGEST.fullmatch(digest)) and _find(root / "blobs", digest).is_file()


def _find(blobs: Path | str, digest: str) -> Path:
    """Return where a blob is, or would be."""
    return _look(blobs, digest) or Path(f"{blobs}/{digest}")


def _look(blobs: Path | str, digest: str) -> Path | None:
    """Return where a blob is; earlier releases spread them over folders. None: it is nowhere."""
    for path in (f"{blobs}/{digest}", f"{blobs}/{digest[:2]}/{digest}"):
        if os.path.lexists(path):  # a Path costs more than a look at what is there
            return Path(path)
    return None


def _read_checked(path: Path) -> memoryview:
    """Raises BlobNotFoundError or BlobDigestError."""
    with open_blob(path) as file:
        content = file.view()
    check_content(path.name, content)
    return content


def open_blobs(place: Place, cache: StoreCacheConfig, *, sync: bool = True) -> Blobs:
    """Open the blobs of a store. Raises DirectoryError or ValueError where that cannot be."""
    if (directory := directory_of(place)) is not None:
        return BlobStore(directory, sync=sync)
    return _bucket_blobs(str(place), cache)


@functools.lru_cache(maxsize=8)
def _bucket_blobs(url: str, cache: StoreCacheConfig) -> Blobs:
    from sluice.samples.bucket_blobs import BucketBlobs  # nobody else needs obstore

    return BucketBlobs(url, cache)


class BlobStore(Blobs):
    """Blobs in a shared directory.

    With `sync=False` the kernel chooses when to write: a crash of the process loses nothing, one
    of the machine may.
    """

    def __init__(self, root: Path | str, *, sync: bool = True) -> None:
        """Make the folders of the store. Raises DirectoryError where they cannot be made."""
        self.root = Path(root)
        self.sync = sync
        self._lock = self.root / "blobs.lock"
        self._blobs = self.root / "blobs"
        self._temporary = self._blobs / "tmp"
        self._pins = self.root / "blob_pins"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._make_folders()
        except OSError as error:
            where = error.filename or self.root
            raise DirectoryError(f"store: {where}: {error.strerror}") from None

    def put_all(self, contents: Iterable[bytes | memoryview]) -> list[BlobReference]:
        """They share a file and a folder, and so the waits for both, and the lock. Content already
        there is not written again. Errors name what cannot be written: the store where that
        itself is gone."""
        references, draft = list[BlobReference](), None
        try:
            for data in contents:
                reference = BlobReference(xxhash.xxh3_128_hexdigest(data), memoryview(data).nbytes)
                references.append(reference)
                is_new = draft is None or reference.digest not in draft
                if is_new and not self._renew(reference.digest, data):
                    draft = draft or self._draft()
                    draft.write(reference.digest, data)
            if draft is None:
                return references
            draft.finish(sync=self.sync)
            for _ in range(len(draft)):
                faults.point("blob.written")
            self._name(draft)
        finally:
            if draft is not None:
                draft.discard()
        self._sync(self._blobs)
        for _ in range(len(draft)):
            faults.point("blob.stored")
        return references

    def get(self, reference: BlobReference) -> memoryview:
        return _read_checked(self._path(reference.digest))

    def open(self, reference: BlobReference) -> AbstractContextManager[BlobFile]:
        return open_blob(self._path(reference.digest))

    def exists(self, reference: BlobReference) -> bool:
        return self._path(reference.digest).exists()

    def pin(self, owner: str, digests: Iterable[str]) -> None:
        digests, blobs = list(digests), str(self._blobs)
        with locked(self._lock, shared=True):
            self._pins.mkdir(exist_ok=True)
            for digest in digests:
                _check_digest(digest)
                # most lie here, and a Path costs more than a look at what is there
                if not os.path.exists(f"{blobs}/{digest}") and not self._path(digest).exists():
                    raise BlobNotFoundError(digest)
            append(pin_path(self._pins, owner), "+", digests, sync=self.sync)
        faults.point("blob.pinned")

    def unpin(self, owner: str, digests: Iterable[str] | None = None) -> None:
        path = pin_path(self._pins, owner)
        if digests is None:
            with locked(self._lock):  # nobody may be appending to the file
                path.unlink(missing_ok=True)
                self._sync(self._pins)
            return
        digests = list(digests)
        for digest in digests:
            _check_digest(digest)  # a malformed line would shift all behind it
        with locked(self._lock, shared=True):
            append(path, "-", digests, sync=self.sync)

    def pinned(self, owner: str) -> set[str]:
        replay = Replay()
        replay.refresh(pin_path(self._pins, owner))
        return replay.live

    def owners(self) -> list[str]:
        return [owner_of(path) for path in pin_files(self._pins)]

    def collect(self, grace_seconds: float, extra_live: Iterable[str] = ()) -> list[str]:
        """Others wait only while some files are unlinked, never for the whole scan."""
        extra, removed = set(extra_live), list[str]()
        board = PinBoard(self._pins)
        with locked(self.root / "collect.lock"):
            with locked(self._lock):
                board.refresh()
                board.compact(self._temporary, sync=self.sync)
            board.refresh()
            oldest = time.time() - grace_seconds
            found = [path for path in self._older(oldest) if path.name not in extra]
            candidates = [path for path in found if not board.names(path.name)]
            for first in range(0, len(candidates), UNLINKS_PER_LOCK):
                with locked(self._lock):
                    board.refresh()
                    for path in candidates[first : first + UNLINKS_PER_LOCK]:
                        if not board.names(path.name) and _modified(path) <= oldest:
                            path.unlink()
                            removed.append(path.name)
            self._sweep(time.time() - max(grace_seconds, ABANDONED_SECONDS))
        return removed

    def _renew(self, digest: str, data: bytes | memoryview) -> bool:
        """Tell whether the content is there and whole; then it is young again, and durable."""
        if (path := _look(self._blobs, digest)) is None:  # most are new, and need no lock for that
            return False
        with locked(self._lock, shared=True):
            try:
                with open_blob(path) as file:
                    if file.view() != data:
                        return False  # damaged: written anew
                os.utime(path)
            except (BlobNotFoundError, FileNotFoundError):
                return False
            self._sync(path)  # its writer may not have come so far
            self._sync(path.parent)
        return True

    def _make_folders(self) -> None:
        """Never the store itself: that may be a file system which is not mounted now."""
        self._blobs.mkdir(exist_ok=True)
        self._temporary.mkdir(exist_ok=True)
        self._pins.mkdir(exist_ok=True)
        for directory in (self._blobs, self.root):
            self._sync(directory)

    def _draft(self) -> _Draft:
        try:
            return _Draft(self._blobs, self._temporary)
        except FileNotFoundError:  # somebody has removed a folder
            self._make_folders()
            return _Draft(self._blobs, self._temporary)

    def _name(self, draft: _Draft) -> None:
        try:
            self._name_locked(draft)
        except FileNotFoundError:
            self._make_folders()
            self._name_locked(draft)

    def _name_locked(self, draft: _Draft) -> None:
        with locked(self._lock, shared=True):  # the collector may be about to unlink such a path
            draft.name(sync=self.sync)

    def _older(self, oldest: float) -> Iterator[Path]:
        for folder in (self._blobs, *self._blobs.glob("[0-9a-f][0-9a-f]")):
            for path in folder.glob("*"):
                if DIGEST.fullmatch(path.name) and _modified(path) <= oldest:
                    yield path

    def _sweep(self, oldest: float) -> None:
        for path in self._temporary.glob("*"):
            if _modified(path) <= oldest:
                path.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        _check_digest(digest)
        return _find(self._blobs, digest)

    def _sync(self, path: Path | str) -> None:
        if self.sync:
            sync_path(path)


def _check_digest(digest: str) -> None:
    if not DIGEST.fullmatch(digest):
        raise BlobNotFoundError(digest)


def _modified(path: Path) -> float:
    """Time of the last put; the far future for a file that is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
