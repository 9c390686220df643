"""Objects by key in a bucket: what a weight store needs of S3, through `obstore`.

Credentials, endpoint and region come from the environment, as for any S3 client (AWS_*; see
obstore's S3Config). Every call has a deadline.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

REQUEST_SECONDS = 300  # one request, a part of 5 to 10 MiB at most
RETRY_SECONDS = 60  # after which a failing request is tried no more
DOWNLOAD_BYTES = 8 << 20


class ObjectsError(OSError):
    """The bucket cannot be reached, or refuses."""


@dataclass(frozen=True)
class ObjectInfo:
    """A key below the prefix, its bytes, and when it was written (UTC)."""

    key: str
    size: int
    modified: datetime.datetime


class Objects:
    """The objects below a URL such as `s3://bucket/prefix`. Calls block."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for a URL that names no bucket."""
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
        self.url = url

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose keys begin with the folder `prefix`."""
        with _errors(prefix):
            found = obstore.list(self._store, prefix).collect()
        return [ObjectInfo(meta["path"], meta["size"], meta["last_modified"]) for meta in found]

    def size(self, key: str) -> int:
        """Raises FileNotFoundError."""
        with _errors(key):
            return int(obstore.head(self._store, key)["size"])

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def get(self, key: str) -> bytes:
        """Raises FileNotFoundError."""
        with _errors(key):
            return bytes(obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes start..end (exclusive). Raises FileNotFoundError."""
        with _errors(key):
            return bytes(obstore.get_range(self._store, key, start=start, end=end))

    def get_file(self, key: str, path: Path) -> None:
        """Write an object to the new file `path`. Raises FileNotFoundError."""
        with _errors(key), path.open("xb") as file:
            for chunk in obstore.get(self._store, key).stream(min_chunk_size=DOWNLOAD_BYTES):
                file.write(chunk)

    def put(self, key: str, data: bytes) -> None:
        with _writing(key):
            obstore.put(self._store, key, data)

    def put_new(self, key: str, data: bytes) -> None:
        """Raises FileExistsError where the key is taken; one of several writers succeeds."""
        with _writing(key):
            obstore.put(self._store, key, data, mode="create")

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file, in parts if it is large; the key appears when all is there."""
        with _writing(key):
            obstore.put(self._store, key, path)

    def delete(self, keys: Iterable[str]) -> None:
        """Those that are not there are no error."""
        wanted = list(keys)
        if wanted:
            with _errors(wanted[0]):
                obstore.delete(self._store, wanted)


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
    """What is not found then is the bucket."""
    try:
        with _errors(key):
            yield
    except FileNotFoundError as error:
        raise ObjectsError(f"{key}: there is no such bucket") from error
