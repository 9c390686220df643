"""Versions in the making: a directory beside a lock file that its owner holds.

The kernel frees the lock when the owner dies, however it dies, so a free lock means that
nobody will finish the directory. The lock file lies beside it: the rename that commits the
directory must not carry the lock along. A file system shared by hosts must therefore keep
flock coherent among them (NFS on Linux does).
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sluice.durable import try_lock

LOCK_SUFFIX = ".lock"
GONE_SUFFIX = ".gone"


@dataclass(frozen=True)
class Staging:
    """A version in the making: write its shards into `directory`, then commit or abort.

    The lock lives as long as this object, and in forked children; ranks need only the directory.
    """

    directory: Path
    version: int
    parent: int | None
    lock: IO[bytes] = field(repr=False)  # an open file that holds the flock


def open_staging(root: Path, version: int, parent: int | None) -> Staging:
    """Make a staging directory below `root` and lock it."""
    while True:
        directory = root / f"{version:08d}-{secrets.token_hex(8)}"
        lock = directory.with_name(directory.name + LOCK_SUFFIX).open("xb")
        if try_lock(lock.fileno()):
            directory.mkdir()
            return Staging(directory, version, parent, lock)
        lock.close()  # a sweep was faster


def close_staging(staging: Staging) -> None:
    """Remove what is left of a staging directory and free its lock; may be repeated."""
    _remove(staging.directory)
    staging.lock.close()


def sweep_staging(root: Path) -> list[Path]:
    """Remove what owners left that are gone, or done; returns the directories that now are gone."""
    removed = []
    for lock_path in root.glob("*" + LOCK_SUFFIX):
        try:
            with lock_path.open("r+b") as lock:
                directory = lock_path.with_suffix("")
                if try_lock(lock.fileno()) and _remove(directory):
                    removed.append(directory)
        except FileNotFoundError:
            continue  # committed or swept meanwhile
    return removed


def _remove(directory: Path) -> bool:
    """Remove a directory, then its lock file, without which no sweep finds it; whether it is gone.

    Ranks may still write: under another name they do not find it.
    """
    gone = directory.with_name(directory.name + GONE_SUFFIX)
    with contextlib.suppress(OSError):
        directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    if directory.exists() or gone.exists():
        return False
    directory.with_name(directory.name + LOCK_SUFFIX).unlink(missing_ok=True)
    return True
