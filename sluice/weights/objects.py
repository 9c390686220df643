"""Files of a weight store by key, and the same in a directory. An object store: `bucket`.

versions/<8 digits>/<file>        a version: a plain HF checkpoint and its manifest.json
allocated/<8 digits>              one marker per number given out lately; names the parent
announced/<8 digits>/<file>       a file of a version in the making is written; digests of it
promised/<8 digits>               the manifest of a version whose files are written later
pins/<8 digits>/<owner>           keeps a version from retention
staging/<8 digits>-<nonce>/       a version in the making, beside its owner's lock
trash/                            versions on their way out
retain.lock                       shared by who pins or commits; retention has it alone
"""

from __future__ import annotations

import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from sluice import faults
from sluice.durable import locked, sync_path, write_new
from sluice.weights.manifest import MANIFEST_NAME
from sluice.weights.staging import Staging, is_owned

_FOLDERS = ("versions", "allocated", "announced", "promised", "staging", "pins", "trash")


class Objects(ABC):
    """Immutable files by key, from which a commit makes a version in one step.

    Calls block, and raise FileNotFoundError for a key that is not there. `staging` is the
    directory of this host in which versions are made.
    """

    staging: Path

    @abstractmethod
    def keys(self, folder: str) -> Sequence[str]:
        """List the keys in a folder and its folders, in any order."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the bytes of an object."""

    @abstractmethod
    def mark(self, key: str) -> object:
        """Return what is another once an object was removed and written anew."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Read an object."""

    @abstractmethod
    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Read bytes start..end (exclusive) of an object."""

    @abstractmethod
    def put_new(self, key: str, data: bytes) -> None:
        """Write an object; FileExistsError where it exists. One of several writers succeeds."""

    @abstractmethod
    def take_file(self, key: str, path: Path) -> None:
        """Make a file of this host an object; afterwards `path` is the object, or gone.

        Before it is in a version that is committed, a crash of the machine may damage it.
        """

    @abstractmethod
    def local_file(self, key: str, path: Path) -> Path:
        """Return an object as a file of this host, which is fetched to the new file `path`
        unless there is one."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are no error."""

    @abstractmethod
    def versions(self) -> set[int]:
        """Return the numbers of the committed versions."""

    @abstractmethod
    def directory(self, version: int) -> Path | None:
        """Return the directory of a committed version; None in a bucket."""

    @abstractmethod
    def draft(self, staging: Staging) -> str:
        """Return the folder of the files of a version in the making."""

    @abstractmethod
    def commit(self, staging: Staging, manifest: bytes) -> None:
        """Write the manifest and make the version visible, at once and with all its files.

        Raises FileExistsError where the number is committed with other content.
        """

    @abstractmethod
    def guarded(self, *, alone: bool) -> AbstractContextManager[None]:
        """Keep retention away, or with `alone` everybody; nothing where `remove` needs no lock."""

    @abstractmethod
    def is_retiring(self, version: int) -> bool:
        """Return whether somebody removes the version without a lock."""

    @abstractmethod
    def remove(self, version: int) -> bool:
        """Remove a version; False where somebody has pinned it meanwhile."""

    @abstractmethod
    def abandoned_promises(self) -> Sequence[str]:
        """List the keys of promises that nobody will keep any more, as far as can be told."""

    @abstractmethod
    def clear(self) -> None:
        """Remove what removals, and writers long dead, have left."""

    def exists(self, key: str) -> bool:
        """Return whether there is an object."""
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True


class DirectoryObjects(Objects):
    """Files below a directory that processes share; hosts, where flock is coherent among them.

    With `durable=False` nothing is synced: what a crash of the machine (not of a process)
    leaves is then undefined.
    """

    def __init__(self, root: Path, *, durable: bool) -> None:
        self._root, self._durable = root, durable
        self.staging = root / "staging"
        for name in _FOLDERS:
            (root / name).mkdir(parents=True, exist_ok=True)
        self._sync(root)  # whoever made the folders may have died before it did

    def keys(self, folder: str) -> Sequence[str]:
        top = os.path.join(self._root, folder)
        return [
            f"{folder}{path[len(top) :]}/{name}"
            for path, _, names in os.walk(top)
            for name in names
            if not name.startswith(".nfs")  # what NFS makes of a file that is removed while open
        ]

    def size(self, key: str) -> int:
        return (self._root / key).stat().st_size

    def mark(self, key: str) -> object:
        found = (self._root / key).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def get(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def get_range(self, key: str, start: int, end: int) -> bytes:
        with (self._root / key).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)

    def put_new(self, key: str, data: bytes) -> None:
        path = self._root / key
        path.parent.mkdir(exist_ok=True)
        write_new(path, data, sync=self._durable)
        self._sync(path.parent)
        if path.parent.parent != self._root:  # whose folders are durable since it was opened
            self._sync(path.parent.parent)

    def take_file(self, key: str, path: Path) -> None:
        target = self._root / key
        if path != target:  # what is staged lies in its draft from the beginning
            path.replace(target)

    def local_file(self, key: str, path: Path) -> Path:
        self.size(key)
        return self._root / key

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self._root / key).unlink(missing_ok=True)

    def versions(self) -> set[int]:
        return {int(name) for name in os.listdir(self._root / "versions") if name.isdigit()}

    def draft(self, staging: Staging) -> str:
        return f"staging/{staging.directory.name}"

    def commit(self, staging: Staging, manifest: bytes) -> None:
        path, target = staging.directory / MANIFEST_NAME, self.directory(staging.version)
        path.unlink(missing_ok=True)  # of a commit that failed
        for file in staging.directory.iterdir():
            self._sync(file)
        write_new(path, manifest, sync=self._durable)
        self._sync(staging.directory)
        faults.point("weights.manifest")
        try:
            staging.directory.rename(target)
        except OSError as error:
            if target.exists():
                raise FileExistsError(target) from error
            raise
        self._sync(target.parent)
        faults.point("weights.renamed")

    def guarded(self, *, alone: bool) -> AbstractContextManager[None]:
        return locked(self._root / "retain.lock", shared=not alone)

    def is_retiring(self, version: int) -> bool:
        return False  # nobody removes without the lock

    def remove(self, version: int) -> bool:
        trash = self._root / "trash" / f"{version:08d}-{secrets.token_hex(8)}"
        self.directory(version).rename(trash)
        faults.point("weights.trashed")
        return True

    def abandoned_promises(self) -> Sequence[str]:
        keys = self.keys("promised")
        return [key for key in keys if not is_owned(self.staging, int(os.path.basename(key)))]

    def clear(self) -> None:
        self._sync(self._root / "versions")
        with self.guarded(alone=True):  # nobody pins meanwhile
            there = self.versions()
            for directory in (self._root / "pins").iterdir():
                if int(directory.name) not in there and not os.listdir(directory):
                    directory.rmdir()
        for directory in (self._root / "announced").iterdir():
            with suppress(OSError):  # not empty, or gone
                directory.rmdir()
        for directory in (self._root / "trash").iterdir():
            shutil.rmtree(directory, ignore_errors=True)

    def directory(self, version: int) -> Path:
        return self._root / "versions" / f"{version:08d}"

    def _sync(self, path: Path) -> None:
        if self._durable:
            sync_path(path)
