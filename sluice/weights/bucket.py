"""Versions of weights in an object store: what `WeightStore` is, over keys.

versions/<8 digits>/<file>  the files of a version; `manifest.json` comes last and makes it one
allocated/<8 digits>        one object per number ever given out; names the parent
pins/<8 digits>/<owner>     keeps a version from retention
retiring/<8 digits>         the version is being removed: nobody may pin it any more

An object store has no locks. Who pins writes the pin, then looks for `retiring`; who removes
writes `retiring`, then looks for pins: at least one of the two sees the other.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from sluice import faults
from sluice.weights.assembly import Draft, assemble, base_of
from sluice.weights.errors import (
    DamagedFileError,
    ManifestError,
    MissingFileError,
    StagingLostError,
    VersionExistsError,
    VersionNotFoundError,
)
from sluice.weights.header import Extent, data_start, parse_extents
from sluice.weights.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardFile,
    StoredVersion,
    TensorEntry,
    Versions,
    decode_manifest,
    encode_manifest,
    fields_of,
)
from sluice.weights.objects import ObjectInfo, Objects
from sluice.weights.staging import Staging, close_staging, open_staging, sweep_staging

RETIRING_SECONDS = 3600.0  # after which a remover is long dead; it must not stall for longer
UNFINISHED_SECONDS = 6 * 3600.0  # after which files without a manifest are a dead writer's


class BucketWeightStore(Versions[StoredVersion]):
    """The weights of one policy below a URL. Any number of processes may use it at a time.

    Files are written into `Staging.directory` below `scratch` on this host, or by the ranks of
    other hosts: each calls `upload` with what it wrote. Calls block on the network; besides
    what they say they raise ObjectsError, an OSError.
    """

    def __init__(self, url: str, scratch: Path) -> None:
        self.location = url
        self._objects, self._scratch = Objects(url), scratch
        self._records: dict[int, StoredVersion] = {}

    def allocate(self, parent: int | None) -> Staging:
        """See `WeightStore.allocate`."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        sweep_staging(self._scratch)
        taken = {_number(info.key) for info in self._objects.list("allocated")}
        if parent is not None and parent not in taken:
            raise VersionNotFoundError(parent)
        number = max({*taken, *self.versions()}, default=0) + 1
        marker = json.dumps({"parent": parent}).encode()
        while True:
            try:
                self._objects.put_new(f"allocated/{number:08d}", marker)
                break
            except FileExistsError:
                number += 1
        faults.point("weights.allocated")
        return open_staging(self._scratch, number, parent)

    def upload(self, version: int, path: Path) -> None:
        """Store a file of a version in the making, and remove it here."""
        self._objects.put_file(_key(version, path.name), path)
        path.unlink()

    def commit(
        self,
        staging: Staging,
        shards: Iterable[ShardFile],
        companions: Iterable[Path],
        step: int,
        *,
        expected: Mapping[str, TensorEntry] | Collection[str] | None = None,
        base: int | None = None,
    ) -> StoredVersion:
        """See `WeightStore.commit`. What was not uploaded before is now."""
        if not staging.directory.is_dir():
            raise StagingLostError(staging.version)
        version, shards = staging.version, list(shards)
        if self._objects.exists(_key(version, MANIFEST_NAME)):
            raise VersionExistsError(version)
        for path in sorted(staging.directory.iterdir()):
            self.upload(version, path)
        draft = Draft(
            staging=staging,
            shards=shards,
            companions=companions,
            step=step,
            expected=expected,
            base=base_of(self, shards, base),
        )
        manifest = assemble(draft, lambda name, size: self._header(version, name, size))
        for path in sorted(staging.directory.iterdir()):
            self.upload(version, path)
        faults.point("weights.manifest")
        key, data = _key(version, MANIFEST_NAME), encode_manifest(manifest)
        try:
            self._objects.put_new(key, data)
        except FileExistsError as error:
            if self._objects.get(key) != data:  # else ours: it came, its answer did not
                raise VersionExistsError(version) from error
        close_staging(staging)
        return self._remember(manifest)

    def abort(self, staging: Staging) -> None:
        """Drop a version in the making; its number stays taken."""
        close_staging(staging)
        keys = [info.key for info in self._objects.list(f"versions/{staging.version:08d}")]
        if _key(staging.version, MANIFEST_NAME) not in keys:
            self._objects.delete(keys)

    def get(self, version: int) -> StoredVersion:
        """A committed version; raises VersionNotFoundError, ManifestError or FileDigestError."""
        record = self._records.get(version)
        if record is not None and self._objects.exists(_key(version, MANIFEST_NAME)):
            return record
        return self._remember(self.manifest(version))

    def manifest(self, version: int) -> Manifest:
        """The manifest of a committed version; raises like `get`."""
        try:
            manifest = decode_manifest(self._objects.get(_key(version, MANIFEST_NAME)))
        except FileNotFoundError as error:
            raise VersionNotFoundError(version) from error
        if manifest.version != version:
            raise ManifestError(f"version {version} has the manifest of {manifest.version}")
        return manifest

    def local_file(self, version: int, name: str, scratch: Path) -> Path:
        """A stored file of a version, fetched into the directory `scratch`.

        Raises MissingFileError.
        """
        path = scratch / f"{version:08d}-{name}"
        try:
            self._objects.get_file(_key(version, name), path)
        except FileNotFoundError as error:
            raise MissingFileError(name) from error
        return path

    def parent(self, version: int) -> int | None:
        """The parent of a version ever allocated, removed ones included."""
        try:
            marker = json.loads(self._objects.get(f"allocated/{version:08d}"))
        except FileNotFoundError as error:
            raise VersionNotFoundError(version) from error
        parent: int | None = marker["parent"]
        return parent

    def versions(self) -> Sequence[int]:
        """The numbers of the committed versions, ascending."""
        found = self._objects.list("versions")
        return sorted(_number(info.key) for info in found if info.key.endswith(MANIFEST_NAME))

    def pin(self, version: int, owner: str) -> None:
        """Keep `version` from retention until `owner` unpins it; survives crashes."""
        pin = f"pins/{version:08d}/{quote(owner, safe='')}"
        self._objects.put(pin, b"")
        faults.point("weights.pinned")
        retiring = self._objects.exists(f"retiring/{version:08d}")
        if retiring or not self._objects.exists(_key(version, MANIFEST_NAME)):
            self._objects.delete([pin])
            raise VersionNotFoundError(version)

    def unpin(self, version: int, owner: str) -> None:
        """Forget a pin; one that is not there is no error."""
        self._objects.delete([f"pins/{version:08d}/{quote(owner, safe='')}"])

    def pins(self) -> dict[int, set[str]]:
        """Owners by pinned version."""
        found: dict[int, set[str]] = {}
        for info in self._objects.list("pins"):
            owner = unquote(info.key.rpartition("/")[2])
            found.setdefault(_number(info.key), set()).add(owner)
        return found

    def retain(
        self, keep_last: int, in_use: Collection[int] = (), pinned: Collection[int] = ()
    ) -> Sequence[int]:
        """See `WeightStore.retain`."""
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        versions = self.versions()
        kept = {*versions[-keep_last:], *in_use, *pinned, *self.pins()} & set(versions)
        kept = {needed for version in kept for needed in self._chain_or_itself(version)}
        removed = []
        for version in reversed(versions):  # what is made of others goes before them
            if version in kept:
                continue
            if self._retire(version):
                removed.append(version)
            else:
                kept.update(self._chain_or_itself(version))
        self._remove_unfinished(versions[-1] if versions else 0)
        return removed[::-1]

    def sweep(self) -> Sequence[Path]:
        """Remove what crashed writers of this host left."""
        return sweep_staging(self._scratch) if self._scratch.is_dir() else []

    def _retire(self, version: int) -> bool:
        """Remove a version, unless somebody has pinned it meanwhile."""
        sign = f"retiring/{version:08d}"
        self._objects.put(sign, b"")
        if self._objects.list(f"pins/{version:08d}"):
            self._objects.delete([sign])
            return False
        self._records.pop(version, None)
        self._objects.delete([_key(version, MANIFEST_NAME)])
        faults.point("weights.trashed")
        self._objects.delete(info.key for info in self._objects.list(f"versions/{version:08d}"))
        self._objects.delete([sign])
        return True

    def _remove_unfinished(self, newest: int) -> None:
        """Files that nobody will finish: of a removal that crashed, or of a writer long dead."""
        found = self._objects.list("versions")
        whole = {_number(info.key) for info in found if info.key.endswith(MANIFEST_NAME)}
        signs = self._objects.list("retiring")
        retiring = {_number(info.key) for info in signs}
        gone = [
            info.key
            for info in found
            if (number := _number(info.key)) not in whole
            and (number in retiring or (number < newest and _age(info) > UNFINISHED_SECONDS))
        ]
        self._objects.delete(gone)
        self._objects.delete(
            sign.key
            for sign in signs
            if _number(sign.key) not in whole or _age(sign) > RETIRING_SECONDS
        )

    def _header(self, version: int, name: str, size: int) -> dict[str, Extent]:
        key = _key(version, name)
        try:
            found = self._objects.size(key)
            if found != size:
                raise MissingFileError(name, f"has {found} bytes, not {size}")
            end = data_start(self._objects.get_range(key, 0, 8)) if size >= 8 else 0
            data = self._objects.get_range(key, 0, min(end, size)) if end else b""
        except FileNotFoundError as error:
            raise MissingFileError(name) from error
        extents = parse_extents(data, file_name=name)
        if (position := max((e.end for e in extents.values()), default=end)) != size:
            raise DamagedFileError(name, f"has {size} bytes, not {position}")
        return extents

    def _remember(self, manifest: Manifest) -> StoredVersion:
        record = StoredVersion(**fields_of(manifest))
        self._records[manifest.version] = record
        return record


def _key(version: int, name: str) -> str:
    return f"versions/{version:08d}/{name}"


def _age(info: ObjectInfo) -> float:
    return (datetime.datetime.now(datetime.UTC) - info.modified).total_seconds()


def _number(key: str) -> int:
    return int(key.split("/")[1])
