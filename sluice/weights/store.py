"""Versions of weights in a directory or a bucket: immutable, verified, committed in one step."""

from __future__ import annotations

import builtins
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from sluice import faults
from sluice.place import is_bucket, is_plain_name
from sluice.weights.adapter import AdapterSpec
from sluice.weights.checkpoint import Extent, data_start, parse_header
from sluice.weights.errors import (
    InvalidCheckpointError,
    ManifestError,
    MissingFileError,
    MixedKindsError,
    StagingLostError,
    VersionExistsError,
    VersionNotFoundError,
    WeightStoreError,
)
from sluice.weights.manifest import (
    MANIFEST_NAME,
    DeltaFile,
    Manifest,
    ShardFile,
    TensorEntry,
    decode_manifest,
    delta_name,
    encode_manifest,
    seal,
    unseal,
)
from sluice.weights.objects import DirectoryObjects, Objects
from sluice.weights.staging import (
    Staging,
    assemble,
    check_shards,
    close_staging,
    open_staging,
    sweep_staging,
)

REMEMBERED = 64  # versions whose records a process keeps: it may read one of every step


@dataclass(frozen=True)
class Announcement:
    """A file of a version in the making, in a folder of the store.

    `base` is the version that a delta is against; older releases do not say.
    """

    version: int
    folder: str
    shard: ShardFile
    base: int | None = None

    @property
    def stored_name(self) -> str:
        return delta_name(self.shard.file_name) if self.shard.delta else self.shard.file_name


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """A version in a store, in `directory` if that is one: an HF checkpoint.

    With a `base` it holds what changed since that version; a `HostCache` makes the whole. An
    `adapter` is no checkpoint: its directory is one of peft's. One that is `promised` has no
    directory yet. `line` names the adapter of several that it is a version of.
    """

    version: int
    digest: str
    parent: int | None
    step: int
    created: str
    base: int | None
    directory: Path | None
    adapter: AdapterSpec | None = None
    promised: bool = False
    line: str = ""


KEPT_NUMBERS = 256  # markers of versions that are gone, or were never finished


class WeightStore:
    """The weights of one policy, or of several adapters of one base.

    Any number of processes may use it at a time.

    Calls block on the disk or the network; asynchronous callers use a thread. Besides what they
    say they raise OSError.
    """

    def __init__(
        self, location: Path | str, *, durable: bool = True, scratch: Path | None = None
    ) -> None:
        """Open a directory, `file:///directory`, or `s3://bucket/prefix` (needs the extra `s3`).

        With `durable=False` nothing is synced to the disk. `scratch` is a directory of this
        host for files on their way to a bucket; the default is below the system's temporary
        directory. Raises ValueError for a URL of another kind.
        """
        self.location = str(location)
        self._objects: Objects
        if is_bucket(self.location):
            from sluice.weights.bucket import BucketObjects  # nobody else needs obstore

            self._objects = BucketObjects(self.location, scratch)
        else:
            root = Path(self.location.removeprefix("file://"))
            self._objects = DirectoryObjects(root, durable=durable)
        self._records: dict[int, tuple[object, StoredVersion]] = {}  # and whose: the manifest's
        self._lineage: dict[int, tuple[str, int | None]] = {}  # line and base, once asked for

    def allocate(self, parent: int | None) -> Staging:
        """Take the next version number, for good, and a directory to write its files into.

        `parent` is the version that was trained on (None: a first model); raises
        VersionNotFoundError where no such number was ever allocated.
        """
        self.sweep()
        taken = {_number(key) for key in self._objects.keys("allocated")}
        taken |= self._objects.versions()
        if parent is not None and not 0 < parent <= max(taken, default=0):
            raise VersionNotFoundError(parent)
        number = max(taken, default=0) + 1
        marker = json.dumps({"parent": parent}).encode()
        while True:
            try:
                self._objects.put_new(f"allocated/{number:08d}", marker)
                break
            except FileExistsError:
                number += 1
        faults.point("weights.allocated")
        return open_staging(self._objects.staging, number, parent)

    def upload(self, version: int, path: Path) -> None:
        """Move a file of a version in the making into the bucket; for ranks of other hosts."""
        self._objects.take_file(_key(version, path.name), path)

    def announce(
        self,
        version: int,
        shard: ShardFile,
        directory: Path | None = None,
        *,
        base: int | None = None,
    ) -> None:
        """Say that a file of a version in the making is written, for engines to take it early.

        It lies in the staging `directory`; None means that it was uploaded. `base` is the version
        that deltas are against. Nothing depends on
        it: engines compare with the manifest all that they took.
        """
        folder = f"versions/{version:08d}" if directory is None else f"staging/{directory.name}"
        tensors = {name: vars(tensor) for name, tensor in shard.tensors.items()}
        delta = None if shard.delta is None else vars(shard.delta)
        described = {**vars(shard), "tensors": tensors, "delta": delta}
        document = {"folder": folder, "shard": described, "base": base}
        with suppress(FileExistsError):
            self._objects.put_new(
                f"announced/{version:08d}/{shard.file_name}", seal(document, "digest")
            )

    def announced(self, version: int, known: Collection[str] = ()) -> builtins.list[Announcement]:
        """Return the files of a version in the making that are written, but for those `known`."""
        found = []
        for key in self._objects.keys(f"announced/{version:08d}"):
            if key.rpartition("/")[2] in known:
                continue
            with suppress(FileNotFoundError, WeightStoreError, ValueError, KeyError, TypeError):
                # one that is still being written is read again
                found.append(_read_announcement(version, self._objects.get(key), key))
        return found

    def announced_file(self, announcement: Announcement, scratch: Path) -> Path:
        """Return an announced file on this host; it may be fetched into `scratch`.

        Raises MissingFileError for one that is gone with its version.
        """
        name = announcement.stored_name
        for folder in (announcement.folder, f"versions/{announcement.version:08d}"):
            path = scratch / f"{announcement.version:08d}-{name}"
            with suppress(FileNotFoundError):
                return self._objects.local_file(f"{folder}/{name}", path)
        raise MissingFileError(name)

    def has(self, version: int) -> bool:
        """Return whether a version is committed."""
        return self._has(version)

    def commit(
        self,
        staging: Staging,
        shards: Iterable[ShardFile],
        companions: Iterable[Path],
        step: int,
        *,
        expected: Mapping[str, TensorEntry] | Collection[str] | None = None,
        base: int | None = None,
        adapter: AdapterSpec | None = None,
        line: str = "",
    ) -> StoredVersion:
        """Make the staged files the version `staging.version`, all at once.

        `companions` (config, tokenizer ...; see `companion_files`) are copied in. `expected`
        names the tensors the model has, with dtypes and shapes if it is a mapping. `base` is the
        version that deltas among the shards are against: it must stay until the return, and is
        kept by `retain` for as long as this version. Without deltas it has no effect. `adapter`
        says that the tensors are one, and `line` which of several. Raises MixedKindsError,
        InvalidAdapterError, DuplicateTensorError, DuplicateFileError, MissingTensorError,
        UnexpectedTensorError, MissingFileError, InvalidCheckpointError, StagingLostError,
        VersionExistsError, or VersionNotFoundError for a base that is gone; then the staging
        directory stays for a correction or an abort.
        """
        self._check_open(staging, is_adapter=adapter is not None)
        shards, folder = list(shards), self._objects.draft(staging)
        self._take_files(staging, folder)
        based = base is not None and any(shard.delta for shard in shards)
        manifest = assemble(
            staging,
            shards,
            companions,
            step,
            expected,
            self.manifest(base) if based and base is not None else None,
            lambda name, size: self._read_header(folder, name, size),
            adapter,
            line,
        )
        self._take_files(staging, folder)
        return self._commit(staging, manifest)

    def promise(
        self, staging: Staging, shards: Iterable[ShardFile], companions: Iterable[Path], step: int
    ) -> StoredVersion:
        """Say what a version is whose `shards` are written later, for engines to compare with.

        `companions` are copied in. Others find it by `find`, and may pin it; it is no version
        before `fulfil`, and none ever where that is not called: `abort` takes the promise back,
        and once its owner is gone `sweep` does. Raises as `commit` does, and
        InvalidCheckpointError for a delta.
        """
        self._check_open(staging, is_adapter=False)
        shards = list(shards)
        if changed := [shard.file_name for shard in shards if shard.delta]:
            raise InvalidCheckpointError(f"{changed[0]!r} is a delta, which cannot be promised")
        manifest = assemble(staging, shards, companions, step, None, None, None)
        key, data = _promise(staging.version), encode_manifest(manifest)
        try:
            self._objects.put_new(key, data)
        except FileExistsError as error:
            if self._objects.get(key) != data:  # else ours: it came, its answer did not
                raise VersionExistsError(staging.version) from error
        faults.point("weights.promised")
        return self._describe(manifest, promised=True)

    def fulfil(self, staging: Staging) -> StoredVersion:
        """Make the staged files the version that was promised, all at once.

        Raises VersionNotFoundError where nothing was, StagingLostError, VersionExistsError,
        MissingFileError or InvalidCheckpointError for files that are not as promised.
        """
        if not staging.directory.is_dir():
            raise StagingLostError(staging.version)
        manifest = self._promised(staging.version)
        if manifest is None:
            raise VersionNotFoundError(staging.version)
        folder = self._objects.draft(staging)
        self._take_files(staging, folder)
        check_shards(manifest.shards(), lambda name, size: self._read_header(folder, name, size))
        record = self._commit(staging, manifest)
        self._objects.delete([_promise(staging.version)])
        return record

    def _check_open(self, staging: Staging, *, is_adapter: bool) -> None:
        """Raises StagingLostError, VersionExistsError or MixedKindsError."""
        if not staging.directory.is_dir():
            raise StagingLostError(staging.version)
        if self._has(staging.version):
            raise VersionExistsError(staging.version)
        self.check_kind(staging.version, is_adapter=is_adapter)

    def _commit(self, staging: Staging, manifest: Manifest) -> StoredVersion:
        with self._objects.guarded(alone=False):  # a base stays, or is missed
            if manifest.base is not None and not self._has(manifest.base):
                raise VersionNotFoundError(manifest.base)
            try:
                self._objects.commit(staging, encode_manifest(manifest))
            except FileExistsError as error:
                raise VersionExistsError(staging.version) from error
            except FileNotFoundError as error:
                raise StagingLostError(staging.version) from error
        close_staging(staging)
        self._objects.delete(self._objects.keys(f"announced/{staging.version:08d}"))
        return self._remember(manifest, self._mark(staging.version))

    def check_kind(self, version: int, *, is_adapter: bool) -> None:
        """Raise MixedKindsError where the newest version is not of the kind of the next one."""
        try:
            newest = self.latest()
        except WeightStoreError:  # there is none before it, or none that anybody can read
            return
        if (newest.adapter is not None) is not is_adapter:
            raise MixedKindsError(version, newest.version, is_adapter=is_adapter)

    def abort(self, staging: Staging) -> None:
        """Drop a version in the making; its number stays taken. May be repeated."""
        self._objects.delete(self._objects.keys(f"announced/{staging.version:08d}"))
        self._objects.delete([_promise(staging.version)])
        close_staging(staging)
        if not self._has(staging.version):
            self._objects.delete(self._objects.keys(self._objects.draft(staging)))

    def get(self, version: int) -> StoredVersion:
        """Return a committed version; raises VersionNotFoundError, ManifestError or
        FileDigestError."""
        mark = self._mark(version)  # first: a store may be made anew, with other versions
        known = self._records.get(version)
        if known is not None and known[0] == mark:
            return known[1]
        return self._remember(self.manifest(version), mark)

    def find(self, version: int) -> StoredVersion:
        """Return a version that is committed, or promised; raises like `get`."""
        promised = self._promised(version)  # first: it goes when the version is committed
        return self.get(version) if promised is None else self._describe(promised, promised=True)

    def expected(self, version: int) -> Manifest:
        """Read the manifest of a version that is committed, or promised; raises like `get`."""
        promised = self._promised(version)
        return self.manifest(version) if promised is None else promised

    def _promised(self, version: int) -> Manifest | None:
        try:
            return _decode(version, self._objects.get(_promise(version)))
        except FileNotFoundError:
            return None

    def manifest(self, version: int) -> Manifest:
        """Read the manifest of a committed version; raises like `get`."""
        try:
            return _decode(version, self._objects.get(_key(version, MANIFEST_NAME)))
        except FileNotFoundError as error:
            raise VersionNotFoundError(version) from error

    def local_file(self, version: int, name: str, scratch: Path) -> Path:
        """Return a stored file of a version on this host; it may be fetched into `scratch`.

        Raises MissingFileError or VersionNotFoundError.
        """
        try:
            return self._objects.local_file(_key(version, name), scratch / f"{version:08d}-{name}")
        except FileNotFoundError as error:
            if self._has(version):
                raise MissingFileError(name) from error
            raise VersionNotFoundError(version) from error

    def parent(self, version: int) -> int | None:
        """Return the parent of a version ever allocated, removed ones included."""
        try:
            marker = json.loads(self._objects.get(f"allocated/{version:08d}"))
        except (FileNotFoundError, ValueError):  # a crash may leave an empty marker
            return self.manifest(version).parent
        parent: int | None = marker["parent"]
        return parent

    def versions(self) -> Sequence[int]:
        """Return the numbers of the committed versions, ascending; reads no manifest."""
        return sorted(self._objects.versions())

    def list(self) -> builtins.list[StoredVersion]:
        """Return the committed versions, ascending."""
        records = []
        for version in self.versions():
            with suppress(VersionNotFoundError):  # removed since
                records.append(self.get(version))
        return records

    def latest(self) -> StoredVersion:
        """Return the committed version with the highest number; raises VersionNotFoundError."""
        for version in reversed(self.versions()):
            with suppress(VersionNotFoundError):
                return self.get(version)
        raise VersionNotFoundError(None)

    def chain(self, version: int) -> Sequence[int]:
        """Return the versions that `version` is made of, itself first, up to one without a base.

        Raises like `get`.
        """
        versions = [version]
        while (base := self.get(versions[-1]).base) is not None:
            if base >= versions[-1]:
                raise ManifestError(f"version {versions[-1]} has the base {base}, no older one")
            versions.append(base)
        return versions

    def pin(self, version: int, owner: str) -> None:
        """Keep `version` from retention until `owner` unpins it; survives crashes.

        One that is promised can be pinned too. Raises VersionNotFoundError.
        """
        pin = _pin(version, owner)
        with self._objects.guarded(alone=False):
            if not self._is_known(version):
                raise VersionNotFoundError(version)
            with suppress(FileExistsError):
                self._objects.put_new(pin, b"")
            faults.point("weights.pinned")
            if self._objects.is_retiring(version) or not self._is_known(version):
                self._objects.delete([pin])
                raise VersionNotFoundError(version)

    def unpin(self, version: int, owner: str) -> None:
        """Forget a pin; one that is not there is no error."""
        self._objects.delete([_pin(version, owner)])

    def pins(self) -> dict[int, set[str]]:
        """Return the owners by pinned version."""
        owners: dict[int, set[str]] = {}
        for key in self._objects.keys("pins"):
            owners.setdefault(_number(key), set()).add(unquote(key.rpartition("/")[2]))
        return owners

    def retain(
        self, keep_last: int, in_use: Collection[int] = (), pinned: Collection[int] = ()
    ) -> Sequence[int]:
        """Remove versions but the newest `keep_last` of each line, those in use, the pinned ones.

        The versions that those are made of stay too. Pin files count besides `pinned`. Returns
        the numbers removed; their parents stay known. A reader that has a removed version's
        files open or mapped keeps them. The parents of all but the last KEPT_NUMBERS are forgotten.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        removed = []
        with self._objects.guarded(alone=True):
            versions = self.versions()
            self._learn_lineage(versions)
            wanted = {*self._newest(versions, keep_last), *in_use, *pinned, *self.pins()} & set(
                versions
            )
            kept = {needed for version in wanted for needed in self._chain_or_itself(version)}
            for version in reversed(versions):  # what is made of others goes before them
                if version in kept:
                    continue
                if self._objects.remove(version):
                    self._records.pop(version, None)
                    removed.append(version)
                else:
                    kept.update(self._chain_or_itself(version))
        self._objects.clear()
        self._forget_announcements(max(versions, default=0))
        self._forget_numbers(set(versions) - set(removed))
        return removed[::-1]

    def _learn_lineage(self, versions: Sequence[int]) -> None:
        """Read what these versions are of; each once, for a store may keep thousands."""
        known = self._lineage.keys() & set(versions)
        self._lineage = {version: self._lineage[version] for version in known}
        for version in versions:
            if version not in known:
                with suppress(WeightStoreError):  # damaged, or gone since
                    record = self.get(version)
                    self._lineage[version] = record.line, record.base

    def _newest(self, versions: Sequence[int], count: int) -> Iterable[int]:
        """Return the newest `count` versions of each line, of all that are there."""
        lines: dict[str, builtins.list[int]] = {}
        for version in versions:
            line, _ = self._lineage.get(version, ("", None))
            lines.setdefault(line, []).append(version)
        return (version for line in lines.values() for version in line[-count:])

    def _forget_announcements(self, newest: int) -> None:
        """Remove what writers that died have announced of versions before `newest`."""
        keys = self._objects.keys("announced")
        self._objects.delete([key for key in keys if _number(key) < newest])

    def _forget_numbers(self, kept: Collection[int]) -> None:
        """Remove the markers of old numbers; none is given out again, for the newest stay."""
        markers = {_number(key): key for key in self._objects.keys("allocated")}
        old = sorted(markers.keys() - set(kept))[:-KEPT_NUMBERS]
        self._objects.delete([markers[number] for number in old])

    def sweep(self) -> Sequence[Path]:
        """Remove what crashed writers left, promises too; a live writer's directory is locked and
        stays."""
        removed = sweep_staging(self._objects.staging)
        self._objects.delete(self._objects.abandoned_promises())
        return removed

    def _is_known(self, version: int) -> bool:
        """Whether it is promised or, since promises go when they are kept, committed."""
        return self._objects.exists(_promise(version)) or self._has(version)

    def _mark(self, version: int) -> object:
        """Return which manifest a version has. Raises VersionNotFoundError."""
        try:
            return self._objects.mark(_key(version, MANIFEST_NAME))
        except FileNotFoundError as error:
            raise VersionNotFoundError(version) from error

    def _has(self, version: int) -> bool:
        return self._objects.exists(_key(version, MANIFEST_NAME))

    def _take_files(self, staging: Staging, folder: str) -> None:
        """Make what is staged objects of the draft, which in a directory it is already."""
        for path in sorted(staging.directory.iterdir()):
            self._objects.take_file(f"{folder}/{path.name}", path)

    def _read_header(self, folder: str, name: str, size: int) -> dict[str, Extent]:
        """Read the header of a safetensors file of `size` bytes. Raises MissingFileError."""
        key = f"{folder}/{name}"
        try:
            stored = self._objects.size(key)
            if stored != size:
                raise MissingFileError(name, f"has {stored} bytes, not {size}")
            data = self._objects.get_range(key, 0, 8) if size >= 8 else b""
            if data:
                data = self._objects.get_range(key, 0, min(data_start(data), size))
        except FileNotFoundError as error:
            raise MissingFileError(name) from error
        return parse_header(data, file_name=name, size=size)

    def _chain_or_itself(self, version: int) -> Sequence[int]:
        """As `chain`; itself where that is damaged: nobody can read it, whatever is kept."""
        versions = [version]
        while (found := self._lineage.get(versions[-1])) is not None:
            base = found[1]
            if base is None:
                return versions
            if base >= versions[-1]:
                break
            versions.append(base)
        return [version]

    def _describe(self, manifest: Manifest, *, promised: bool = False) -> StoredVersion:
        return StoredVersion(
            version=manifest.version,
            digest=manifest.digest,
            parent=manifest.parent,
            step=manifest.step,
            created=manifest.created,
            base=manifest.base,
            directory=None if promised else self._objects.directory(manifest.version),
            adapter=manifest.adapter,
            promised=promised,
            line=manifest.line,
        )

    def _remember(self, manifest: Manifest, mark: object) -> StoredVersion:
        record = self._describe(manifest)
        self._records[manifest.version] = mark, record
        while len(self._records) > REMEMBERED:  # others remove versions, and tell nobody
            self._records.pop(next(iter(self._records)), None)
        return record


def _read_announcement(version: int, data: bytes, key: str) -> Announcement:
    document = unseal(data, "digest", key)
    shard = document["shard"]
    tensors = {
        name: TensorEntry(t["dtype"], tuple(t["shape"]), t["digest"])
        for name, t in shard["tensors"].items()
    }
    delta = DeltaFile(**shard["delta"]) if shard["delta"] else None
    found = ShardFile(shard["file_name"], shard["size"], shard["digest"], tensors, delta)
    if found.file_name != key.rpartition("/")[2] or not is_plain_name(found.file_name):
        raise ValueError(f"{key} announces {found.file_name!r}")
    return Announcement(version, document["folder"], found, document.get("base"))


def _decode(version: int, data: bytes) -> Manifest:
    try:
        manifest = decode_manifest(data)
    except ManifestError as error:
        raise ManifestError(f"version {version}: {error}") from error
    if manifest.version != version:
        raise ManifestError(f"version {version} has the manifest of {manifest.version}")
    return manifest


def _promise(version: int) -> str:
    return f"promised/{version:08d}"


def _key(version: int, name: str) -> str:
    return f"versions/{version:08d}/{name}"


def _pin(version: int, owner: str) -> str:
    return f"pins/{version:08d}/{quote(owner, safe='')}"


def _number(key: str) -> int:
    return int(key.split("/")[1])
