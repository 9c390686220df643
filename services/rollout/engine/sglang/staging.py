"""Weight versions on the disk of this host, fetched once for all engines on it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from services.rollout.engine.version_files import checked_manifest, reading
from services.rollout.errors import UnfitWeightsError, VersionNotPreparedError
from sluice.durable import LockTimeoutError, locked
from sluice.weights.checkpoint import describe_shard, shard_paths
from sluice.weights.errors import FileDigestError, TensorDigestError, WeightStoreError
from sluice.weights.manifest import MANIFEST_NAME, Manifest, digest_file, digest_version

REMOVE_SECONDS = 1.0
FETCH_SECONDS = 3600.0  # another engine of this host may be fetching the same

Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by tensor


@dataclass(eq=False)
class StagedVersion:
    """A verified HF directory of this host; nobody removes it before `HostStaging.release`."""

    version: int
    digest: str
    directory: Path
    tensors: Mapping[str, str]  # digests by name
    layout: Layout
    architectures: tuple[str, ...]
    hold: int | None = None  # descriptor of the lock that says it is in use

    def renamed(self, manifest: Manifest) -> StagedVersion:
        """The version that has replaced this one in a server, without files on this host."""
        return replace(
            self,
            version=manifest.version,
            digest=manifest.digest,
            tensors={name: stored.digest for name, stored in manifest.tensors.items()},
        )

    @property
    def shards(self) -> list[Path]:
        return shard_paths(self.directory)


class HostStaging:
    """A folder `<version>-<digest>` for each version, beside a lock that says it is in use.

    Calls block.
    """

    def __init__(self, root: Path | None) -> None:
        shared = Path(tempfile.gettempdir()) / f"sluice-weights-{os.getuid()}"
        self._root = root or shared
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def stage(self, version: int, digest: str, source: Path) -> StagedVersion:
        """Fetch and verify a version, unless another engine of this host has.

        Raises DigestMismatchError naming the tensor or file, or UnfitWeightsError.
        """
        with reading(version):
            manifest = checked_manifest(source, version, digest)
            hold = self._fetch(manifest, source)
        directory = self._root / _name(version, digest)
        return StagedVersion(
            version=version,
            digest=digest,
            directory=directory,
            tensors={name: stored.digest for name, stored in manifest.tensors.items()},
            layout={n: (stored.dtype, stored.shape) for n, stored in manifest.tensors.items()},
            architectures=architectures(directory),
            hold=hold,
        )

    def release(self, staged: StagedVersion) -> None:
        """Let go; the last engine of the host to do so removes the folder."""
        if staged.hold is None:
            return
        os.close(staged.hold)
        staged.hold = None
        self._remove_unused(_name(staged.version, staged.digest))

    def sweep(self) -> None:
        """Remove what engines that were killed have left."""
        for path in self._root.glob("*.use"):
            self._remove_unused(path.name.removesuffix(".use"))

    def _fetch(self, manifest: Manifest, source: Path) -> int:
        """A hold on the folder, which is whole then."""
        name = _name(manifest.version, manifest.digest)
        with locked(self._lock(name), timeout_seconds=FETCH_SECONDS):
            if not (self._root / name).is_dir():
                fresh = self._root / f"{name}.part"
                shutil.rmtree(fresh, ignore_errors=True)
                try:
                    _copy(manifest, source, fresh)
                    _verify(manifest, fresh)
                    fresh.rename(self._root / name)
                finally:
                    shutil.rmtree(fresh, ignore_errors=True)
            hold = os.open(self._root / f"{name}.use", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(hold, fcntl.LOCK_SH)
            return hold

    def _lock(self, name: str) -> Path:
        """One of sixteen, by the last digit of the digest: lock files cannot be removed safely."""
        return self._root / f"{name[-1]}.lock"

    def _remove_unused(self, name: str) -> None:
        """Unless another engine uses it, or fetches under the same lock; the next sweep will."""
        with (
            contextlib.suppress(LockTimeoutError),
            locked(self._lock(name), timeout_seconds=REMOVE_SECONDS),
        ):
            use = self._root / f"{name}.use"
            descriptor = os.open(use, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            else:
                shutil.rmtree(self._root / name, ignore_errors=True)
                use.unlink()
            finally:
                os.close(descriptor)


def plain_version(directory: Path) -> StagedVersion:
    """A model directory as version 0, where it lies. Raises WeightStoreError or OSError."""
    shards = [describe_shard(path) for path in shard_paths(directory)]
    found = {name: entry for shard in shards for name, entry in shard.tensors.items()}
    digest = digest_version((n, e.dtype, e.shape, e.digest) for n, e in found.items())
    return StagedVersion(
        version=0,
        digest=digest,
        directory=directory,
        tensors={name: entry.digest for name, entry in found.items()},
        layout={name: (entry.dtype, entry.shape) for name, entry in found.items()},
        architectures=architectures(directory),
    )


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json`. Raises UnfitWeightsError, also for a model that SGLang would serve wrong."""
    try:
        document = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UnfitWeightsError(f"{directory.name}: config.json cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise UnfitWeightsError(f"{directory.name}: config.json is no object")
    _refuse_dense_layers(directory.name, document)
    return document


def _refuse_dense_layers(name: str, document: Mapping[str, Any]) -> None:
    """SGLang takes every layer of a Qwen3-MoE for a mixture and leaves others' weights unread."""
    is_qwen3 = "Qwen3MoeForCausalLM" in (document.get("architectures") or ())
    step = document.get("decoder_sparse_step")
    if is_qwen3 and (document.get("mlp_only_layers") or step not in (None, 1)):
        raise UnfitWeightsError(
            f"{name}: dense layers among those of experts (mlp_only_layers, decoder_sparse_step), "
            "which SGLang 0.5.23 would serve with weights of its own making"
        )


def architectures(directory: Path) -> tuple[str, ...]:
    return tuple(read_config(directory).get("architectures") or ())


def check_fit(serving: StagedVersion, new: StagedVersion) -> None:
    """Raises UnfitWeightsError unless `new` can be loaded into the model that serves."""
    if new.architectures != serving.architectures:
        raise UnfitWeightsError(
            f"version {new.version} is of {', '.join(new.architectures) or 'nothing'}, the engine "
            f"serves {', '.join(serving.architectures) or 'nothing'}",
            version=new.version,
        )
    differing = {
        name
        for name in serving.layout.keys() | new.layout.keys()
        if serving.layout.get(name, ("",))[1:] != new.layout.get(name, ("",))[1:]
    }
    if differing:
        raise UnfitWeightsError(
            f"version {new.version} differs from the model that serves in {len(differing)} "
            f"tensors: {', '.join(sorted(differing)[:8])}",
            version=new.version,
        )


def _name(version: int, digest: str) -> str:
    return f"{version}-{digest}"


def _copy(manifest: Manifest, source: Path, target: Path) -> None:
    """Files of one file system are linked: a version never changes."""
    target.mkdir()
    for name in (*manifest.files, MANIFEST_NAME):
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)


def _verify(manifest: Manifest, directory: Path) -> None:
    """Raises TensorDigestError, FileDigestError or another WeightStoreError."""
    shards = {stored.file for stored in manifest.tensors.values()}
    for name in sorted(shards):
        found = describe_shard(directory / name)
        for tensor, entry in found.tensors.items():
            stored = manifest.tensors[tensor]
            if entry.digest != stored.digest:
                raise TensorDigestError(tensor, stored.digest, entry.digest)
        _check_file(manifest, name, found.digest)
    for name in sorted(manifest.files.keys() - shards):
        _check_file(manifest, name, digest_file(directory / name)[1])


def _check_file(manifest: Manifest, name: str, digest: str) -> None:
    if digest != manifest.files[name].digest:
        raise FileDigestError(name, manifest.files[name].digest, digest)


T = TypeVar("T")

PREPARED_LIMIT = 2  # versions that lie ready at once; the oldest gives way


class HostVersions:
    """Holds on folders of `HostStaging`, whose work is done in a thread."""

    def __init__(self, root: Path | None) -> None:
        self._staging = HostStaging(root)
        self._disk = ThreadPoolExecutor(1, "engine-staging")
        self._prepared: dict[int, StagedVersion] = {}
        self._in_use: int | None = None
        self.restorable: StagedVersion | None = None  # the last one served from here
        self.prepare_seconds = 0.0

    @property
    def prepared(self) -> list[int]:
        return sorted(self._prepared)

    async def sweep(self) -> None:
        """Remove what engines that were killed have left."""
        await self._on_disk(self._staging.sweep)

    async def open(self, directory: Path) -> StagedVersion:
        """A model directory where it lies. Raises UnfitWeightsError."""
        try:
            return await self._on_disk(partial(plain_version, directory))
        except (WeightStoreError, OSError) as error:
            raise UnfitWeightsError(f"{directory} cannot be read: {error}") from error

    async def prepare(
        self,
        version: int,
        digest: str,
        directory: Path,
        check: Callable[[StagedVersion], None],
    ) -> None:
        """Make a version ready, unless `check`, which may block, raises.

        Raises DigestMismatchError naming the tensor or file, or UnfitWeightsError.
        """
        began = time.monotonic()
        ready = self._prepared.get(version)
        if ready is not None and ready.digest == digest:
            return
        staged = await self._on_disk(partial(self._staging.stage, version, digest, directory))
        try:
            await self._on_disk(partial(check, staged))
        except BaseException:
            await self._release(staged)
            raise
        replaced = self._prepared.pop(version, None)
        self._prepared[version] = staged
        oldest = [old for old in list(self._prepared)[:-PREPARED_LIMIT] if old != self._in_use]
        stale = [self._prepared.pop(old) for old in oldest]
        await self._release(*stale, *([replaced] if replaced else []))
        self.prepare_seconds = time.monotonic() - began

    @contextmanager
    def using(self, version: int) -> Iterator[StagedVersion]:
        """A version that is ready; others made ready meanwhile do not displace it.

        Raises VersionNotPreparedError.
        """
        if version not in self._prepared:
            raise VersionNotPreparedError(
                f"version {version} is not prepared", version=version, prepared=[*self._prepared]
            )
        self._in_use = version
        try:
            yield self._prepared[version]
        finally:
            self._in_use = None

    async def served(self, staged: StagedVersion) -> None:
        """A version that was ready serves: let go of older ones, and of the one before."""
        del self._prepared[staged.version]
        older = [self._prepared.pop(v) for v in list(self._prepared) if v < staged.version]
        before, self.restorable = self.restorable, staged
        await self._release(*older, *([before] if before else []))

    async def close(self) -> None:
        """Let go of all."""
        held = [*self._prepared.values(), *([self.restorable] if self.restorable else [])]
        self._prepared, self.restorable = {}, None
        await self._release(*held)
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _release(self, *versions: StagedVersion) -> None:
        for staged in versions:
            await self._on_disk(partial(self._staging.release, staged))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)
