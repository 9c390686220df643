"""Files of a weight store in an object store, through `obstore`.

versions/<8 digits>/<file>  the files of a version; `manifest.json` comes last and makes it one
allocated/<8 digits>        one object per number given out lately; names the parent
announced/<8 digits>/<file> a file of a version in the making is there; digests of it
pins/<8 digits>/<owner>     keeps a version from retention
retiring/<8 digits>         the version is being removed: nobody may pin it any more

An object store has no locks. Who pins writes the pin, then looks for `retiring`; who removes
writes `retiring`, then looks for pins: at least one of the two sees the other.

Credentials, endpoint and region come from the environment, as for any S3 client (AWS_*; see
obstore's S3Config). Every call has a deadline.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from sluice import faults
from sluice.weights.manifest import MANIFEST_NAME
from sluice.weights.objects import Objects
from sluice.weights.staging import Staging

REQUEST_SECONDS = 300  # one request, a part of 5 to 10 MiB at most
RETRY_SECONDS = 60  # after which a failing request is tried no more
DOWNLOAD_BYTES = 8 << 20
RETIRING_SECONDS = 3600.0  # after which a remover is long dead; it must not stall for longer
UNFINISHED_SECONDS = 6 * 3600.0  # after which files without a manifest are a dead writer's
SCHEMES = ("s3://", "memory://")  # memory: of this object, for tests


class ObjectsError(OSError):
    """The bucket cannot be reached, or refuses."""


@dataclass(frozen=True)
class ObjectInfo:
    """A key below the prefix, its bytes, and when it was written (UTC)."""

    key: str
    size: int
    modified: datetime.datetime

    @property
    def version(self) -> int:
        return int(self.key.split("/")[1])

    @property
    def age(self) -> float:
        """Seconds since it was written."""
        return (datetime.datetime.now(datetime.UTC) - self.modified).total_seconds()


class BucketObjects(Objects):
    """The objects below a URL such as `s3://bucket/prefix`; other errors are ObjectsErrors."""

    def __init__(self, url: str, scratch: Path | None = None) -> None:
        """`scratch` is a directory of this host, by default a temporary one.

        Raises ValueError for a URL that names no bucket.
        """
        if not url.startswith(SCHEMES):
            raise ValueError(f"{url!r} is neither a directory nor an s3:// URL")
        try:
            self._store = from_url(
                url,
                client_options={
                    "timeout": datetime.timedelta(seconds=REQUEST_SECONDS),
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
                },
                retry_config={"retry_timeout": datetime.timedelta(seconds=RETRY_SECONDS)},
            )
        except BaseError as error:
            raise ValueError(f"{url!r} is no bucket: {error}") from error
        self.staging = scratch or Path(tempfile.gettempdir()) / "sluice-weights"

    def list(self, folder: str) -> list[ObjectInfo]:
        """List the objects in a folder."""
        with _errors(folder):
            objects = obstore.list(self._store, folder).collect()
        return [ObjectInfo(meta["path"], meta["size"], meta["last_modified"]) for meta in objects]

    def keys(self, folder: str) -> Sequence[str]:
        return [info.key for info in self.list(folder)]

    def size(self, key: str) -> int:
        with _errors(key):
            return int(obstore.head(self._store, key)["size"])

    def get(self, key: str) -> bytes:
        with _errors(key):
            return bytes(obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, end: int) -> bytes:
        with _errors(key):
            return bytes(obstore.get_range(self._store, key, start=start, end=end))

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whatever was there."""
        with _writing(key):
            obstore.put(self._store, key, data)

    def put_new(self, key: str, data: bytes) -> None:
        with _writing(key):
            obstore.put(self._store, key, data, mode="create")

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file, in parts if it is large; the key appears when all is there."""
        with _writing(key):
            obstore.put(self._store, key, path)

    def take_file(self, key: str, path: Path) -> None:
        self.put_file(key, path)
        path.unlink()

    def local_file(self, key: str, path: Path) -> Path:
        with _errors(key), path.open("xb") as file:
            for chunk in obstore.get(self._store, key).stream(min_chunk_size=DOWNLOAD_BYTES):
                file.write(chunk)
        return path

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        if wanted:
            with _errors(wanted[0]):
                obstore.delete(self._store, wanted)

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


@contextmanager
def _errors(key: str) -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(key) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(key) from error
    except BaseError as error:
        raise ObjectsError(f"{key}: {error}") from error


@contextmanager
def _writing(key: str) -> Iterator[None]:
    """Translate errors of a write, in which only the bucket can be missing."""
    try:
        with _errors(key):
            yield
    except FileNotFoundError as error:
        raise ObjectsError(f"{key}: there is no such bucket") from error
