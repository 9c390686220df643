"""Files of a weight store in a bucket.

versions/<8 digits>/<file>  the files of a version; `manifest.json` comes last and makes it one
allocated/<8 digits>        one object per number given out lately; names the parent
announced/<8 digits>/<file> a file of a version in the making is there; digests of it
promised/<8 digits>         the manifest of a version whose files come later
pins/<8 digits>/<owner>     keeps a version from retention
retiring/<8 digits>         the version is being removed: nobody may pin it any more

An object store has no locks. Who pins writes the pin, then looks for `retiring`; who removes
writes `retiring`, then looks for pins: at least one of the two sees the other. Nor does it tell
whether the writer of a promised version lives: who publishes says so, and an old promise is
nobody's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from sluice import faults
from sluice.bucket import ObjectBucket, ObjectInfo
from sluice.weights.manifest import MANIFEST_NAME
from sluice.weights.objects import Objects
from sluice.weights.staging import Staging

RETIRING_SECONDS = 3600.0  # after which a remover is long dead; it must not stall for longer
UNFINISHED_SECONDS = 6 * 3600.0  # after which files without a manifest are a dead writer's


class BucketObjects(ObjectBucket, Objects):
    """The objects below a URL such as `s3://bucket/prefix`; other errors are ObjectsErrors."""

    def __init__(self, url: str, scratch: Path | None = None) -> None:
        """`scratch` is a directory of this host, by default a temporary one.

        Raises ValueError for a URL that names no bucket.
        """
        super().__init__(url)
        self.staging = scratch or Path(tempfile.gettempdir()) / f"sluice-weights-{os.getuid()}"

    def mark(self, key: str) -> object:
        return self.info(key)

    def versions(self) -> set[int]:
        return {info.version for info in self.list("versions") if _is_manifest(info)}

    def directory(self, version: int) -> None:
        return None

    def draft(self, staging: Staging) -> str:
        return _folder(staging.version)

    def commit(self, staging: Staging, manifest: bytes) -> None:
        faults.point("weights.manifest")
        key = f"{_folder(staging.version)}/{MANIFEST_NAME}"
        try:
            self.put_new(key, manifest)
        except FileExistsError:
            if self.get(key) != manifest:  # else ours: it came, its answer did not
                raise

    def guarded(self, *, alone: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def is_retiring(self, version: int) -> bool:
        return self.exists(f"retiring/{version:08d}")

    def remove(self, version: int) -> bool:
        sign = f"retiring/{version:08d}"
        self.put(sign, b"")
        if self.list(f"pins/{version:08d}"):
            self.delete([sign])
            return False
        self.delete([f"{_folder(version)}/{MANIFEST_NAME}"])
        faults.point("weights.trashed")
        self.delete(self.keys(_folder(version)))
        self.delete([sign])
        return True

    def abandoned_promises(self) -> Sequence[str]:
        kept = self.versions()
        return [
            info.key
            for info in self.list("promised")
            if info.version in kept or info.age > UNFINISHED_SECONDS
        ]

    def clear(self) -> None:
        files, signs = self.list("versions"), self.list("retiring")
        committed = {info.version for info in files if _is_manifest(info)}
        newest, retiring = max(committed, default=0), {sign.version for sign in signs}
        self.delete(
            info.key
            for info in files
            if info.version not in committed
            and (
                info.version in retiring
                or (info.version < newest and info.age > UNFINISHED_SECONDS)
            )
        )
        self.delete(
            sign.key
            for sign in signs
            if sign.version not in committed or sign.age > RETIRING_SECONDS
        )


def _folder(version: int) -> str:
    return f"versions/{version:08d}"


def _is_manifest(info: ObjectInfo) -> bool:
    return info.key.endswith(MANIFEST_NAME)
