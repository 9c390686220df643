"""Journals of rollouts wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.rollout.episodes import bucket_journals
from services.rollout.episodes.bucket_journals import BucketJournals
from services.rollout.episodes.spool import DirectoryJournals, Journals
from sluice.bucket import ObjectBucket
from sluice.place import StoreCacheConfig
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference, Blobs
from sluice.samples.bucket_blobs import BucketBlobs
from tests.s3_server import Faults

World = tuple[Blobs, Callable[[], Journals]]


@pytest.fixture(params=["directory", "bucket"])
def world(request: pytest.FixtureRequest, tmp_path: Path, cache: StoreCacheConfig) -> World:
    """Blobs, and what opens the journals beside them anew."""
    if request.param == "directory":
        store = BlobStore(tmp_path / "store", sync=False)
        return store, lambda: DirectoryJournals(store.root, store, sync=False)
    bucket = request.getfixturevalue("bucket")
    blobs = BucketBlobs(bucket.url, cache, bucket)
    return blobs, lambda: BucketJournals(bucket.url, blobs, bucket)


def put(blobs: Blobs, *texts: str) -> dict[str, BlobReference]:
    return {text: blobs.put(text.encode()) for text in texts}


@pytest.mark.parametrize("request_id", ["plain", "a/../b", "..", "x.settled", "ünï", "body"])
def test_progress_survives_the_process(world: World, request_id: str) -> None:
    blobs, opened = world
    assert opened().open(request_id, "body").finished == {}
    groups = put(blobs, "a", "b/../c")
    opened().record(request_id, groups)
    opened().cancel(request_id, ["c"])
    for settled in (False, True):
        if settled:
            opened().settle(request_id, keep=5)
        progress = opened().open(request_id, "other body")
        assert (progress.body, progress.finished) == ("body", groups)
        assert progress.cancelled == {"c"}
    assert blobs.pinned(f"rollout/{request_id}") == {blob.digest for blob in groups.values()}
    assert blobs.owners() == [f"rollout/{request_id}"]


def test_of_two_workers_that_finish_a_group_the_first_counts(world: World) -> None:
    blobs, opened = world
    first, second = blobs.put(b"first"), blobs.put(b"second")
    opened().open("r", "body")
    opened().record("r", {"g": first})
    opened().record("r", {"g": second})
    assert opened().open("r", "body").finished == {"g": first}


def test_the_oldest_settled_are_forgotten_and_unpinned(world: World) -> None:
    blobs, opened = world
    for name in ("one", "two", "open"):
        opened().open(name, "body")
        opened().record(name, put(blobs, name))
    for name in ("one", "two"):
        opened().settle(name, keep=1)
    assert set(blobs.owners()) == {"rollout/two", "rollout/open"}
    with pytest.raises(FileNotFoundError):
        opened().record("one", put(blobs, "late"))
    opened().cancel("one", ["c"])  # forgotten: nothing to remember
    assert opened().open("one", "anew").body == "anew"


def test_lost_answers_change_nothing(
    bucket: ObjectBucket, cache: StoreCacheConfig, faults: Faults
) -> None:
    blobs = BucketBlobs(bucket.url, cache, bucket)
    journals = BucketJournals(bucket.url, blobs, bucket)
    for part in ("/body", "/groups/", "/settled"):
        faults.add("lose", "PUT", part)
    journals.open("r", "body")
    groups = put(blobs, "a")
    journals.record("r", groups)
    journals.settle("r", keep=1)
    assert faults.met == ["lose"] * 3
    assert journals.open("r", "body").finished == groups


def test_what_a_killed_settle_left_goes_with_the_next(
    bucket: ObjectBucket, cache: StoreCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = BucketBlobs(bucket.url, cache, bucket)
    journals = BucketJournals(bucket.url, blobs, bucket)
    journals.open("gone", "body")
    journals.record("gone", put(blobs, "a"))
    bucket.delete(["rollouts/gone/body"])  # a record was late, or it was killed
    journals.settle("other", keep=1)
    assert blobs.owners() == ["rollout/gone"]  # it may be someone who begins
    monkeypatch.setattr(bucket_journals, "STRAY_SECONDS", -60.0)
    journals.settle("other", keep=1)
    assert bucket.keys("rollouts") == []
    assert blobs.owners() == []


def test_a_damaged_object_costs_what_it_says_alone(
    bucket: ObjectBucket, cache: StoreCacheConfig
) -> None:
    blobs = BucketBlobs(bucket.url, cache, bucket)
    journals = BucketJournals(bucket.url, blobs, bucket)
    journals.open("r", "body")
    groups = put(blobs, "a", "b")
    journals.record("r", groups)
    journals.cancel("r", ["c"])
    for key in bucket.keys("rollouts/r"):
        whole = bucket.get(key)
        for damaged in (b"", whole[:-1], whole[:9] + b"\x00" + whole[10:]):
            bucket.put(key, damaged)
            progress = journals.open("r", "body")
            assert progress.body == "body"
            assert progress.finished.items() <= groups.items()
            assert len(progress.finished) + len(progress.cancelled) >= 2
        bucket.put(key, whole)
    bucket.put("rollouts/r/body", b'{"body": "body", "created": 1.0}')  # of an earlier release
    bucket.put("rollouts/r/groups/a", b'{"blob": "%b", "size": 1}' % groups["a"].digest.encode())
    assert journals.open("r", "another").body == "body"
    assert journals.open("r", "another").finished == groups
