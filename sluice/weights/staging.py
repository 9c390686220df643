"""Versions in the making: a directory beside a lock file that its owner holds.

The kernel frees the lock when the owner dies, however it dies, so a free lock means that
nobody will finish the directory. The lock file lies beside it: the rename that commits the
directory must not carry the lock along.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Staging:
    """A version in the making: write its shards into `directory`, then commit or abort.

    The lock lives as long as this object; ranks on other hosts need only the directory.
    """

    directory: Path
    version: int
    parent: int | None
    lock: int = field(repr=False)  # descriptor that holds the flock

    @property
    def lock_path(self) -> Path:
        return self.directory.with_name(self.directory.name + ".lock")


def open_staging(root: Path, version: int, parent: int | None) -> Staging:
    """Make a staging directory below `root` and lock it."""
    while True:
        directory = root / f"{version:08d}-{secrets.token_hex(8)}"
        lock_path = directory.with_name(directory.name + ".lock")
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else swept between the open and the lock
            directory.mkdir()
            return Staging(directory, version, parent, descriptor)
        os.close(descriptor)


def close_staging(staging: Staging) -> None:
    """Remove what is left of a staging directory and free its lock."""
    shutil.rmtree(staging.directory, ignore_errors=True)
    staging.lock_path.unlink(missing_ok=True)
    os.close(staging.lock)


def sweep_staging(root: Path) -> list[Path]:
    """Remove the directories whose owner is gone, and return them."""
    removed = []
    for lock_path in root.glob("*.lock"):
        try:
            descriptor = os.open(lock_path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            directory = lock_path.with_suffix("")
            shutil.rmtree(directory, ignore_errors=True)
            lock_path.unlink(missing_ok=True)
            removed.append(directory)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
    return removed
