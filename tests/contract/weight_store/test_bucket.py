"""What an object store has to do without renames and locks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sluice.bucket import ObjectsError
from sluice.weights import bucket as bucket_module
from sluice.weights.bucket import BucketObjects
from sluice.weights.errors import VersionNotFoundError
from sluice.weights.shards import write_shard
from sluice.weights.store import WeightStore
from tests.contract.weight_store.policy import Policy


@pytest.fixture
def store(bucket: str, tmp_path) -> WeightStore:
    return WeightStore(bucket, scratch=tmp_path / "scratch")


@pytest.fixture
def policy(store: WeightStore) -> Policy:
    return Policy(store)


def test_of_two_writers_of_a_key_one_succeeds(bucket: str) -> None:
    objects = BucketObjects(bucket)
    objects.put_new("a/b", b"first")
    with pytest.raises(FileExistsError):
        objects.put_new("a/b", b"second")
    assert objects.get("a/b") == b"first"
    assert objects.get_range("a/b", 1, 3) == b"ir"
    with pytest.raises(FileNotFoundError):
        objects.get("a/c")
    objects.delete(["a/b", "a/c"])
    assert objects.list("a") == []


put_new = BucketObjects.put_new


def put_twice(self: BucketObjects, key: str, data: bytes) -> None:
    """As a client does whose answer is lost: it finds the key taken by itself."""
    put_new(self, key, data)
    if key.endswith("manifest.json") or key.startswith("promised/"):
        put_new(self, key, data)


def test_a_manifest_that_came_though_its_answer_was_lost_is_a_commit(
    store: WeightStore, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BucketObjects, "put_new", put_twice)
    published = policy.publish()
    assert store.latest() == published


def test_a_promise_that_came_though_its_answer_was_lost_is_kept(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = store.allocate(None)
    shard = write_shard(staging.directory, "a.safetensors", {"w": torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr(BucketObjects, "put_new", put_twice)
        promised = store.promise(staging, [shard], [], 0)
    assert store.fulfil(staging).digest == promised.digest


def test_users_of_a_host_make_their_versions_in_directories_of_their_own(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first of them has made, the others may not write to."""
    own = BucketObjects(bucket).staging
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert BucketObjects(bucket).staging != own


def test_large_files_go_in_parts(bucket: str, tmp_path) -> None:
    objects = BucketObjects(bucket)
    (tmp_path / "large").write_bytes(bytes(range(256)) * (12 << 12))
    objects.put_file("large", tmp_path / "large")
    objects.local_file("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()


def test_a_bucket_that_does_not_exist_is_an_error_of_the_store(bucket: str) -> None:
    with pytest.raises(ObjectsError):
        BucketObjects("s3://absent/run").put("a", b"")


def test_a_pin_beside_a_removal_loses_or_wins_but_never_both(
    store: WeightStore, policy: Policy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = policy.publish().version, policy.publish().version
    objects = BucketObjects(bucket)
    objects.put(f"retiring/{old:08d}", b"")  # somebody removes it right now
    with pytest.raises(VersionNotFoundError):
        store.pin(old, "engine")
    assert store.pins() == {}
    objects.put(f"pins/{old:08d}/other", b"")  # was there before the removal began
    assert list(store.retain(1)) == []
    assert list(store.versions()) == [old, new]
    assert len(objects.list("retiring")) == 1  # the other may still be at it
    monkeypatch.setattr("sluice.weights.bucket.RETIRING_SECONDS", -10.0)  # or have died long ago
    store.retain(1)
    store.pin(old, "engine")


def test_a_pin_that_comes_during_a_removal_saves_the_version_and_what_it_is_made_of(
    store: WeightStore, policy: Policy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, delta = policy.publish_chain(2)
    newest = policy.publish().version
    put = BucketObjects.put

    def put_after_a_pin(self: BucketObjects, key: str, data: bytes) -> None:
        if key == f"retiring/{delta:08d}":
            put(self, f"pins/{delta:08d}/engine", b"")
        put(self, key, data)

    monkeypatch.setattr(BucketObjects, "put", put_after_a_pin)
    assert list(store.retain(1)) == []
    assert list(store.versions()) == [whole, delta, newest]


def test_a_removal_that_crashed_is_finished(
    store: WeightStore, policy: Policy, bucket: str
) -> None:
    old, new = policy.publish().version, policy.publish().version
    objects = BucketObjects(bucket)
    objects.put(f"retiring/{old:08d}", b"")
    objects.delete([f"versions/{old:08d}/manifest.json"])
    store.retain(1)
    assert {info.key.split("/")[1] for info in objects.list("versions")} == {f"{new:08d}"}
    assert objects.list("retiring") == []


def test_a_writer_at_work_is_left_alone(store: WeightStore, policy: Policy, bucket) -> None:
    staging = store.allocate(None)
    path = staging.directory / "a.safetensors"
    path.write_bytes(b"not finished")
    store.upload(staging.version, path)
    policy.publish()
    store.retain(1)
    assert [
        info.size for info in BucketObjects(bucket).list(f"versions/{staging.version:08d}")
    ] == [12]


def test_an_old_promise_and_one_that_is_kept_are_swept(
    store: WeightStore, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its writer died with it; one of a living writer is young."""
    objects = BucketObjects(bucket, tmp_path / "scratch")
    stagings = [store.allocate(None) for _ in range(2)]
    shards = [
        write_shard(each.directory, "a.safetensors", {"w": torch.ones(3)}) for each in stagings
    ]
    for staging, shard in zip(stagings, shards, strict=True):
        store.promise(staging, [shard], [], 0)
    kept = objects.get("promised/00000001")
    store.fulfil(stagings[0])
    objects.put("promised/00000001", kept)  # as if the writer had died before it removed it
    store.sweep()
    assert objects.keys("promised") == ["promised/00000002"]
    assert not store.find(1).promised
    assert store.find(2).promised
    monkeypatch.setattr(bucket_module, "UNFINISHED_SECONDS", -1.0)
    store.sweep()
    assert objects.keys("promised") == []
    with pytest.raises(VersionNotFoundError):
        store.fulfil(stagings[1])
    assert list(store.versions()) == [1]
