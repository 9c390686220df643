"""Versions in the making: a directory beside a lock file that its owner holds.

The kernel frees the lock when the owner dies, however it dies, so a free lock means that
nobody will finish the directory. The lock file lies beside it: the rename that commits the
directory must not carry the lock along. A file system shared by hosts must therefore keep
flock coherent among them (NFS on Linux does).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

LOCK_SUFFIX = ".lock"


@dataclass(frozen=True)
class Staging:
    """A version in the making: write its shards into `directory`, then commit or abort.

    The lock lives as long as this object, and in forked children; ranks need only the directory.
    """

    directory: Path
    version: int
    parent: int | None
    lock: IO[bytes] = field(repr=False)  # an open file that holds the flock

    @property
    def lock_path(self) -> Path:
        """The lock file beside the directory."""
        return self.directory.with_name(self.directory.name + LOCK_SUFFIX)


def open_staging(root: Path, version: int, parent: int | None) -> Staging:
    """Make a staging directory below `root` and lock it."""
    while True:
        directory = root / f"{version:08d}-{secrets.token_hex(8)}"
        lock = directory.with_name(directory.name + LOCK_SUFFIX).open("xb")
        if _take(lock):
            directory.mkdir()
            return Staging(directory, version, parent, lock)
        lock.close()  # a sweep was faster


def close_staging(staging: Staging) -> None:
    """Remove what is left of a staging directory and free its lock; may be repeated."""
    shutil.rmtree(staging.directory, ignore_errors=True)
    staging.lock_path.unlink(missing_ok=True)
    staging.lock.close()


def sweep_staging(root: Path) -> list[Path]:
    """Remove the directories whose owner is gone, and return them."""
    removed = []
    for lock_path in root.glob("*" + LOCK_SUFFIX):
        try:
            with lock_path.open("r+b") as lock:
                if _take(lock):
                    directory = lock_path.with_suffix("")
                    shutil.rmtree(directory, ignore_errors=True)
                    lock_path.unlink(missing_ok=True)
                    removed.append(directory)
        except FileNotFoundError:
            continue  # committed or swept meanwhile
    return removed


def _take(lock: IO[bytes]) -> bool:
    """Whether the lock is ours now, and its file still the one in the directory."""
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(lock.fileno()).st_nlink > 0
