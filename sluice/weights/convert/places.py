"""Checkpoints of a bucket as directories of this host: a source is fetched, a target put there.

Below a target `.converting` says that it is not whole; it is the first object and goes last, and
holds what its writer keeps beside its files, who may go on with it once it was killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import xxhash

from sluice import faults
from sluice.bucket import PARTS, ObjectBucket, ObjectInfo, ObjectsError, each_of
from sluice.durable import sync_path, write_new
from sluice.place import is_plain_name
from sluice.weights.convert.hf import CONFIG
from sluice.weights.convert.plan import RECORD
from sluice.weights.convert.saved import SAVED
from sluice.weights.convert.work import Control
from sluice.weights.errors import (
    BucketCheckpointError,
    ClaimedPlaceError,
    DiskFullError,
    NoCheckpointError,
    TakenPlaceError,
)

UNFINISHED = ".converting"
LAST = (RECORD, CONFIG)  # without which nobody takes a folder for a checkpoint
PARTIAL = ".partial"
LONGEST_NAME = 255 - len(PARTIAL)  # bytes of a part of a path


def fetch(url: str, folder: Path, control: Control) -> Path:
    """Fetch a checkpoint to the directory `folder`; return where its files are.

    Those of a trainer's checkpoint are in a folder that its record names. What an earlier call
    has fetched stays, unless its object is another one by now: the time of a file says which.

    Raises BucketCheckpointError, DiskFullError, CancelledConversionError and ObjectsError.
    """
    bucket = ObjectBucket(url)
    there = _objects(bucket)
    if not there:
        raise NoCheckpointError(url)
    if UNFINISHED in there:
        raise BucketCheckpointError(
            f"{url} is not whole: a conversion still writes there, or was killed ({UNFINISHED})"
        )
    part = ""
    if SAVED in there:  # it names the folder of the files
        with contextlib.suppress(ValueError, AttributeError):
            part = str(json.loads(bucket.get(SAVED)).get("folder") or "")
    if part and not is_plain_name(part):
        raise BucketCheckpointError(f"{url}/{SAVED} names {part[:80]!r}, which is no folder there")
    record = f"{part}/{SAVED}"  # where it comes to lie: beside the files, as in a directory
    wanted = {
        name: info
        for name, info in there.items()
        if not part or name == SAVED or (name.startswith(f"{part}/") and name != record)
    }
    paths = {name: folder / _checked(url, name) for name in wanted}
    if part:
        paths[SAVED] = folder / record
    folder.mkdir(parents=True, exist_ok=True)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path not in paths.values():
            path.unlink()
    missing = [name for name, info in wanted.items() if not _is_fetched(paths[name], info)]
    size = sum(wanted[name].size for name in missing)
    if size > shutil.disk_usage(folder).free:
        raise DiskFullError(folder, size, os.strerror(errno.ENOSPC))

    def take(name: str) -> None:
        control.check()
        path, info = paths[name], wanted[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        bucket.local_file(name, partial)
        if partial.stat().st_size != info.size:
            raise BucketCheckpointError(f"{url}/{name} changed while it was read")
        os.utime(partial, ns=(_time(info), _time(info)))
        sync_path(partial)
        partial.rename(path)
        faults.point("convert.fetched")

    each_of(take, missing, PARTS)
    now = _objects(bucket)
    if changed := [name for name, info in wanted.items() if now.get(name) != info]:
        raise BucketCheckpointError(f"{url}/{min(changed)} changed while it was read")
    return folder / part if part else folder


def check_free(url: str) -> None:
    """Raise ClaimedPlaceError or TakenPlaceError where something lies already."""
    there = _objects(ObjectBucket(url))
    if UNFINISHED in there:
        raise ClaimedPlaceError(url)
    if there:
        raise TakenPlaceError(url, min(there))


@contextlib.contextmanager
def claimed(url: str, record: Path, control: Control) -> Iterator[BucketTarget]:
    """Have a place of a bucket to oneself for the block; if that fails nothing is left there.

    What is in the file `record` is the claim: who has it goes on with that of a killed one. It
    stays where a later run is to go on: `control` was told to keep it, or the bucket fails while
    files are uploaded. Raises ClaimedPlaceError or TakenPlaceError where another writes, or
    something lies there already.
    """
    bucket = ObjectBucket(url)
    target = BucketTarget(bucket, record.with_name(f"{record.name}.whole"))
    if not (record.exists() and _goes_on(bucket, record, target)):
        target.forget(record)
        check_free(url)
        write_new(record, secrets.token_hex(16).encode())
        if not bucket.put_once(UNFINISHED, record.read_bytes()):
            target.forget(record)
            raise ClaimedPlaceError(url)
        if more := sorted(_objects(bucket).keys() - {UNFINISHED}):  # of one that came and went
            bucket.delete([UNFINISHED])
            target.forget(record)
            raise TakenPlaceError(url, more[0])
    try:
        yield target
    except BaseException as error:
        is_failing = target.has_begun and isinstance(error, ObjectsError)
        if not (target.is_whole or control.keep.is_set() or is_failing):
            bucket.delete([name for name in bucket.keys("") if name != UNFINISHED])
            bucket.delete([UNFINISHED])
            target.forget(record)
        raise
    bucket.delete([UNFINISHED])
    target.forget(record)


class BucketTarget:
    """A place that is `claimed`, to which files go."""

    def __init__(self, bucket: ObjectBucket, whole: Path) -> None:
        """The file `whole` says that all is there."""
        self._bucket, self._whole = bucket, whole
        self.has_begun = False

    @property
    def is_whole(self) -> bool:
        """Whether all was uploaded, by this process or one that was killed then."""
        return self._whole.exists()

    def forget(self, record: Path) -> None:
        """Have nothing of it on this host any more."""
        record.unlink(missing_ok=True)
        self._whole.unlink(missing_ok=True)

    def put(self, folder: Path, control: Control) -> None:
        """Upload a directory; what makes it a checkpoint comes last.

        Raises CancelledConversionError and ObjectsError.
        """
        if self.is_whole:
            return
        self.has_begun = True
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        names = [name for name in names if (folder / name).is_file()]
        last = [name for name in reversed(LAST) if name in names]
        earlier = _objects(self._bucket).keys() - {*names, UNFINISHED}
        self._bucket.delete([*earlier, *last])  # of a killed one, whose source was another then

        def upload(name: str) -> None:
            control.check()
            self._bucket.put_file(name, folder / name)
            faults.point("convert.upload")

        each_of(upload, sorted(set(names) - set(last)), PARTS)
        faults.point("convert.uploaded")
        for name in last:
            upload(name)
        write_new(self._whole, b"")
        faults.point("convert.in_bucket")


def _goes_on(bucket: ObjectBucket, record: Path, target: BucketTarget) -> bool:
    """Whether what lies in the bucket is that of `record`'s writer, who was killed."""
    try:
        return bucket.get(UNFINISHED) == record.read_bytes()
    except FileNotFoundError:  # it had not begun to write, or was done
        return target.is_whole and bool(bucket.keys(""))


def _is_fetched(path: Path, info: ObjectInfo) -> bool:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (info.size, _time(info))


def _time(info: ObjectInfo) -> int:
    """When an object was written, as the time of a file in nanoseconds: whole microseconds.

    Many buckets tell the second alone, in which an object may be written twice: what is below it
    comes from the object's tag, where it has one.
    """
    if info.tag is None:
        return int(info.modified.timestamp() * 1e6) * 1000
    part = xxhash.xxh3_64_intdigest(info.tag.encode()) % 1_000_000
    return (int(info.modified.timestamp()) * 1_000_000 + part) * 1000


def _objects(bucket: ObjectBucket) -> Mapping[str, ObjectInfo]:
    """Return what lies there; a console's marks of folders, which are empty, are no objects."""
    found = {info.key: info for info in bucket.list("")}
    folders = {"", *(str(parent) for key in found for parent in PurePosixPath(key).parents)}
    return {key: info for key, info in found.items() if info.size or key not in folders}


def _checked(url: str, name: str) -> str:
    parts = PurePosixPath(name).parts
    too_long = any(len(part.encode()) > LONGEST_NAME for part in parts)
    if name.startswith("/") or ".." in parts or "\0" in name or too_long:
        raise BucketCheckpointError(f"{url} holds {name[:200]!r}, which can be no file here")
    return name
