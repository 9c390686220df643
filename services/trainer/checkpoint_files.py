"""Files of a checkpoint in a bucket, as a directory of this host while they are used."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from services.trainer.errors import CheckpointDamagedError
from sluice import faults
from sluice.durable import scratch
from sluice.file_cache import host_cache
from sluice.place import StoreCacheConfig
from sluice.weights.checkpoint import check_file
from sluice.weights.errors import FileDigestError
from sluice.weights.manifest import FileEntry

WRITING, READING = "sluice-checkpoint-", "sluice-restored-"

Upload = Callable[[Mapping[str, FileEntry]], None]


@contextmanager
def written_there(location: str, cache: StoreCacheConfig) -> Iterator[tuple[Path, Upload]]:
    """Have a directory to write into, and what then uploads the files of this rank."""
    from sluice.bucket import ObjectBucket  # nobody else needs obstore

    cache.directory.mkdir(parents=True, exist_ok=True)
    with scratch(WRITING, cache.directory) as directory:

        def upload(files: Mapping[str, FileEntry]) -> None:
            bucket = ObjectBucket(location)
            for name in sorted(files, key=lambda name: -files[name].size):
                bucket.take_file(name, directory / name)
                faults.point("checkpoint.uploaded")

        yield directory, upload


@contextmanager
def fetched(
    location: str,
    files: Mapping[str, FileEntry],
    cache: StoreCacheConfig,
    rank: int = 0,
) -> Iterator[Path]:
    """Have a directory with the files of a checkpoint, all of them checked.

    Ranks of a host fetch each file once: each begins with another one. Raises
    CheckpointDamagedError.
    """
    from sluice.bucket import ObjectBucket  # nobody else needs obstore

    cache.directory.mkdir(parents=True, exist_ok=True)
    bucket, kept = ObjectBucket(location), host_cache(cache)
    names = sorted(files)
    first = rank % max(1, len(names))
    with scratch(READING, cache.directory) as directory:
        for name in names[first:] + names[:first]:
            entry = files[name]

            def fetch(path: Path, name: str = name) -> None:
                try:
                    bucket.local_file(name, path)
                except FileNotFoundError:
                    raise CheckpointDamagedError(name, f"file {name!r} is missing") from None

            def problem(
                path: Path, name: str = name, entry: FileEntry = entry
            ) -> CheckpointDamagedError | None:
                try:
                    check_path(path, name, entry)
                except CheckpointDamagedError as error:
                    return error
                return None

            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with kept.held(f"{entry.digest}-{entry.size}", fetch, problem) as path:
                os.link(path, target)  # stays, whatever the cache removes
        yield directory


def check_path(path: Path, name: str, entry: FileEntry) -> None:
    """Read a file, which is `name` of a checkpoint or a copy. Raises CheckpointDamagedError."""
    check_size(path, name, entry)
    try:
        check_file(path, entry.digest)
    except FileDigestError as error:  # that of a copy has another name
        told = FileDigestError(name, error.expected, error.actual)
        raise CheckpointDamagedError(name, str(told)) from error


def check_size(path: Path, name: str, entry: FileEntry) -> None:
    """See that it is a file of as many bytes as were written. Raises CheckpointDamagedError."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointDamagedError(name, f"file {name!r} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointDamagedError(name, f"file {name!r} is no file any more")
    if status.st_size != entry.size:
        told = f"file {name!r} has {status.st_size} bytes, not {entry.size}"
        raise CheckpointDamagedError(name, told)
