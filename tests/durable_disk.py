"""What a disk holds when the machine goes down: what was synced, and nothing else."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class DurableDisk:
    """Keeps what each `fsync` has made durable: contents by inode, and the names in folders.

    Whatever else was written may be there after a crash, or not: a name without its content too.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.file_syncs = self.folder_syncs = 0

    def check(self) -> None:
        """What a crash in this moment would leave; asked before every `fsync`."""

    def sync(self, descriptor: int) -> None:
        """What `os.fsync` does."""
        self.check()
        inode, path = os.fstat(descriptor).st_ino, Path(f"/proc/self/fd/{descriptor}").readlink()
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.folder_syncs += 1
            self.names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.file_syncs += 1
            self.contents[inode] = path.read_bytes()

    def entries(self, *folders: str) -> dict[str, int]:
        """Inodes by name in a folder, found from the root by durable names alone."""
        inode = self.root.stat().st_ino
        for folder in folders:
            inode = self.names.get(inode, {}).get(folder, -1)
        return self.names.get(inode, {})

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Takes the place of `os.fsync` for the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self.sync)
            yield
