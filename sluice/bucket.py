"""Objects of a bucket by key, through `obstore`.

Credentials, endpoint and region come from the environment, as for any S3 client (AWS_*; see
obstore's S3Config). Every call has a deadline: one request, and all of its repetitions.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from sluice.durable import naming
from sluice.place import SCHEMES

REQUEST_SECONDS = 120.0  # one request, a part of PART_BYTES at most
RETRY_SECONDS = 60.0  # after which a failing request is tried no more
MOST_RETRIES = 1 << 16  # so that time alone counts: obstore's ten may be over in a second
PART_BYTES = 8 << 20  # of a file that comes or goes in parts
PARTS = 4  # at a time
TRIES = 3  # where an answer breaks off
CALLS = 16  # small ones at a time

T = TypeVar("T")
Item = TypeVar("Item")


class ObjectsError(OSError):
    """The bucket cannot be reached, does not answer in time, or refuses; `filename` is the URL."""

    def __init__(self, url: str, problem: object) -> None:
        super().__init__(f"{url}: {problem}")
        self.filename = url

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class ObjectInfo:
    """A key below the prefix, its bytes, when it was written (UTC), and the tag of its content."""

    key: str
    size: int
    modified: datetime.datetime
    tag: str | None

    @property
    def version(self) -> int:
        return int(self.key.split("/")[1])

    @property
    def age(self) -> float:
        """Seconds since it was written."""
        return (datetime.datetime.now(datetime.UTC) - self.modified).total_seconds()


class ObjectBucket:
    """The objects below a URL such as `s3://bucket/prefix`.

    Calls block, and raise FileNotFoundError for a key that is not there, ObjectsError otherwise.
    """

    def __init__(
        self,
        url: str,
        *,
        request_seconds: float = REQUEST_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Raises ValueError for a URL that names no bucket."""
        if not url.startswith(SCHEMES):
            raise ValueError(f"{url!r} is neither a directory nor an s3:// URL")
        self.url, self._retry_seconds = url.rstrip("/"), retry_seconds
        try:
            self._store = from_url(
                self.url,
                client_options={
                    "timeout": datetime.timedelta(seconds=request_seconds),
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
                },
                retry_config={
                    "max_retries": MOST_RETRIES,
                    "retry_timeout": datetime.timedelta(seconds=retry_seconds),
                },
            )
        except BaseError as error:
            raise ValueError(f"{url!r} is no bucket: {error}") from error

    def list(self, folder: str) -> list[ObjectInfo]:
        """List the objects in a folder and its folders."""
        objects = self._again(folder, lambda: obstore.list(self._store, folder).collect())
        return [
            ObjectInfo(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"])
            for meta in objects
        ]

    def folders(self, folder: str) -> Sequence[str]:
        """List the names of the folders in a folder."""
        found = self._again(folder, lambda: obstore.list_with_delimiter(self._store, folder))
        return [key.rstrip("/").rpartition("/")[2] for key in found["common_prefixes"]]

    def keys(self, folder: str) -> Sequence[str]:
        """List the keys in a folder and its folders, in any order."""
        return [info.key for info in self.list(folder)]

    def info(self, key: str) -> ObjectInfo:
        """Return what is known of an object besides its content."""
        with self._errors(key):
            meta = obstore.head(self._store, key)
        return ObjectInfo(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"])

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return self.info(key).size

    def exists(self, key: str) -> bool:
        """Return whether there is an object."""
        try:
            self.info(key)
        except FileNotFoundError:
            return False
        return True

    def get(self, key: str) -> bytes:
        """Read an object."""
        with self._errors(key):
            return bytes(obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Read bytes start..end (exclusive) of an object."""
        with self._errors(key):
            return bytes(obstore.get_range(self._store, key, start=start, end=end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, whatever was there; in parts if it is large."""
        self._put(key, data)

    def put_new(self, key: str, data: bytes) -> None:
        """Write an object; FileExistsError where it exists. One of several writers succeeds.

        A writer whose answer was lost may find its own object there, or get an ObjectsError.
        """

        def put() -> None:
            obstore.put(self._store, key, data, mode="create", use_multipart=False)

        with self._writing(key):
            self._again(key, put)

    def put_once(self, key: str, data: bytes) -> bool:
        """Write an object of which the first one counts; False if others' was there.

        Equal content is one's own: its answer may have been lost on the way.
        """
        try:
            self.put_new(key, data)
            return True
        except FileExistsError:
            return self.get(key) == data
        except ObjectsError:
            try:
                return self.get(key) == data
            except FileNotFoundError:
                pass
            raise

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file, in parts if it is large; the key appears when all is there."""
        self._put(key, path)

    def take_file(self, key: str, path: Path) -> None:
        """Make a file of this host an object; afterwards `path` is gone."""
        self.put_file(key, path)
        path.unlink()

    def local_file(self, key: str, path: Path) -> Path:
        """Fetch an object to the new file `path`, in parts if it is large; none is left of one
        that fails."""
        size = self.size(key)
        starts = range(0, size, PART_BYTES)
        with naming(path), path.open("xb", buffering=0) as file:

            def fetch(start: int) -> None:
                end = min(start + PART_BYTES, size)
                data = self.get_range(key, start, end)
                if len(data) != end - start:
                    raise ObjectsError(f"{self.url}/{key}", f"bytes {start} to {end} did not come")
                while start < end:  # a disk that is nearly full takes a part, then says so
                    start += os.pwrite(file.fileno(), data[start - end :], start)

            try:
                each_of(fetch, starts, PARTS)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        return path

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are no error."""
        wanted = list(keys)
        if wanted:
            self._again(wanted[0], lambda: obstore.delete(self._store, wanted))

    def _put(self, key: str, data: bytes | memoryview | Path) -> None:
        def put() -> None:
            obstore.put(self._store, key, data, chunk_size=PART_BYTES, max_concurrency=PARTS)

        with self._writing(key):
            self._again(key, put)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except AlreadyExistsError as error:
            raise FileExistsError(key) from error
        except FileNotFoundError as error:
            raise FileNotFoundError(key) from error
        except (BaseError, ValueError) as error:  # ValueError: of what can be no key
            raise ObjectsError(f"{self.url}/{key}", _first_line(error)) from error

    def _again(self, key: str, call: Callable[[], T]) -> T:
        """Repeat a call whose answer broke off, which obstore does not; it does nothing twice."""
        tries, latest = TRIES, time.monotonic() + self._retry_seconds
        while True:
            tries -= 1
            try:
                with self._errors(key):
                    return call()
            except FileExistsError:
                raise
            except OSError:  # an upload in parts that is complete is not found any more
                if not tries or time.monotonic() > latest:
                    raise

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        """Translate errors of a write, in which only the bucket can be missing."""
        try:
            with self._errors(key):
                yield
        except FileNotFoundError as error:
            raise ObjectsError(f"{self.url}/{key}", "there is no such bucket") from error


def each_of(call: Callable[[Item], T], items: Iterable[Item], at_a_time: int = CALLS) -> list[T]:
    """Call for each item, several at a time; what the first failure raises, once all have ended."""
    wanted = list(items)
    if len(wanted) < 2:
        return [call(item) for item in wanted]
    with ThreadPoolExecutor(min(at_a_time, len(wanted)), "bucket") as pool:
        calls = [pool.submit(call, item) for item in wanted]
        try:
            return [each.result() for each in calls]
        finally:
            pool.shutdown(cancel_futures=True)


def quoted(name: str) -> str:
    """Return any text as one part of a key; `urllib.parse.unquote` has it back."""
    text = quote(name, safe="")
    return text if text.strip(".") else text.replace(".", "%2E")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
