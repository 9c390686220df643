"""What every weight store promises to writers, readers and retention."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sluice.bucket import ObjectBucket
from sluice.place import is_bucket
from sluice.weights.errors import (
    InvalidCheckpointError,
    MissingFileError,
    StagingLostError,
    VersionExistsError,
    VersionNotFoundError,
)
from sluice.weights.host_cache import HostCache
from sluice.weights.manifest import read_manifest
from sluice.weights.shards import load_verified, write_shard
from sluice.weights.store import WeightStore
from tests.contract.weight_store.conftest import OpenStore
from tests.contract.weight_store.policy import Policy, Publication
from tests.patience import PATIENCE


def load(store: WeightStore, version: int, root: Path) -> dict[str, torch.Tensor]:
    held = HostCache(root, store).take(version)
    loaded = dict(load_verified(held.directory, read_manifest(held.directory)))
    held.release()
    return loaded


def check(store: WeightStore, policy: Policy, version: int, root: Path) -> None:
    loaded = load(store, version, root)
    expected = policy.history[version]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_whole_versions_and_deltas_come_out_to_the_bit(
    policy: Policy, open_again: OpenStore, tmp_path: Path
) -> None:
    versions = policy.publish_chain(4)
    fresh = open_again()
    assert list(fresh.versions()) == versions
    assert [record.base for record in fresh.list()] == [None, *versions[:-1]]
    for version in versions:
        check(fresh, policy, version, tmp_path / f"cache-{version}")
    names = {path.name for path in next((tmp_path / "cache-1").glob("*-*/")).iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names


def test_versions_that_are_made_ahead_come_out_to_the_bit(
    policy: Policy, open_again: OpenStore, tmp_path: Path
) -> None:
    cache = HostCache(tmp_path / "cache", open_again())
    base = None
    for _ in range(4):
        policy.change()
        publication = Publication(policy, base)
        announced = [publication.announce(publication.write(part)) for part in range(2)]
        assert None not in [cache.stage(found).result(PATIENCE) for found in announced]
        base = publication.commit().version
        cache.finish(base)
        check(open_again(), policy, base, tmp_path / "cache")


def test_numbers_parents_and_the_latest(policy: Policy, open_again: OpenStore) -> None:
    with pytest.raises(VersionNotFoundError):
        open_again().latest()
    with pytest.raises(VersionNotFoundError):
        open_again().allocate(7)
    open_again().abort(open_again().allocate(None))
    first = policy.publish()
    second = policy.publish()
    assert (first.version, second.version) == (2, 3)
    fresh = open_again()
    assert fresh.latest() == fresh.get(3) == second
    assert (fresh.parent(3), fresh.parent(2)) == (2, None)
    fresh.retain(1)
    assert open_again().parent(3) == 2
    with pytest.raises(VersionNotFoundError):
        fresh.get(2)
    with pytest.raises(VersionNotFoundError):
        fresh.manifest(99)


def test_old_numbers_are_forgotten_and_never_given_out_again(
    policy: Policy, open_again: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.weights.store.KEPT_NUMBERS", 2)
    first = policy.publish()
    for _ in range(5):  # of lives that ended before their version was whole
        open_again().abort(open_again().allocate(first.version))
    second = policy.publish()
    store = open_again()
    store.retain(1)
    assert store.parent(second.version) == first.version
    assert store.parent(second.version - 2) == first.version
    with pytest.raises(VersionNotFoundError):
        store.parent(second.version - 3)
    assert open_again().allocate(first.version).version == second.version + 1  # gone, yet a parent


def test_writers_at_once_take_different_numbers(open_again: OpenStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: open_again().allocate(None).version, range(8)))
    assert sorted(taken) == list(range(1, 9))


def test_nothing_is_visible_before_the_commit(store: WeightStore, policy: Policy) -> None:
    staging = store.allocate(None)
    shard = write_shard(staging.directory, "a.safetensors", {"w": torch.ones(3)})
    assert list(store.versions()) == []
    with pytest.raises(VersionNotFoundError):
        store.get(staging.version)
    record = store.commit(staging, [shard], [], step=4)
    assert list(store.versions()) == [record.version]
    assert record.step == 4
    with pytest.raises((VersionExistsError, StagingLostError)):
        store.commit(staging, [shard], [], step=4)


def test_an_abort_leaves_nothing(store: WeightStore, tmp_path: Path) -> None:
    staging = store.allocate(None)
    write_shard(staging.directory, "a.safetensors", {"w": torch.ones(3)})
    store.abort(staging)
    assert list(store.versions()) == []
    with pytest.raises((MissingFileError, VersionNotFoundError)):
        store.local_file(staging.version, "a.safetensors", tmp_path)


def test_a_promise_is_no_version_until_it_is_kept(
    store: WeightStore, open_again: OpenStore, tmp_path: Path
) -> None:
    staging = store.allocate(None)
    shard = write_shard(staging.directory, "a.safetensors", {"w": torch.ones(3)})
    (staging.directory / "a.safetensors").rename(tmp_path / "a.safetensors")  # for later
    expected = store.promise(staging, [shard], [], 4)
    other = open_again()
    assert (other.find(1).promised, other.find(1).digest) == (True, expected.digest)
    other.pin(1, "engine")
    assert (other.has(1), list(other.versions())) == (False, [])
    with pytest.raises(MissingFileError, match=r"a\.safetensors"):
        store.fulfil(staging)
    (tmp_path / "a.safetensors").rename(staging.directory / "a.safetensors")
    assert store.fulfil(staging).digest == expected.digest
    assert (other.find(1).promised, other.get(1).step, other.pins()) == (False, 4, {1: {"engine"}})
    taken_back = store.allocate(1)
    shard = write_shard(taken_back.directory, "a.safetensors", {"w": torch.zeros(3)})
    store.promise(taken_back, [shard], [], 5)
    store.abort(taken_back)
    with pytest.raises(VersionNotFoundError):
        other.find(2)
    with pytest.raises(VersionNotFoundError):
        other.pin(2, "engine")
    with pytest.raises(StagingLostError):
        store.fulfil(taken_back)


def test_a_commit_refuses_what_is_not_as_reported(store: WeightStore) -> None:
    staging = store.allocate(None)
    shard = write_shard(staging.directory, "a.safetensors", {"w": torch.ones(3)})
    other = write_shard(staging.directory, "b.safetensors", {"v": torch.ones(3)})
    (staging.directory / "b.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"b\.safetensors"):
        store.commit(staging, [shard, other], [], step=0)
    write_shard(staging.directory, "b.safetensors", {"u": torch.ones(3)})
    with pytest.raises(InvalidCheckpointError, match="u, v"):
        store.commit(staging, [shard, other], [], step=0)
    assert list(store.versions()) == []


def test_retention_spares_pins_chains_and_what_is_in_use(
    policy: Policy, open_again: OpenStore, tmp_path: Path
) -> None:
    versions = policy.publish_chain(4)
    whole = policy.publish().version
    store = open_again()
    store.pin(versions[1], "engine/1 a")
    assert store.pins() == {versions[1]: {"engine/1 a"}}
    assert list(store.retain(1, in_use=[whole])) == versions[2:]
    check(store, policy, versions[1], tmp_path / "cache")
    store.unpin(versions[1], "engine/1 a")
    store.unpin(versions[1], "engine/1 a")
    assert list(store.retain(1)) == versions[:2]
    assert list(open_again().versions()) == [whole]
    with pytest.raises(VersionNotFoundError):
        store.pin(versions[0], "late")
    assert store.pins() == {}


def test_retention_forgets_what_a_lost_writer_announced_and_no_more(
    policy: Policy, open_again: OpenStore
) -> None:
    lost = Publication(policy)
    lost.announce(lost.write(0))
    lost.staging.lock.close()
    policy.publish()
    making = Publication(policy)
    found = making.announce(making.write(0))
    store = open_again()
    assert store.announced(lost.version)
    store.retain(1)
    assert store.announced(lost.version) == []
    assert store.announced(making.version) == [found]


def test_damage_in_the_store_is_named(policy: Policy, open_again: OpenStore, tmp_path) -> None:
    """The reader finds a byte that changed on the way to it."""
    version = policy.publish_chain(2)[-1]
    store = open_again()

    class Damaging:
        manifest = staticmethod(store.manifest)

        def local_file(self, number: int, name: str, scratch: Path) -> Path:
            source = store.local_file(number, name, scratch)
            data = bytearray(source.read_bytes())
            if name == "model-0.safetensors":
                data[-1] ^= 1
            path = scratch / f"damaged-{number}-{name}"
            path.write_bytes(data)
            return path

    with pytest.raises(Exception, match=r"'embed\.weight'"):
        HostCache(tmp_path / "cache", Damaging()).take(version)
    check(store, policy, version, tmp_path / "cache")


def test_a_location_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a directory nor"):
        WeightStore("gopher://somewhere")


def test_a_store_that_was_made_anew_has_its_own_versions(
    policy: Policy, open_again: OpenStore
) -> None:
    """An engine outlives the run that it served, whose numbers another run gives out again."""
    reader, old = open_again(), policy.publish()
    assert reader.find(old.version) == old
    if is_bucket(policy.store.location):
        objects = ObjectBucket(policy.store.location)
        objects.delete(objects.keys(""))
    else:
        shutil.rmtree(policy.store.location)
    another = Policy(open_again())
    another.companions.extend(policy.companions)
    another.change()
    new = another.publish()
    assert new.version == old.version and new.digest != old.digest
    assert reader.find(new.version) == new
