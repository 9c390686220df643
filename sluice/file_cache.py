"""Files on this host of what lies elsewhere: verified whenever they are used, and bounded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import xxhash

from sluice.durable import LockTimeoutError, locked, temporary_path, try_lock
from sluice.place import StoreCacheConfig

logger = logging.getLogger(__name__)

WAIT_SECONDS = 120.0  # for a neighbour that fetches the same; then both do
STRIPES = 64  # locks of those who fetch
ABANDONED_SECONDS = 3600.0  # after which a file in the making has lost its writer

Fetch = Callable[[Path], object]
Check = Callable[[Path], Exception | None]  # what is wrong with a file


class FileCache:
    """Immutable files below `root`, by names that are of one content.

    Any number of processes and threads share it. Files in use stay; of the others the least
    recently used are removed beyond `max_bytes`.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        """Raises OSError where the directories cannot be made."""
        self._files, self._making = root / "files", root / "making"
        self._locks, self._max_bytes = root / "locks", max_bytes
        self._fetched = max_bytes  # since the last look at the whole: the first fetch looks
        for directory in (self._files, self._making, self._locks):
            directory.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def held(self, name: str, fetch: Fetch, check: Check) -> Iterator[Path]:
        """Have the file `name` for the block, fetched to a new file if it is not here.

        One with which something is wrong is fetched again. Raises what is wrong with the new one,
        and what `fetch` raises.
        """
        file, path = self._take(name, fetch, check)
        with file:
            yield path

    def _take(self, name: str, fetch: Fetch, check: Check) -> tuple[IO[bytes], Path]:
        path = self._files / name
        if (file := self._open(path)) is not None:
            if (problem := check(path)) is None:
                return file, path
            file.close()
            logger.warning("%s is fetched again: %s", path, problem)
            path.unlink(missing_ok=True)
        stripe = int(xxhash.xxh3_64_hexdigest(name.encode()), 16) % STRIPES
        try:
            with locked(self._locks / f"{stripe:02d}", timeout_seconds=WAIT_SECONDS):
                return self._fetch(path, fetch, check)
        except LockTimeoutError as error:  # a stopped process
            logger.warning("%s is fetched beside another process: %s", path, error)
            return self._fetch(path, fetch, check)

    def _fetch(self, path: Path, fetch: Fetch, check: Check) -> tuple[IO[bytes], Path]:
        if (file := self._open(path)) is not None:  # a neighbour was faster
            if check(path) is None:
                return file, path
            file.close()
        made = temporary_path(self._making, path.name[:64])
        try:
            fetch(made)
            if (problem := check(made)) is not None:
                raise problem
            path.parent.mkdir(parents=True, exist_ok=True)
            file = made.open("rb")
            try_lock(file.fileno(), shared=True)
            made.replace(path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        self._fetched += os.fstat(file.fileno()).st_size
        if self._fetched > self._max_bytes // 16:
            self._fetched = 0
            self.trim()
        return file, path

    def _open(self, path: Path) -> IO[bytes] | None:
        """Open a file that is here and hold it; None where it is not, or goes just now."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        if not try_lock(file.fileno(), shared=True):
            file.close()
            return None
        os.utime(path)
        return file

    def trim(self) -> None:
        """Remove the least recently used files beyond the limit, and what dead writers left."""
        try:
            with locked(self._locks / "trim", timeout_seconds=0):
                self._trim()
        except LockTimeoutError:  # another is at it
            return

    def _trim(self) -> None:
        found = list[tuple[float, int, Path]]()
        for path in self._files.rglob("*"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                if path.is_file():
                    found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                break
            with suppress(FileNotFoundError), path.open("rb") as file:
                if try_lock(file.fileno()):
                    path.unlink()
                    total -= size
        newest = max((modified for modified, _, _ in found), default=0.0)
        for path in self._making.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < newest - ABANDONED_SECONDS:
                    path.unlink()


def host_cache(config: StoreCacheConfig) -> FileCache:
    """The files of a bucket on this host, of whatever kind: one limit is for all of them.

    Raises OSError where the directories cannot be made.
    """
    return FileCache(config.directory / "fetched", config.max_bytes)
