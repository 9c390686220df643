"""Blobs of a bucket under what goes wrong on the way there."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from services.trainer.checkpoint_files import fetched
from sluice.bucket import PART_BYTES, ObjectBucket, ObjectsError
from sluice.file_cache import FileCache
from sluice.place import StoreCacheConfig
from sluice.samples import bucket_blobs
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError
from sluice.samples.bucket_blobs import BucketBlobs
from sluice.weights.manifest import FileEntry
from tests.contract.blob_store.test_contract import NOW
from tests.patience import PATIENCE
from tests.s3_server import Faults, environment, make_bucket, s3_process


@pytest.fixture
def blobs(bucket: ObjectBucket, cache: StoreCacheConfig) -> BucketBlobs:
    return BucketBlobs(bucket.url, cache, bucket)


def cached(cache: StoreCacheConfig) -> list[Path]:
    return [path for path in (cache.directory / "fetched" / "files").rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["refuse", "lose"])
@pytest.mark.parametrize("method", ["PUT", "HEAD", "GET"])
def test_a_request_that_fails_is_made_again(
    blobs: BucketBlobs, faults: Faults, kind: str, method: str
) -> None:
    faults.add(kind, method, "/run/blobs/" if method != "GET" else "", 2)
    reference = blobs.put(b"content")
    blobs.pin("owner", [reference.digest])
    assert blobs.get(reference) == b"content"
    assert faults.met == [kind, kind]


def test_a_bucket_that_refuses_for_a_while_is_asked_until_it_answers(
    bucket: ObjectBucket, faults: Faults
) -> None:
    bucket.put("key", b"content")
    faults.add("refuse", "HEAD", "/key", 11)  # more often than obstore would by itself
    assert ObjectBucket(bucket.url).size("key") == len(b"content")
    assert len(faults.met) == 11


def test_a_new_object_of_which_answers_are_lost_and_cut_is_there(
    bucket: ObjectBucket, faults: Faults
) -> None:
    faults.add("lose", "PUT", "/key")
    faults.add("cut", "PUT", "/key")  # which says that it exists
    with pytest.raises(FileExistsError):
        bucket.put_new("key", b"content")
    assert faults.met == ["lose", "cut"]
    assert bucket.put_once("key", b"content")
    assert not bucket.put_once("key", b"of another")


def test_a_body_that_is_cut_is_fetched_again(blobs: BucketBlobs, faults: Faults) -> None:
    content = os.urandom(3 << 20)
    reference = blobs.put(content)
    faults.add("cut", "GET", f"/run/blobs/{reference.digest[:2]}")
    assert blobs.get(reference) == content
    assert faults.met == ["cut"]


def test_a_listing_that_is_cut_is_asked_for_again(bucket: ObjectBucket, faults: Faults) -> None:
    bucket.put("folder/key", b"content")
    faults.add("cut", "GET", "", 2)
    assert bucket.keys("folder") == ["folder/key"]
    faults.add("cut", "GET", "", 1)
    assert bucket.folders("") == ["folder"]
    assert faults.met == ["cut"] * 3


@pytest.mark.parametrize("passed", [0, 1], ids=["first", "last"])
def test_an_upload_in_parts_of_which_an_answer_is_cut_is_made_again(
    bucket: ObjectBucket, faults: Faults, passed: int
) -> None:
    content = os.urandom(PART_BYTES + 1)
    faults.add("", "POST", "/key", passed)
    faults.add("cut", "POST", "/key")
    bucket.put("key", content)
    assert bucket.get("key") == content
    assert faults.met[-1] == "cut"


def test_a_removal_whose_answer_is_cut_is_no_error(bucket: ObjectBucket, faults: Faults) -> None:
    bucket.put("key", b"content")
    faults.add("cut", "POST", "")
    bucket.delete(["key"])
    assert not bucket.exists("key")
    assert faults.met == ["cut"]


def test_of_writers_once_the_first_counts_though_its_answer_is_lost(
    bucket: ObjectBucket, faults: Faults
) -> None:
    faults.add("lose", "PUT", "/line")
    assert bucket.put_once("line", b"first")
    assert faults.met == ["lose"]
    assert not bucket.put_once("line", b"second")
    assert bucket.get("line") == b"first"


def test_a_bucket_that_refuses_for_good_is_named(bucket: ObjectBucket, faults: Faults) -> None:
    faults.add("refuse", "PUT", "/run/key", 1000)
    patient = ObjectBucket(bucket.url, request_seconds=5, retry_seconds=1)
    with pytest.raises(ObjectsError, match=f"{bucket.url}/key") as caught:
        patient.put("key", b"")
    assert caught.value.filename == f"{bucket.url}/key"


def test_a_server_that_is_stopped_costs_the_deadline_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with s3_process() as (endpoint, process):
        make_bucket(endpoint, "stopped")
        for key, value in environment(endpoint).items():
            monkeypatch.setenv(key, value)
        blobs, hasty = (
            BucketBlobs(bucket.url, StoreCacheConfig(directory=tmp_path), bucket)
            for bucket in (
                ObjectBucket("s3://stopped/run"),
                ObjectBucket("s3://stopped/run", request_seconds=1, retry_seconds=1),
            )
        )
        reference = blobs.put(b"content")
        os.kill(process.pid, signal.SIGSTOP)
        for call in (lambda: hasty.put(b"other"), lambda: hasty.get(reference)):
            with pytest.raises(ObjectsError, match="s3://stopped/run/blobs/"):
                call()
        os.kill(process.pid, signal.SIGCONT)
        assert blobs.get(reference) == b"content"


KILLED = """
import os, sys
from sluice.samples.blob_store import open_blobs
from sluice.place import StoreCacheConfig
from pathlib import Path
blobs = open_blobs(sys.argv[1], StoreCacheConfig(directory=Path(sys.argv[2])))
data = bytes(64 << 20)
print("begun", flush=True)
blobs.put(data)
print("done", flush=True)
"""


def test_a_writer_killed_in_an_upload_leaves_no_blob(
    blobs: BucketBlobs, bucket: ObjectBucket, faults: Faults, tmp_path: Path
) -> None:
    faults.add("", "PUT", "/run/blobs/")
    faults.add("refuse", "PUT", "/run/blobs/", 1_000_000)  # it does not come to its end before
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, bucket.url, str(tmp_path / "other")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    deadline = time.monotonic() + PATIENCE
    while not any(method == "PUT" and "/run/blobs/" in path for method, path in faults.calls):
        assert time.monotonic() < deadline
    process.kill()
    assert process.stdout.read() == ""
    faults.coming.clear()
    assert bucket.list("blobs") == []
    assert blobs.get(blobs.put(bytes(64 << 20))) == bytes(64 << 20)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:-3] + b"\0" + data[-2:], lambda data: b""]
)
def test_damage_on_this_host_is_fetched_again(
    blobs: BucketBlobs, cache: StoreCacheConfig, damage: Callable[[bytes], bytes]
) -> None:
    content = os.urandom(100_000)
    reference = blobs.put(content)
    assert blobs.get(reference) == content
    (path,) = cached(cache)
    path.write_bytes(damage(content))
    assert blobs.get(reference) == content
    assert path.read_bytes() == content


@pytest.mark.parametrize("room", [0, 1, 4096])
def test_a_full_disk_of_this_host_is_no_fault_of_the_bucket(
    blobs: BucketBlobs, cache: StoreCacheConfig, room: int
) -> None:
    data = os.urandom(10_000)
    reference = blobs.put(data)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            blobs.get(reference)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value.filename).startswith(str(cache.directory))
    assert blobs.get(reference) == data


def test_damage_in_the_bucket_is_an_error_until_it_is_put_again(
    blobs: BucketBlobs, bucket: ObjectBucket, cache: StoreCacheConfig
) -> None:
    reference = blobs.put(b"content")
    bucket.put(f"blobs/{reference.digest[:2]}/{reference.digest}", b"contemt")
    with pytest.raises(BlobDigestError):
        blobs.get(reference)
    assert cached(cache) == []
    blobs.put(b"content")
    assert blobs.get(reference) == b"content"


def test_what_is_here_is_not_asked_for(blobs: BucketBlobs, faults: Faults) -> None:
    reference = blobs.put(b"content")
    blobs.get(reference)
    faults.calls.clear()
    blobs.get(reference)
    assert faults.calls == []


def test_the_cache_keeps_to_its_limit_and_drops_the_least_recently_used(
    bucket: ObjectBucket, tmp_path: Path
) -> None:
    cache = StoreCacheConfig(directory=tmp_path / "small", gib=10_000 / 2**30)
    blobs = BucketBlobs(bucket.url, cache, bucket)
    references = blobs.put_all(os.urandom(1000) for _ in range(30))
    blobs.get(references[0])
    for reference in references[1:]:
        blobs.get(reference)
        first = cache.directory / "fetched/files" / references[0].digest[:2] / references[0].digest
        os.utime(first, (time.time() + 60, time.time() + 60))  # used all the time
        assert sum(path.stat().st_size for path in cached(cache)) <= 10_000
    assert first.exists()
    assert len(cached(cache)) == 10


def test_blobs_and_files_of_checkpoints_share_one_limit(
    bucket: ObjectBucket, tmp_path: Path
) -> None:
    cache = StoreCacheConfig(directory=tmp_path / "small", gib=10_000 / 2**30)
    blobs = BucketBlobs(bucket.url, cache, bucket)
    for reference in blobs.put_all(os.urandom(1000) for _ in range(10)):
        blobs.get(reference)
    data = os.urandom(8_000)
    bucket.put("checkpoints/a/b/weights", data)
    entry = FileEntry(len(data), xxhash.xxh3_128_hexdigest(data))
    location, files = f"{bucket.url}/checkpoints/a/b", {"weights": entry}
    with fetched(location, files, cache) as directory:
        assert (directory / "weights").read_bytes() == data
    kept = [path for path in cache.directory.rglob("*") if path.is_file() and path.stat().st_size]
    assert 8_000 <= sum(path.stat().st_size for path in kept) <= 10_000


def test_a_file_in_use_outlives_the_limit(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)

    def fetch(path: Path) -> None:
        path.write_bytes(bytes(90))

    with cache.held("one", fetch, lambda path: None) as path:
        for number in range(5):
            with cache.held(f"{number}", fetch, lambda path: None):
                pass
        assert path.exists()
    with cache.held("last", fetch, lambda path: None):
        pass
    assert not path.exists()


def test_those_who_want_a_blob_at_once_fetch_it_once(
    blobs: BucketBlobs, bucket: ObjectBucket, cache: StoreCacheConfig, faults: Faults
) -> None:
    content = os.urandom(20 << 20)
    reference = blobs.put(content)
    faults.calls.clear()
    threads = [
        threading.Thread(target=BucketBlobs(bucket.url, cache, bucket).get, args=(reference,))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heads = [call for call in faults.calls if call[0] == "HEAD"]
    assert len(heads) == 1  # fetched once
    assert len(cached(cache)) == 1


def test_what_is_put_again_while_it_is_removed_is_there(
    blobs: BucketBlobs, bucket: ObjectBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each moment of a removal, somebody puts and pins the content."""
    for moment in ("pinned_by_any", "age", "delete"):
        reference = blobs.put(b"content of " + moment.encode())
        content = b"content of " + moment.encode()
        done = threading.Event()

        def put_and_pin(content: bytes = content, done: threading.Event = done) -> None:
            digest = blobs.put(content).digest
            blobs.pin("late", [digest])
            done.set()

        writer = threading.Thread(target=put_and_pin)
        with monkeypatch.context() as patch:
            owner, name = (bucket, "delete") if moment == "delete" else (blobs, f"_{moment}")
            original = getattr(owner, name)
            ready = []

            def beside(
                *arguments: object,
                original: Callable = original,
                writer: threading.Thread = writer,
                ready: list = ready,
            ) -> object:
                if not ready and bucket.list("blob_retiring"):
                    ready.append(True)
                    writer.start()
                    writer.join(0.5)  # it may wait for this collector
                return original(*arguments)

            patch.setattr(owner, name, beside)
            blobs.collect(NOW)
        writer.join(PATIENCE)
        assert done.is_set()
        assert blobs.get(reference) == content
        assert bucket.exists(f"blobs/{reference.digest[:2]}/{reference.digest}"), moment
        assert bucket.list("blob_retiring") == []


def test_a_collector_that_was_stopped_for_long_removes_nothing(
    blobs: BucketBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = blobs.put(b"content")
    monkeypatch.setattr(bucket_blobs, "REMOVAL_SECONDS", -1.0)
    assert blobs.collect(NOW) == []
    assert blobs.exists(reference)


def test_a_collector_that_died_is_named_and_then_forgotten(
    blobs: BucketBlobs, bucket: ObjectBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = blobs.put(b"content")
    bucket.put("blob_retiring/dead", reference.digest.encode())
    monkeypatch.setattr(bucket_blobs, "WAIT_SECONDS", 0.1)
    with pytest.raises(ObjectsError, match=r"blob_retiring.*stopped or killed"):
        blobs.pin("owner", [reference.digest])
    assert blobs.put(b"another").size == 7  # others go on
    monkeypatch.setattr(bucket_blobs, "RETIRING_SECONDS", -60.0)
    blobs.pin("owner", [reference.digest])
    blobs.collect(NOW)
    assert bucket.list("blob_retiring") == []


def test_collectors_beside_each_other_lose_nothing_pinned(
    blobs: BucketBlobs, bucket: ObjectBucket, cache: StoreCacheConfig
) -> None:
    references = blobs.put_all(b"%d" % number for number in range(40))
    blobs.pin("run", [each.digest for each in references[::2]])
    collectors = [
        threading.Thread(target=BucketBlobs(bucket.url, cache, bucket).collect, args=(NOW,))
        for _ in range(3)
    ]
    for thread in collectors:
        thread.start()
    for thread in collectors:
        thread.join(PATIENCE)
    assert [blobs.exists(each) for each in references] == [True, False] * 20
    with pytest.raises(BlobNotFoundError):
        blobs.pin("run", [references[1].digest])
