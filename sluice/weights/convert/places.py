"""Checkpoints of a bucket as directories of this host: a source is fetched, a target put there.

Below a target `.converting` says that it is not whole; it is the first object and goes last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sluice import faults
from sluice.bucket import PARTS, ObjectBucket, ObjectInfo, each_of
from sluice.weights.convert.hf import CONFIG
from sluice.weights.convert.plan import RECORD
from sluice.weights.convert.work import Control
from sluice.weights.errors import DiskFullError, WeightStoreError

UNFINISHED = ".converting"
SAVED = "checkpoint.json"  # of a trainer; names the folder of the files
LAST = (RECORD, CONFIG)  # without which nobody takes a folder for a checkpoint


class BucketCheckpointError(WeightStoreError):
    """A place in a bucket holds no whole checkpoint, or is not free for one; the message says
    which."""


def fetch(url: str, folder: Path, control: Control) -> Path:
    """Fetch a checkpoint to the new directory `folder`; return where its files are.

    Those of a trainer's checkpoint are in a folder that its record names.

    Raises BucketCheckpointError, DiskFullError, CancelledConversionError and ObjectsError.
    """
    bucket = ObjectBucket(url)
    there = _objects(bucket)
    if not there:
        raise BucketCheckpointError(f"{url} holds no objects")
    if UNFINISHED in there:
        raise BucketCheckpointError(
            f"{url} is not whole: a conversion still writes there, or was killed ({UNFINISHED})"
        )
    part = ""
    if SAVED in there:
        with contextlib.suppress(ValueError, AttributeError):
            part = str(json.loads(bucket.get(SAVED)).get("folder") or "")
    wanted = {name: info for name, info in there.items() if not part or name.startswith(f"{part}/")}
    folder.mkdir(parents=True)
    size = sum(info.size for info in wanted.values())
    if size > shutil.disk_usage(folder).free:
        raise DiskFullError(folder, size, os.strerror(errno.ENOSPC))

    def take(name: str) -> None:
        control.check()
        path = folder / _checked(url, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        bucket.local_file(name, path)
        if path.stat().st_size != wanted[name].size:
            raise BucketCheckpointError(f"{url}/{name} changed while it was read")

    each_of(take, wanted, PARTS)
    now = _objects(bucket)
    if changed := [name for name, info in wanted.items() if now.get(name) != info]:
        raise BucketCheckpointError(f"{url}/{min(changed)} changed while it was read")
    return folder / part if part else folder


def check_free(url: str) -> None:
    """Raise BucketCheckpointError where something lies already."""
    there = _objects(ObjectBucket(url))
    if UNFINISHED in there:
        raise BucketCheckpointError(
            f"{url}: another conversion writes there, or was killed; then remove what lies there"
        )
    if there:
        raise BucketCheckpointError(f"{url} is not empty: it holds {min(there)}")


@contextlib.contextmanager
def claimed(url: str) -> Iterator[None]:
    """Have a place of a bucket to oneself for the block; if that fails nothing is left there.

    Raises BucketCheckpointError where something lies there already, or another writes.
    """
    bucket, mine = ObjectBucket(url), secrets.token_hex(16).encode()
    check_free(url)
    if not bucket.put_once(UNFINISHED, mine):
        raise BucketCheckpointError(f"{url}: another conversion writes there")
    if more := sorted(_objects(bucket).keys() - {UNFINISHED}):  # of one that came and went
        bucket.delete([UNFINISHED])
        raise BucketCheckpointError(f"{url} is not empty: it holds {more[0]}")
    try:
        yield
    except BaseException:
        bucket.delete([name for name in bucket.keys("") if name != UNFINISHED])
        bucket.delete([UNFINISHED])
        raise
    bucket.delete([UNFINISHED])


def put(folder: Path, url: str, control: Control) -> None:
    """Upload a directory to a place that is `claimed`; what makes it a checkpoint comes last.

    Raises CancelledConversionError and ObjectsError.
    """
    bucket = ObjectBucket(url)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    last = [name for name in reversed(LAST) if name in names]

    def upload(name: str) -> None:
        control.check()
        bucket.put_file(name, folder / name)

    each_of(upload, sorted(set(names) - set(last)), PARTS)
    faults.point("convert.uploaded")
    for name in last:
        upload(name)


def _objects(bucket: ObjectBucket) -> dict[str, ObjectInfo]:
    return {info.key: info for info in bucket.list("")}


def _checked(url: str, name: str) -> str:
    if name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name:
        raise BucketCheckpointError(f"{url} holds {name[:200]!r}, which can be no file here")
    return name
