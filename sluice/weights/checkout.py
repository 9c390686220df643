"""The files of a version, whole and checked, made out of whole files and deltas."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from sluice import faults
from sluice.durable import clone_file, has_room_to_change, naming, write_all, write_new
from sluice.priority import threads_beside
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
    StoppedError,
    TensorDigestError,
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

    def __init__(
        self, source: ShardSource, expected: ShardFile, target: Path, is_stopped: Callable[[], bool]
    ) -> None:
        self._source, self._expected, self._target = source, expected, target
        self._is_stopped = is_stopped
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
        if path != target:
            target.unlink(missing_ok=True)  # of the version that the directory was
        in_place = path == target or (bool(self._deltas) and clone_file(path, target))
        with naming(target), target.open("r+b" if in_place else "xb", buffering=0) as file:
            if not in_place:
                write_all(file, self._header)
            for name, extent in self._extents.items():
                for block, begin, has_changed in self._blocks(name, extent):
                    if self._is_stopped():
                        raise StoppedError(target.name)
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
            expected, file_name = self._expected.tensors[name].digest, self._expected.file_name
            detail = f"none: its delta {error}"
            raise TensorDigestError(name, expected, detail, file_name) from error


def build_shard(
    source: ShardSource,
    expected: ShardFile,
    target: Path,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Make the shard `expected` in `target`, checking every tensor.

    Where `target` is the source, or can share its blocks until they are written, only blocks that
    changed are. Raises TensorDigestError naming a tensor that does not come out as expected,
    FileDigestError, MissingFileError or DamagedFileError, and StoppedError once `is_stopped`;
    `target` is then to be thrown away.
    """
    _Shard(source, expected, target, is_stopped).write()


class Sources:
    """Where the files of a version lie: in the store, or on this host in directories of `local`.

    What is fetched goes into `scratch`. Raises VersionNotFoundError or ManifestError.
    """

    def __init__(
        self, store: WeightStore, version: int, local: Mapping[int, Path], scratch: Path
    ) -> None:
        self._store, self._local, self._scratch = store, local, scratch
        self.manifest = store.manifest(version)
        self._chain = [self.manifest]
        while self._chain[-1].version not in local and (base := self._chain[-1].base) is not None:
            if base >= self._chain[-1].version:
                raise ManifestError(
                    f"version {self._chain[-1].version} has the base {base}, no older one"
                )
            self._chain.append(store.manifest(base))

    def of(self, name: str) -> ShardSource:
        """Find what a file is made of. Raises MissingFileError or ManifestError."""
        *changed, whole = self._holders(name)
        deltas = [
            (self._path(m, delta_name(name)), m.deltas[name])
            for m in reversed(changed)
            if name in m.deltas  # else it is the same
        ]
        return ShardSource(self._path(whole, name), deltas)

    def _path(self, holder: Manifest, name: str) -> Path:
        if holder.version not in self._local:
            return self._store.local_file(holder.version, name, self._scratch)
        path = self._local[holder.version] / name
        if not path.is_file():
            raise MissingFileError(name)
        return path

    def _holders(self, name: str) -> list[Manifest]:
        """The versions that a file is made of, down to one that has the whole of it."""
        for length, part in enumerate(self._chain, 1):
            if part.version in self._local or name not in {*part.deltas, *part.inherited}:
                return self._chain[:length]
        raise ManifestError(f"version {self._chain[-1].version} has no base to be made of")


NOTHING: Mapping[str, ShardFile] = MappingProxyType({})


def check_out(
    store: WeightStore,
    version: int,
    directory: Path,
    local: Mapping[int, Path] | None = None,
    made: Mapping[str, ShardFile] = NOTHING,
) -> Manifest:
    """Write the version into the empty `directory`, checking every byte.

    `local` are versions that lie on this host as whole directories: what is in them is not
    fetched, and only the deltas since are. One of them may be `directory` itself, which is then
    turned into the version by writing what changed. `made` are shards that are there, and were
    checked against these digests. Raises VersionNotFoundError, ManifestError, TensorDigestError,
    FileDigestError, MissingFileError or DamagedFileError.
    """
    prefix = directory.name + ".fetched-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch,
        ThreadPoolExecutor(threads_beside(), "weight-build") as pool,
    ):
        sources = Sources(store, version, local or {}, Path(scratch))
        manifest = sources.manifest
        shards = {shard.file_name: shard for shard in manifest.shards()}
        for name, shard in made.items():
            if shards.get(name) != shard:
                raise DamagedFileError(name, "is not as it was announced")

        def make(name: str) -> None:
            source, target = sources.of(name), directory / name
            if name in shards:
                build_shard(source, shards[name], target)
                return
            if source.path != target:
                shutil.copyfile(source.path, target)
            check_file(target, manifest.files[name].digest)

        making = [pool.submit(make, name) for name in manifest.files if name not in made]
        try:
            for each in making:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)
    for path in directory.iterdir():
        if path.name not in manifest.files:
            path.unlink()
    write_new(directory / MANIFEST_NAME, encode_manifest(manifest), sync=False)
    return manifest
