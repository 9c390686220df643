"""A version as a plain HF directory on this host, whatever it is made of in the store."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from sluice import faults
from sluice.durable import (
    LockTimeoutError,
    clone_file,
    has_room_to_change,
    naming,
    try_lock,
    write_all,
    write_new,
)
from sluice.weights.checkpoint import (
    Extent,
    ShardCheck,
    check_file,
    data_start,
    map_shard,
)
from sluice.weights.delta import DeltaError, Patch, decode, element_width
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    ManifestError,
    MissingFileError,
    TensorDigestError,
    WeightStoreError,
)
from sluice.weights.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ShardFile,
    delta_name,
    digest_bytes,
    encode_manifest,
)
from sluice.weights.store import WeightStore


@dataclass(frozen=True)
class ShardSource:
    """Where a shard comes from: a whole file, and deltas on it, oldest first."""

    path: Path
    deltas: Sequence[tuple[Path, FileEntry]] = ()


BLOCK = 1 << 18  # elements that are changed, digested and written at a time


class _Shard:
    """Makes one shard: a whole file, brought up to date by deltas, into another or the same."""

    def __init__(self, source: ShardSource, expected: ShardFile, target: Path) -> None:
        self._source, self._expected, self._target = source, expected, target
        # A write through a map that the disk has no room for would end the process.
        self._through = source.path == target and has_room_to_change(target)
        access = mmap.ACCESS_WRITE if self._through else mmap.ACCESS_READ
        self._whole, self._extents = map_shard(source.path, access)
        self._deltas = [map_shard(path) for path, _ in source.deltas]
        self._header = bytes(memoryview(self._whole)[: data_start(self._whole)])
        self._check = ShardCheck(expected, self._header, self._extents)
        for (path, _), (_, names) in zip(source.deltas, self._deltas, strict=True):
            if names.keys() != self._extents.keys():
                different = ", ".join(sorted(names.keys() ^ self._extents.keys())[:8])
                raise DamagedFileError(path.name, f"and its manifest differ in: {different}")

    def write(self) -> None:
        path, target, changed = self._source.path, self._target, False
        in_place = path == target or (bool(self._deltas) and clone_file(path, target))
        with naming(target), target.open("r+b" if in_place else "xb", buffering=0) as file:
            if not in_place:
                write_all(file, self._header)
            for name, extent in self._extents.items():
                for block, begin, has_changed in self._blocks(name, extent):
                    self._check.update(block)
                    if self._through:
                        changed |= has_changed
                    elif has_changed or not in_place:
                        file.seek(begin)
                        write_all(file, block)
                self._check.end(name)
                faults.point("weights.building")
            if changed:
                os.utime(file.fileno())  # tmpfs does not note what a map has changed
        self._check.finish()
        for (path, entry), (delta, _) in zip(self._source.deltas, self._deltas, strict=True):
            if (actual := digest_bytes(delta)) != entry.digest:  # though it did no harm
                raise FileDigestError(path.name, entry.digest, actual)

    def _blocks(self, name: str, extent: Extent) -> Iterator[tuple[memoryview, int, bool]]:
        """Yield the new bytes of a tensor, where each block begins, and whether it has changed."""
        width = element_width(extent.dtype)
        old = np.frombuffer(self._whole, np.uint8)[extent.begin : extent.end].view(f"<u{width}")
        patches = [self._patch(name, index, len(old), width) for index in range(len(self._deltas))]
        copies = bool(patches) and not self._through
        memory = np.empty(BLOCK if copies else 0, old.dtype)
        for start in range(0, len(old), BLOCK):
            block, has_changed = old[start : start + BLOCK], False
            if copies:
                memory[: len(block)] = block
                block = memory[: len(block)]
            has_changed = any([patch.apply(block, start) for patch in patches])
            yield block.view(np.uint8).data, extent.begin + start * width, has_changed

    def _patch(self, name: str, index: int, count: int, width: int) -> Patch:
        delta, extents = self._deltas[index]
        try:
            payload = memoryview(delta)[extents[name].begin : extents[name].end]
            return decode(payload, count, width)
        except DeltaError as error:
            expected = self._expected.tensors[name].digest
            raise TensorDigestError(name, expected, f"none: its delta {error}") from error


def build_shard(source: ShardSource, expected: ShardFile, target: Path) -> None:
    """Make the shard `expected` in `target`, checking every tensor.

    Where `target` is the source, or can share its blocks until they are written, only blocks that
    changed are. Raises TensorDigestError naming a tensor that does not come out as expected,
    FileDigestError, MissingFileError or DamagedFileError; `target` is then to be thrown away.
    """
    _Shard(source, expected, target).write()


BUILDERS = 2  # shards that are made at a time


def check_out(
    store: WeightStore, version: int, directory: Path, local: Mapping[int, Path] | None = None
) -> Manifest:
    """Write the version into the empty `directory`, checking every byte.

    `local` are versions that lie on this host as whole directories: what is in them is not
    fetched, and only the deltas since are. One of them may be `directory` itself, which is then
    turned into the version by writing what changed. Raises VersionNotFoundError, ManifestError,
    TensorDigestError, FileDigestError, MissingFileError or DamagedFileError.
    """
    local, chain = local or {}, [store.manifest(version)]
    while chain[-1].version not in local and (base := chain[-1].base) is not None:
        if base >= chain[-1].version:
            raise ManifestError(f"version {chain[-1].version} has the base {base}, no older one")
        chain.append(store.manifest(base))
    manifest = chain[0]
    shards = {shard.file_name: shard for shard in manifest.shards()}
    prefix = directory.name + ".fetched-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch,
        ThreadPoolExecutor(BUILDERS, "weight-build") as pool,
    ):

        def path_of(holder: Manifest, name: str) -> Path:
            if holder.version not in local:
                return store.local_file(holder.version, name, Path(scratch))
            path = local[holder.version] / name
            if not path.is_file():
                raise MissingFileError(name)
            return path

        def holders(name: str) -> list[Manifest]:
            """The versions that a file is made of, down to one that has the whole of it."""
            for length, part in enumerate(chain, 1):
                if part.version in local or name not in {*part.deltas, *part.inherited}:
                    return chain[:length]
            raise ManifestError(f"version {chain[-1].version} has no base to be made of")

        def make(name: str) -> None:
            *changed, whole = holders(name)
            target, path = directory / name, path_of(whole, name)
            if path != target:
                target.unlink(missing_ok=True)  # of the version that the directory was
            if name not in shards:
                if path != target:
                    shutil.copyfile(path, target)
                check_file(target, manifest.files[name].digest)
                return
            deltas = [(path_of(m, delta_name(name)), m.deltas[name]) for m in reversed(changed)]
            build_shard(ShardSource(path, deltas), shards[name], target)

        making = [pool.submit(make, name) for name in manifest.files]
        try:
            for made in making:
                made.result()
        finally:
            pool.shutdown(cancel_futures=True)
    for path in directory.iterdir():
        if path.name not in manifest.files:
            path.unlink()
    write_new(directory / MANIFEST_NAME, encode_manifest(manifest), sync=False)
    return manifest


logger = logging.getLogger(__name__)

FETCH_SECONDS = 600.0  # for another process of this host to make a version
POLL_SECONDS = 0.01
RECYCLED_CHAIN = 4  # deltas that are applied to an old version sooner than a newer one is copied
LOCK_SUFFIX = ".lock"
FORMER_FOLDER = "engines"  # `<version>-<digest>`, each with a `.use` that is locked while served


class CachedVersion:
    """A directory of the cache, which is not removed before `release`."""

    def __init__(self, directory: Path, lock: IO[bytes]) -> None:
        self.directory, self._lock = directory, lock

    def release(self) -> None:
        """Let go; may be repeated."""
        self._lock.close()


class HostCache:
    """Whole versions of one store below `root`, a directory that only this host uses.

    Besides those held, the newest `keep` stay: the next version may be made from one of them.
    Calls block.
    """

    def __init__(
        self,
        root: Path,
        store: WeightStore,
        *,
        keep: int = 2,
        fetch_seconds: float = FETCH_SECONDS,
    ) -> None:
        self._root, self._store = root, store
        self._keep, self._seconds = keep, fetch_seconds
        self._closed = threading.Event()

    def close(self) -> None:
        """Calls no longer wait for other processes: those that do, raise."""
        self._closed.set()

    def take(self, version: int) -> CachedVersion:
        """Hold a version, fetched from the store if it is not here; only what is not here is.

        Raises LockTimeoutError when another process does not get done with it, in time or before
        `close`, OSError when the disk is full, and what `check_out` raises; nothing is left then.
        """
        manifest = self._store.manifest(version)
        self._root.mkdir(parents=True, exist_ok=True)
        directory = self._directory(manifest)
        deadline = time.monotonic() + self._seconds
        while True:
            lock = self._lock_file(directory)
            try:
                if self._hold(lock, manifest, directory):
                    return CachedVersion(directory, lock)
            except BaseException:
                lock.close()
                raise
            lock.close()
            # flock has no form with a deadline
            if time.monotonic() >= deadline or self._closed.wait(POLL_SECONDS):
                raise LockTimeoutError(directory, self._seconds)

    def discard(self, version: int) -> None:
        """Forget a version whose bytes have turned out to be damaged, unless others hold it."""
        self._remove(self._directory(self._store.manifest(version)))

    def _hold(self, lock: IO[bytes], manifest: Manifest, directory: Path) -> bool:
        """Return whether `lock` holds the version now; it is made if nobody else makes it."""
        path = directory / MANIFEST_NAME
        made = not path.is_file() and try_lock(lock.fileno())
        if made and not path.is_file():
            self._make(manifest, directory)
        if not (try_lock(lock.fileno(), shared=True) and path.is_file()):
            return False
        if made:
            self._trim()
        return True

    def _make(self, manifest: Manifest, directory: Path) -> None:
        self._remove_parts(directory)
        partial = self._root / f".{directory.name}-{secrets.token_hex(4)}"
        partial.mkdir()
        try:
            self._check_out(manifest, partial)
            shutil.rmtree(directory, ignore_errors=True)  # that has lost its manifest
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _check_out(self, manifest: Manifest, partial: Path) -> None:
        if self._recycle(manifest, partial):
            return
        with ExitStack() as holding:
            local = self._hold_chain(manifest, holding)
            try:
                check_out(self._store, manifest.version, partial, local)
                return
            except WeightStoreError as error:
                if not local:
                    raise
                logger.warning("made anew without what is on this host: %s", error)
        for base in local.values():
            self._remove(base)
        for path in partial.iterdir():
            path.unlink()
        check_out(self._store, manifest.version, partial)

    def _recycle(self, manifest: Manifest, partial: Path) -> bool:
        """Turn a version of the chain that nobody uses any more into this one, if there is one.

        `partial` is empty again where that fails.
        """
        former = self._take_former(manifest, partial)
        if former is None:
            return False
        try:
            check_out(self._store, manifest.version, partial, {former: partial})
            return True
        except (WeightStoreError, OSError) as error:
            logger.warning("version %d is not made of %d: %s", manifest.version, former, error)
        for path in partial.iterdir():
            path.unlink()
        return False

    def _take_former(self, manifest: Manifest, partial: Path) -> int | None:
        """Move the files of the version to recycle into `partial`; its number, or None."""
        others = {int(path.name[:8]) for path in self._root.glob("[0-9]*-*") if path.is_dir()}
        stay = set(sorted({*others, manifest.version})[-self._keep :])
        link = manifest
        for _ in range(RECYCLED_CHAIN):
            if link.base is None or link.base >= link.version:
                return None
            link = self._store.manifest(link.base)
            directory = self._directory(link)
            if link.version in stay or not (directory / MANIFEST_NAME).is_file():
                continue
            with self._lock_file(directory) as lock:
                if not try_lock(lock.fileno()):
                    continue  # it is in use
                (directory / MANIFEST_NAME).unlink()
                partial.rmdir()
                directory.rename(partial)
                directory.with_name(directory.name + LOCK_SUFFIX).unlink()
                return link.version
        return None

    def _hold_chain(self, manifest: Manifest, holding: ExitStack) -> dict[int, Path]:
        """Lock the nearest version of the chain that is here, while it is read."""
        while manifest.base is not None and manifest.base < manifest.version:
            manifest = self._store.manifest(manifest.base)
            directory = self._directory(manifest)
            if not directory.is_dir():
                continue
            lock = holding.enter_context(self._lock_file(directory))
            if try_lock(lock.fileno(), shared=True) and (directory / MANIFEST_NAME).is_file():
                return {manifest.version: directory}
        return {}

    def _trim(self) -> None:
        versions = sorted(path for path in self._root.glob("[0-9]*-*") if path.is_dir())
        for directory in versions[: -self._keep]:
            self._remove(directory)
        for lock_path in self._root.glob("[0-9]*" + LOCK_SUFFIX):
            directory = lock_path.with_suffix("")
            if not directory.is_dir():  # it was never finished
                self._remove(directory)
        self._remove_former()

    def _remove_former(self) -> None:
        """Remove what SGLang engines of the release before kept below the root, but for what one
        of them serves or fetches now: it holds a lock."""
        former = self._root / FORMER_FOLDER
        with ExitStack() as holding:
            locks = [holding.enter_context(path.open("ab")) for path in former.glob("*.[lu]*")]
            idle = [Path(lock.name) for lock in locks if try_lock(lock.fileno())]
            for path in idle:
                if path.suffix == ".use":
                    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                    path.unlink()
            if len(idle) == len(locks):
                shutil.rmtree(former, ignore_errors=True)

    def _remove(self, directory: Path) -> None:
        """Remove a version that nobody holds."""
        with self._lock_file(directory) as lock:
            if not try_lock(lock.fileno()):
                return
            if directory.is_dir():
                directory.rename(self._root / f".{directory.name}-{secrets.token_hex(4)}")
            self._remove_parts(directory)
            directory.with_name(directory.name + LOCK_SUFFIX).unlink()

    def _remove_parts(self, directory: Path) -> None:
        """Remove what a process that died left of a version, whose lock is ours."""
        for left in self._root.glob(f".{directory.name}-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _directory(self, manifest: Manifest) -> Path:
        """Named after the digest too: a store may be made anew."""
        return self._root / f"{manifest.version:08d}-{manifest.digest}"

    def _lock_file(self, directory: Path) -> IO[bytes]:
        return directory.with_name(directory.name + LOCK_SUFFIX).open("ab")
