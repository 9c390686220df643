"""Files that survive a crash: synced writes, atomic replacement and locks between processes."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import Any

import xxhash

LOCK_TIMEOUT_SECONDS = 60.0
LOCK_POLL_SECONDS = 0.002


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Errors of the disk name `path`: those of an open file name nothing."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def sync_path(path: Path | str) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, data: bytes | memoryview, *, sync: bool = True) -> None:
    """Create `path` with `data`; raises FileExistsError where it is there already."""
    write_pieces(path, [data], sync=sync)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], *, sync: bool = True) -> None:
    """Create `path` with `pieces` one after the other; no file is left when that fails."""
    with naming(path), path.open("xb", buffering=0) as file:
        try:
            for piece in pieces:
                write_all(file, piece)
            if sync:
                os.fsync(file.fileno())
        except BaseException:  # a full disk
            path.unlink(missing_ok=True)
            raise


def write_all(file: RawIOBase, data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file, which may take it in pieces."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) or 0 :]


def encode_line(line: Mapping[str, Any]) -> bytes:
    """A line of a journal, without its end: JSON, and after a tab the xxh3 of that."""
    text = json.dumps(line).encode()
    return b"%b\t%b" % (text, xxhash.xxh3_64_hexdigest(text).encode())


def decode_line(data: bytes) -> dict[str, Any]:
    """Read what `encode_line` made; earlier releases wrote no digest.

    Raises ValueError for a line that was changed or cut off.
    """
    text, tab, digest = data.rpartition(b"\t")
    if tab and xxhash.xxh3_64_hexdigest(text).encode() != digest:
        raise ValueError("another digest")
    line = json.loads(text if tab else data)
    if not isinstance(line, dict):
        raise ValueError("no line of a journal")
    return line


ROW_SEAL = b', "digest": "'


def encode_row(row: Mapping[str, Any]) -> bytes:
    """A row of a file of JSON lines: its last key is `digest`, the xxh3 of all before that."""
    text = json.dumps(row).encode()
    return b'%b%b%b"}' % (text[:-1], ROW_SEAL, xxhash.xxh3_64_hexdigest(text).encode())


def unseal_row(line: bytes, *, has_digest: bool = False) -> bytes:
    """The JSON of a row without its digest; earlier releases wrote none.

    Raises ValueError for one that was changed, or that lacks the digest which it `has`.
    """
    text, seal, rest = line.rpartition(ROW_SEAL)
    if not seal:
        if has_digest:
            raise ValueError("no digest")
        return line
    text += b"}"
    if rest != b'%b"}' % xxhash.xxh3_64_hexdigest(text).encode():
        raise ValueError("another digest")
    return text


FICLONE = 0x40049409  # of Linux: the blocks of a file are shared until either is written


def clone_file(path: Path, target: Path) -> bool:
    """Make the new file `target` share the blocks of `path`, each until it is written.

    False, with nothing left, where the file system cannot. Raises OSError where `path` is not
    there, FileExistsError.
    """
    with naming(path), path.open("rb") as source, target.open("xb") as file:
        try:
            fcntl.ioctl(file.fileno(), FICLONE, source.fileno())
            return True
        except OSError:
            target.unlink()
            return False


def has_room_to_change(path: Path) -> bool:
    """Whether every byte of a file may be changed without more room on the disk.

    So it is where a file system writes over what it has, and there are no holes. Raises OSError.
    """
    table, found = Path("/proc/self/mountinfo"), path.stat()
    if not table.is_file() or 512 * found.st_blocks < found.st_size:
        return False
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    mounts = [line.split() for line in table.read_text().splitlines()]
    kinds = {mount[mount.index("-") + 1] for mount in mounts if mount[2] == device}
    return kinds in ({"ext4"}, {"tmpfs"})


def temporary_path(directory: Path, name: str) -> Path:
    """Return a name in `directory` that nobody else uses."""
    return Path(f"{directory}/{name}.{secrets.token_hex(8)}")  # a tenth of the time of `/`


def replace_file(
    path: Path, data: bytes | memoryview, *, temporary: Path, sync: bool = True
) -> None:
    """Give `path` the content `data` in one step: readers see the old or the new, never a part.

    `temporary` is a directory of the same file system; a crash may leave a file there.
    """
    source = temporary_path(temporary, path.name)
    try:
        write_new(source, data, sync=sync)
        source.replace(path)
    except BaseException:
        source.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """Write what a user asked for: a file as a whole, or what was there before stays; to what is
    no file, such as a pipe, as it is. Raises OSError and ValueError."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
    else:
        replace_file(target, data, temporary=target.parent, sync=False)


class LockTimeoutError(TimeoutError):
    """Another process, perhaps a stopped one, has held a lock for too long; `filename` is it."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        super().__init__(f"lock {str(path)!r} was not free within {seconds:g} s")
        self.filename = str(path)

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def locked(
    path: Path, *, shared: bool = False, timeout_seconds: float = LOCK_TIMEOUT_SECONDS
) -> Iterator[None]:
    """Hold an flock on `path` (made when missing) among threads and processes.

    Each try opens the file anew: locks belong to an open file, not to a thread or a path.
    The kernel frees the lock of a process that dies; holders keep it for short file operations.
    Raises LockTimeoutError.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        with path.open("ab") as file:
            if try_lock(file.fileno(), shared=shared):
                yield
                return
        if time.monotonic() >= deadline:
            raise LockTimeoutError(path, timeout_seconds)
        time.sleep(LOCK_POLL_SECONDS)  # flock has no form with a deadline


class DirectoryError(Exception):
    """A directory cannot be made or written, or another process works in it."""


@contextmanager
def owned(directory: Path, role: str) -> Iterator[None]:
    """Be the one process of `role` in `directory`, which is made when missing.

    For the life of a process: the kernel ends the claim of one that is killed. Raises
    DirectoryError, which names the other process.
    """
    path = directory / f".{role}.lock"
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path, timeout_seconds=0))
            path.write_text(str(os.getpid()))
        except LockTimeoutError:
            owner = path.read_text(errors="replace") or "?"
            raise DirectoryError(
                f"run_dir: process {owner} (sluice {role}) works in {directory}; "
                "stop it, or give another run_dir"
            ) from None
        except OSError as error:
            raise DirectoryError(f"run_dir: {directory}: {error.strerror}") from None
        yield


SCRATCH_LOCK = ".in-use"


def is_memory(path: Path) -> bool:
    """Whether a file or directory lies in the shared memory of this host, and on no disk."""
    shared = Path("/dev/shm")
    return shared.is_dir() and path.stat().st_dev == shared.stat().st_dev


@contextmanager
def scratch(prefix: str, directory: Path | None = None) -> Iterator[Path]:
    """Have a temporary directory for the block; what killed processes left is cleared before.

    It lies below `directory`, or the system's one for temporary files. `prefix` is of one purpose:
    all directories of that name are taken for such, and removed where nobody holds their lock.
    """
    root = Path(tempfile.gettempdir()) if directory is None else directory
    for lock in root.glob(f"{prefix}*/{SCRATCH_LOCK}"):
        with suppress(OSError), lock.open("ab") as file:  # of another user, or gone meanwhile
            if try_lock(file.fileno()):
                shutil.rmtree(lock.parent, ignore_errors=True)
    while True:
        with (
            tempfile.TemporaryDirectory(
                prefix=prefix, dir=root, ignore_cleanup_errors=True
            ) as made,
            Path(made, SCRATCH_LOCK).open("ab") as file,
        ):
            if try_lock(file.fileno()):  # else a neighbour that starts was faster
                yield Path(made)
                return


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Takes an flock on an open file; False where another process holds it.

    A lock on a file that was removed from its directory meanwhile is worth nothing: False too.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0
