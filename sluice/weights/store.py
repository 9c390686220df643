"""Versions of weights in a shared directory: immutable, verified, committed in one rename.

<root>/versions/<8 digits>/       a plain HF checkpoint and its manifest.json
<root>/allocated/<8 digits>       one marker per number ever given out; names the parent
<root>/staging/<version>-<nonce>  a version in the making, beside its owner's lock
<root>/pins/<version>/<owner>     keeps a version from retention
<root>/trash/                     versions on their way out
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from sluice import faults
from sluice.durable import locked, sync_path, write_new
from sluice.weights.assembly import Draft, assemble, base_of, file_header
from sluice.weights.checkpoint import companion_files, describe_shard, shard_paths
from sluice.weights.errors import (
    ManifestError,
    MissingFileError,
    StagingLostError,
    VersionExistsError,
    VersionNotFoundError,
)
from sluice.weights.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardFile,
    StoredVersion,
    TensorEntry,
    Versions,
    encode_manifest,
    fields_of,
    read_manifest,
)
from sluice.weights.staging import Staging, close_staging, open_staging, sweep_staging

__all__ = [
    "ShardFile",
    "Staging",
    "TensorEntry",
    "VersionRecord",
    "WeightStore",
    "companion_files",
    "import_checkpoint",
]


@dataclass(frozen=True, kw_only=True)
class VersionRecord(StoredVersion):
    """A version in a directory, which loads with `from_pretrained` unless it has a `base`."""

    directory: Path


class WeightStore(Versions[VersionRecord]):
    """The weights of one policy. Any number of processes may use one directory at a time.

    Calls block on the disk; asynchronous callers use a thread. With `durable=False` nothing
    is synced: what a crash of the machine (not of a process) leaves is then undefined.
    """

    def __init__(self, root: Path | str, *, durable: bool = True) -> None:
        self.root, self.location = Path(root), str(root)
        self.durable = durable
        self._records: dict[int, VersionRecord] = {}
        self._last_allocated = 0
        for name in ("versions", "allocated", "staging", "pins", "trash"):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    def allocate(self, parent: int | None) -> Staging:
        """Take the next version number, for good, and a directory to write its files into.

        `parent` is the version that was trained on (None: a first model); raises
        VersionNotFoundError where no such number was ever allocated.
        """
        self.sweep()
        if parent is not None and not (
            self._marker(parent).exists() or self._directory(parent).exists()
        ):
            raise VersionNotFoundError(parent)
        number = self._next_number()
        marker = json.dumps({"parent": parent}).encode()
        while True:
            try:
                write_new(self._marker(number), marker, sync=self.durable)
                break
            except FileExistsError:
                number += 1
        self._sync(self.root / "allocated")
        faults.point("weights.allocated")
        self._last_allocated = number
        return open_staging(self.root / "staging", number, parent)

    def commit(
        self,
        staging: Staging,
        shards: Iterable[ShardFile],
        companions: Iterable[Path],
        step: int,
        *,
        expected: Mapping[str, TensorEntry] | Collection[str] | None = None,
        base: int | None = None,
    ) -> VersionRecord:
        """Make the staged files the version `staging.version`, all at once.

        `companions` (config, tokenizer ...; see `companion_files`) are copied in. `expected`
        names the tensors the model has, with dtypes and shapes if it is a mapping. `base` is the
        version that deltas among the shards are against: it must stay until the return, and is
        kept by `retain` for as long as this version. Without deltas it has no effect. Raises
        DuplicateTensorError, DuplicateFileError, MissingTensorError, UnexpectedTensorError,
        MissingFileError, InvalidCheckpointError, StagingLostError, VersionExistsError, or
        VersionNotFoundError for a base that is gone; then the staging directory stays for a
        correction or an abort.
        """
        if not staging.directory.is_dir():
            raise StagingLostError(staging.version)
        shards = list(shards)
        draft = Draft(
            staging=staging,
            shards=shards,
            companions=companions,
            step=step,
            expected=expected,
            base=base_of(self, shards, base),
        )
        manifest = assemble(draft, lambda name, size: file_header(staging.directory / name, size))
        for name in manifest.stored:
            self._sync(staging.directory / name)
        (staging.directory / MANIFEST_NAME).unlink(missing_ok=True)
        write_new(staging.directory / MANIFEST_NAME, encode_manifest(manifest), sync=self.durable)
        self._sync(staging.directory)
        faults.point("weights.manifest")
        return self._publish(staging, manifest)

    def abort(self, staging: Staging) -> None:
        """Drop a version in the making; its number stays taken."""
        close_staging(staging)

    def get(self, version: int) -> VersionRecord:
        """A committed version; raises VersionNotFoundError, ManifestError or FileDigestError."""
        record = self._records.get(version)
        if record is not None and record.directory.exists():
            return record
        return self._remember(self.manifest(version))

    def manifest(self, version: int) -> Manifest:
        """The manifest of a committed version; raises like `get`."""
        try:
            manifest = read_manifest(self._directory(version))
        except FileNotFoundError as error:
            raise VersionNotFoundError(version) from error
        if manifest.version != version:
            raise ManifestError(f"version {version} has the manifest of {manifest.version}")
        return manifest

    def local_file(self, version: int, name: str, scratch: Path) -> Path:
        """A stored file of a version on this host; it may be made in the directory `scratch`.

        Raises MissingFileError or VersionNotFoundError.
        """
        path = self._directory(version) / name
        if not path.is_file():
            if not path.parent.is_dir():
                raise VersionNotFoundError(version)
            raise MissingFileError(name)
        return path

    def parent(self, version: int) -> int | None:
        """The parent of a version ever allocated, removed ones included."""
        try:
            parent: int | None = json.loads(self._marker(version).read_bytes())["parent"]
        except (FileNotFoundError, ValueError):  # a crash may leave an empty marker
            return self.manifest(version).parent
        return parent

    def versions(self) -> Sequence[int]:
        """The numbers of the committed versions, ascending; reads no manifest."""
        return sorted(int(name) for name in os.listdir(self.root / "versions") if name.isdigit())

    def pin(self, version: int, owner: str) -> None:
        """Keep `version` from retention until `owner` unpins it; survives crashes."""
        with locked(self.root / "retain.lock", shared=True):
            if not self._directory(version).exists():
                raise VersionNotFoundError(version)
            pins = self.root / "pins" / f"{version:08d}"
            pins.mkdir(exist_ok=True)
            (pins / quote(owner, safe="")).touch()
            self._sync(pins)
            self._sync(pins.parent)
            faults.point("weights.pinned")

    def unpin(self, version: int, owner: str) -> None:
        """Forget a pin; one that is not there is no error."""
        (self.root / "pins" / f"{version:08d}" / quote(owner, safe="")).unlink(missing_ok=True)

    def pins(self) -> dict[int, set[str]]:
        """Owners by pinned version."""
        found = {}
        for directory in (self.root / "pins").iterdir():
            try:
                owners = {unquote(name) for name in os.listdir(directory)}
            except FileNotFoundError:  # of a version removed since
                continue
            if owners:
                found[int(directory.name)] = owners
        return found

    def retain(
        self, keep_last: int, in_use: Collection[int] = (), pinned: Collection[int] = ()
    ) -> Sequence[int]:
        """Remove versions but the newest `keep_last`, those in use and the pinned ones.

        The versions that those are made of stay too. Pin files count besides `pinned`. Returns
        the numbers removed; their parents stay known. A reader that has a removed version's
        files open or mapped keeps them.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        with locked(self.root / "retain.lock"):
            versions = self.versions()
            kept = {*versions[-keep_last:], *in_use, *pinned, *self.pins()} & set(versions)
            kept = {needed for version in kept for needed in self._chain_or_itself(version)}
            removed = [version for version in versions if version not in kept]
            for version in removed:
                trash = self.root / "trash" / f"{version:08d}-{secrets.token_hex(8)}"
                self._directory(version).rename(trash)
                faults.point("weights.trashed")
                self._records.pop(version, None)
            self._sync(self.root / "versions")
            for directory in (self.root / "pins").iterdir():  # nobody pins while the lock is held
                if not self._directory(int(directory.name)).exists() and not os.listdir(directory):
                    directory.rmdir()
        for directory in (self.root / "trash").iterdir():
            shutil.rmtree(directory, ignore_errors=True)
        return removed

    def sweep(self) -> Sequence[Path]:
        """Remove what crashed writers left; a live writer's directory is locked and stays."""
        return sweep_staging(self.root / "staging")

    def _publish(self, staging: Staging, manifest: Manifest) -> VersionRecord:
        target, base = self._directory(staging.version), manifest.base
        try:
            with locked(self.root / "retain.lock", shared=True):  # a base stays, or is missed
                if base is not None and not self._directory(base).exists():
                    raise VersionNotFoundError(base)
                staging.directory.rename(target)
        except FileNotFoundError as error:
            raise StagingLostError(staging.version) from error
        except OSError as error:
            if target.exists():
                raise VersionExistsError(staging.version) from error
            raise
        self._sync(target.parent)
        faults.point("weights.renamed")
        close_staging(staging)
        return self._remember(manifest)

    def _remember(self, manifest: Manifest) -> VersionRecord:
        directory = self._directory(manifest.version)
        record = VersionRecord(**fields_of(manifest), directory=directory)
        self._records[manifest.version] = record
        return record

    def _next_number(self) -> int:
        if not self._last_allocated:
            names = [*os.listdir(self.root / "allocated"), *os.listdir(self.root / "versions")]
            self._last_allocated = max((int(name) for name in names if name.isdigit()), default=0)
        return self._last_allocated + 1

    def _directory(self, version: int) -> Path:
        return self.root / "versions" / f"{version:08d}"

    def _marker(self, version: int) -> Path:
        return self.root / "allocated" / f"{version:08d}"

    def _sync(self, path: Path) -> None:
        if self.durable:
            sync_path(path)


def import_checkpoint(
    store: WeightStore, directory: Path | str, parent: int | None, step: int, *, link: bool = False
) -> VersionRecord:
    """Copy a HF checkpoint in safetensors into the store as a new version.

    With `link` the shards become hard links: no bytes are copied, but whoever writes into the
    source file damages the version (readers then refuse it). Raises MissingFileError or
    InvalidCheckpointError where the directory is no complete checkpoint.
    """
    source = Path(directory)
    paths = shard_paths(source)
    staging = store.allocate(parent)
    try:
        for path in paths:
            target = staging.directory / path.name
            if link:
                target.hardlink_to(path.resolve())
            else:
                shutil.copyfile(path, target)
        shards = [describe_shard(staging.directory / path.name) for path in paths]
        return store.commit(staging, shards, companion_files(source), step)
    except BaseException:
        store.abort(staging)
        raise
