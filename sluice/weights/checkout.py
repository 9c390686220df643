"""A version as a plain HF directory on this host, whatever it is made of in the store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from sluice.durable import write_new
from sluice.weights.delta.files import ShardSource, build_shard
from sluice.weights.digest import digest_file
from sluice.weights.errors import FileDigestError, ManifestError, MissingFileError
from sluice.weights.manifest import MANIFEST_NAME, Manifest, delta_name, encode_manifest


class Source(Protocol):
    """What is read of a store."""

    def manifest(self, version: int) -> Manifest: ...

    def local_file(self, version: int, name: str, scratch: Path) -> Path: ...


def check_out(
    source: Source, version: int, directory: Path, local: Mapping[int, Path] | None = None
) -> Manifest:
    """Write the version into the empty `directory`, checking every byte.

    `local` are versions that lie on this host as whole directories: what is in them is not
    fetched, and only the deltas since are. Raises VersionNotFoundError, ManifestError,
    TensorDigestError, FileDigestError, MissingFileError or DamagedFileError.
    """
    prefix = directory.name + ".fetched-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
        return _CheckOut(source, Path(scratch), local or {}).run(version, directory)


class _CheckOut:
    def __init__(self, source: Source, scratch: Path, local: Mapping[int, Path]) -> None:
        self._source, self._scratch, self._local = source, scratch, local
        self._manifests: dict[int, Manifest] = {}

    def run(self, version: int, directory: Path) -> Manifest:
        manifest = self._manifest(version)
        shards = {tensor.file for tensor in manifest.tensors.values()}
        for name in manifest.files:
            target = directory / name
            if name in shards:
                build_shard(self._find_shard(manifest, name), name, manifest, target)
                continue
            self._copy_companion(manifest, name, target)
        write_new(directory / MANIFEST_NAME, encode_manifest(manifest), sync=False)
        return manifest

    def _copy_companion(self, manifest: Manifest, name: str, target: Path) -> None:
        holder = self._walk(manifest, lambda m: name in m.inherited)[-1]
        shutil.copyfile(self._path(holder, name), target)
        expected, (_, actual) = manifest.files[name].digest, digest_file(target)
        if actual != expected:
            raise FileDigestError(name, expected, actual)

    def _find_shard(self, manifest: Manifest, name: str) -> ShardSource:
        *changed, whole = self._walk(manifest, lambda m: name in m.deltas)
        deltas = [
            (self._path(version, delta_name(name)), version.deltas[name])
            for version in reversed(changed)
        ]
        return ShardSource(self._path(whole, name), deltas)

    def _walk(self, manifest: Manifest, is_elsewhere: Callable[[Manifest], bool]) -> list[Manifest]:
        """From `manifest` to the version that has the whole of a file, or lies here."""
        steps = [manifest]
        while steps[-1].version not in self._local and is_elsewhere(steps[-1]):
            base = steps[-1].base
            if base is None or base >= steps[-1].version:
                raise ManifestError(f"version {steps[-1].version} has no base to be made of")
            steps.append(self._manifest(base))
        return steps

    def _manifest(self, version: int) -> Manifest:
        if version not in self._manifests:
            self._manifests[version] = self._source.manifest(version)
        return self._manifests[version]

    def _path(self, manifest: Manifest, name: str) -> Path:
        if manifest.version in self._local:
            path = self._local[manifest.version] / name
            if not path.is_file():
                raise MissingFileError(name)
            return path
        return self._source.local_file(manifest.version, name, self._scratch)
