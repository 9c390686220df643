"""Blobs of a store that is a bucket.

blobs/<2 digits>/<digest>            a content; the time of its last put is that of the object
blob_pins/owner.<owner>/<digest>     a pin
blob_retiring/<nonce>                digests that a collector is removing, one a line

A bucket has no locks. Who pins writes the pin, and who puts writes the content; then they look for
collectors, wait for those that name the digest, and look whether the content is there. A
collector says what it is about to remove, looks for pins and young contents once more, and removes
the others: whoever was not seen by it sees it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import xxhash

from sluice import faults
from sluice.bucket import ObjectBucket, ObjectsError, each_of, quoted
from sluice.file_cache import host_cache
from sluice.place import StoreCacheConfig
from sluice.samples.blobs import (
    DIGEST,
    BlobDigestError,
    BlobFile,
    BlobNotFoundError,
    BlobReference,
    Blobs,
    check_content,
    open_blob,
)

PREFIX, PINS, RETIRING = "blobs", "blob_pins", "blob_retiring"
TOGETHER = 64  # contents in memory at a time, on their way
REMOVED_TOGETHER = 1000  # what one request of S3 removes
POLL_SECONDS = 0.2
WAIT_SECONDS = 300.0  # for a collector
RETIRING_SECONDS = 3600.0  # after which one is long dead
REMOVAL_SECONDS = 600.0  # after which it removes nothing more of what it named


class BucketBlobs(Blobs):
    """Blobs below a URL, read through a cache of this host."""

    def __init__(
        self, url: str, cache: StoreCacheConfig, bucket: ObjectBucket | None = None
    ) -> None:
        """`bucket` has deadlines of its own. Raises ValueError for a URL that names no bucket."""
        self._bucket = bucket or ObjectBucket(url)
        self._cache = host_cache(cache)

    def put_all(self, contents: Iterable[bytes | memoryview]) -> list[BlobReference]:
        references, waiting = list[BlobReference](), dict[str, bytes | memoryview]()
        for data in contents:
            digest = xxhash.xxh3_128_hexdigest(data)
            references.append(BlobReference(digest, memoryview(data).nbytes))
            waiting[digest] = data
            if len(waiting) == TOGETHER:
                self._put(waiting)
                waiting = {}
        if waiting:
            self._put(waiting)
        for _ in references:
            faults.point("blob.stored")
        return references

    def _put(self, contents: dict[str, bytes | memoryview]) -> None:
        missing = set(contents)
        while missing:
            each_of(lambda digest: self._bucket.put(_key(digest), contents[digest]), missing)
            faults.point("blob.written")
            named = self._wait_for_collectors(missing)
            missing = named | self._missing(missing - named)

    def get(self, reference: BlobReference) -> memoryview:
        with self._held(reference.digest) as path, open_blob(path) as file:
            content = file.view()
        check_content(reference.digest, content)
        return content

    @contextmanager
    def open(self, reference: BlobReference) -> Iterator[BlobFile]:
        with self._held(reference.digest) as path, open_blob(path) as file:
            yield file

    @contextmanager
    def _held(self, digest: str) -> Iterator[Path]:
        key = _key(digest)

        def check(path: Path) -> BlobDigestError | None:
            try:
                with open_blob(path) as file:
                    check_content(digest, file.view())
            except BlobDigestError as error:
                return error
            return None

        def fetch(path: Path) -> None:
            try:
                self._bucket.local_file(key, path)
            except FileNotFoundError as error:
                raise BlobNotFoundError(digest) from error

        with self._cache.held(f"{digest[:2]}/{digest}", fetch, check) as path:
            yield path

    def exists(self, reference: BlobReference) -> bool:
        return self._bucket.exists(_key(reference.digest))

    def pin(self, owner: str, digests: Iterable[str]) -> None:
        wanted = set(digests)
        for digest in wanted:
            _key(digest)
        pins = {digest: f"{_pins_of(owner)}/{digest}" for digest in wanted}
        had = self.pinned(owner) & wanted
        each_of(lambda digest: self._bucket.put(pins[digest], b""), wanted)
        self._wait_for_collectors(wanted)
        if missing := self._missing(wanted):
            self._bucket.delete(pins[digest] for digest in wanted - had)
            raise BlobNotFoundError(min(missing))
        faults.point("blob.pinned")

    def unpin(self, owner: str, digests: Iterable[str] | None = None) -> None:
        if digests is None:
            self._bucket.delete(self._bucket.keys(_pins_of(owner)))
            return
        wanted = list(digests)
        for digest in wanted:
            _key(digest)
        self._bucket.delete(f"{_pins_of(owner)}/{digest}" for digest in wanted)

    def pinned(self, owner: str) -> set[str]:
        return {_name(key) for key in self._bucket.keys(_pins_of(owner))}

    def owners(self) -> list[str]:
        return [unquote(name.removeprefix("owner.")) for name in self._bucket.folders(PINS)]

    def collect(self, grace_seconds: float, extra_live: Iterable[str] = ()) -> list[str]:
        self._forget_dead_collectors()
        extra, live = set(extra_live), self._pinned_by_any()
        old = [
            _name(info.key)
            for info in self._bucket.list(PREFIX)
            if info.age > grace_seconds and _name(info.key) not in extra
        ]
        candidates = [digest for digest in old if digest not in live]
        removed = list[str]()
        for first in range(0, len(candidates), REMOVED_TOGETHER):
            removed += self._remove(candidates[first : first + REMOVED_TOGETHER], grace_seconds)
        return removed

    def _remove(self, digests: list[str], grace_seconds: float) -> list[str]:
        begun, sign = time.monotonic(), f"{RETIRING}/{secrets.token_hex(16)}"
        self._bucket.put(sign, "\n".join(digests).encode())
        faults.point("blob.retiring")
        try:
            live = self._pinned_by_any()
            ages = each_of(self._age, digests)
            gone = [
                digest
                for digest, age in zip(digests, ages, strict=True)
                if age > grace_seconds and digest not in live
            ]
            if time.monotonic() - begun > REMOVAL_SECONDS:  # it was stopped: others may go on
                return []
            self._bucket.delete(_key(digest) for digest in gone)
        finally:
            self._bucket.delete([sign])
        return gone

    def _age(self, digest: str) -> float:
        try:
            return self._bucket.info(_key(digest)).age
        except FileNotFoundError:
            return float("-inf")

    def _pinned_by_any(self) -> set[str]:
        return {_name(key) for key in self._bucket.keys(PINS)}

    def _missing(self, digests: Iterable[str]) -> set[str]:
        wanted = list(digests)
        there = each_of(lambda digest: self._bucket.exists(_key(digest)), wanted)
        return {digest for digest, found in zip(wanted, there, strict=True) if not found}

    def _wait_for_collectors(self, digests: set[str]) -> set[str]:
        """Wait until none names one of these; those that were named. Raises ObjectsError."""
        named, deadline = set[str](), time.monotonic() + WAIT_SECONDS
        while found := self._named(digests):
            named |= found
            if time.monotonic() >= deadline:
                raise ObjectsError(
                    f"{self._bucket.url}/{RETIRING}",
                    f"names {min(found)} for {WAIT_SECONDS:g} s: a process that removes blobs has "
                    "been stopped or killed",
                )
            time.sleep(POLL_SECONDS)  # a bucket tells nobody of a change
        return named

    def _named(self, digests: set[str]) -> set[str]:
        found = set[str]()
        for info in self._bucket.list(RETIRING):
            if info.age > RETIRING_SECONDS:
                continue
            try:
                found |= digests.intersection(self._bucket.get(info.key).decode().split("\n"))
            except FileNotFoundError:  # it is done
                continue
        return found

    def _forget_dead_collectors(self) -> None:
        signs = self._bucket.list(RETIRING)
        self._bucket.delete(info.key for info in signs if info.age > RETIRING_SECONDS)


def _key(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise BlobNotFoundError(digest)
    return f"{PREFIX}/{digest[:2]}/{digest}"


def _pins_of(owner: str) -> str:
    if not owner:
        raise ValueError("a pin needs an owner")
    return f"{PINS}/owner.{quoted(owner)}"


def _name(key: str) -> str:
    return key.rpartition("/")[2]
