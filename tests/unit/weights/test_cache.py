"""Versions on a host: made once, kept while used, made again when damaged."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sluice.durable import LockTimeoutError, clone_file, has_room_to_change
from sluice.weights.checkout import check_out
from sluice.weights.checkpoint import CheckedShards
from sluice.weights.errors import TensorDigestError, VersionNotFoundError
from sluice.weights.host_cache import CachedVersion, HostCache
from sluice.weights.manifest import read_manifest
from sluice.weights.shards import load_verified
from sluice.weights.store import WeightStore
from tests.fresh import FRESH
from tests.patience import PATIENCE


class Counting(WeightStore):
    """A store that counts what is read of it."""

    fetched = 0

    def local_file(self, version: int, name: str, scratch: Path) -> Path:
        self.fetched += 1
        return super().local_file(version, name, scratch)


@pytest.fixture
def counting(store: WeightStore) -> Counting:
    return Counting(store.location, durable=False)


def check(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    loaded = dict(load_verified(directory, read_manifest(directory)))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_version_is_fetched_once_however_many_ask(policy, counting, tmp_path) -> None:
    version = policy.publish_chain(2)[-1]
    caches = [HostCache(tmp_path / "cache", counting) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda cache: cache.take(version), caches))
    once = len(counting.manifest(version).files) + 2  # two deltas beside the files of the base
    assert counting.fetched == once
    assert len({held.directory for held in taken}) == 1
    check(taken[0].directory, policy.history[version])


def test_the_next_version_needs_its_delta_alone(policy, counting, tmp_path) -> None:
    first, second, third = policy.publish_chain(3)
    cache = HostCache(tmp_path / "cache", counting)
    cache.take(second).release()
    counting.fetched = 0
    held = cache.take(third)
    assert counting.fetched == 2
    check(held.directory, policy.history[third])
    assert first < third


def test_what_is_held_stays_and_the_rest_goes(policy, store, tmp_path) -> None:
    versions = policy.publish_chain(5)
    cache = HostCache(tmp_path / "cache", store, keep=2)
    first = cache.take(versions[0])
    for version in versions[1:]:
        cache.take(version).release()
    here = sorted(int(path.name[:8]) for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert here == [versions[0], *versions[-2:]]
    first.release()
    policy.change()
    cache.take(policy.publish(base=versions[-1]).version)
    assert not first.directory.exists()
    assert len(list((tmp_path / "cache").glob("*.lock"))) == 2


def test_a_base_is_held_while_the_next_version_is_made_of_it(policy, store, tmp_path) -> None:
    first, second = policy.publish_chain(2)
    kept = []

    class Meanwhile(WeightStore):
        """Another engine of the host removes what nobody holds."""

        def local_file(self, version: int, name: str, scratch: Path) -> Path:
            other.discard(first)
            kept.append(held.directory.is_dir())
            return super().local_file(version, name, scratch)

    other = HostCache(tmp_path / "cache", store)
    held = other.take(first)
    held.release()
    taken = HostCache(tmp_path / "cache", Meanwhile(store.location)).take(second)
    assert kept == [True, True]
    check(taken.directory, policy.history[second])


def test_an_older_version_than_all_that_are_here(policy, store, tmp_path) -> None:
    """A run that goes back takes one that is first in line to be removed."""
    versions = policy.publish_chain(4)
    cache = HostCache(tmp_path / "cache", store, keep=2, fetch_seconds=1)
    for version in versions[1:]:
        cache.take(version).release()
    taken: list[CachedVersion] = []
    taking = threading.Thread(target=lambda: taken.append(cache.take(versions[0])), daemon=True)
    taking.start()
    taking.join(PATIENCE)
    check(taken[0].directory, policy.history[versions[0]])


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "model-0.safetensors"])
def test_a_base_on_this_host_that_has_lost_a_file_is_made_anew(
    policy, store, tmp_path, name
) -> None:
    first, second = policy.publish_chain(2)
    cache = HostCache(tmp_path / "cache", store)
    held = cache.take(first)
    held.release()
    (held.directory / name).unlink()
    check(cache.take(second).directory, policy.history[second])
    check(cache.take(first).directory, policy.history[first])


def test_a_damaged_base_on_this_host_is_made_anew(policy, store, tmp_path) -> None:
    first, second = policy.publish_chain(2)
    cache = HostCache(tmp_path / "cache", store)
    held = cache.take(first)
    held.release()
    path = held.directory / "model-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    check(cache.take(second).directory, policy.history[second])
    assert not held.directory.exists()


def test_a_damaged_store_leaves_nothing_and_names_the_tensor(policy, store, tmp_path) -> None:
    version = policy.publish().version
    path = store.get(version).directory / "model-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TensorDigestError) as found:
        HostCache(tmp_path / "cache", store).take(version)
    assert found.value.name == "embed.weight"
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_version_discarded_is_fetched_again(policy, counting, tmp_path) -> None:
    version = policy.publish().version
    cache = HostCache(tmp_path / "cache", counting)
    held = cache.take(version)
    cache.discard(version)  # in use: stays
    assert held.directory.is_dir()
    held.release()
    cache.discard(version)
    assert not held.directory.exists()
    check(cache.take(version).directory, policy.history[version])


def test_a_version_that_is_not_there(store, tmp_path) -> None:
    with pytest.raises(VersionNotFoundError):
        HostCache(tmp_path / "cache", store).take(3)


def test_another_process_that_hangs_is_waited_for_only_so_long(policy, store, tmp_path) -> None:
    version = policy.publish().version
    let_go, began = threading.Event(), threading.Event()

    class Slow(WeightStore):
        def local_file(self, version: int, name: str, scratch: Path) -> Path:
            began.set()
            assert let_go.wait(PATIENCE)
            return super().local_file(version, name, scratch)

    with ThreadPoolExecutor(1) as pool:
        slow = HostCache(tmp_path / "cache", Slow(store.location))
        made = pool.submit(slow.take, version)
        assert began.wait(PATIENCE)
        with pytest.raises(LockTimeoutError):
            HostCache(tmp_path / "cache", store, fetch_seconds=0.2).take(version)
        let_go.set()
        made.result(PATIENCE).release()


def take_and_stop(root: Path, cache: Path, version: int) -> None:
    """Die in the middle of making a version."""

    class Deadly(WeightStore):
        def local_file(self, version: int, name: str, scratch: Path) -> Path:
            if name.endswith(".delta"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().local_file(version, name, scratch)

    HostCache(cache, Deadly(root)).take(version)


def test_a_reader_killed_midway_leaves_no_half_version(policy, store, tmp_path) -> None:
    version = policy.publish_chain(2)[-1]
    cache = tmp_path / "cache"
    process = FRESH.Process(target=take_and_stop, args=(store.location, cache, version))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert not list(cache.glob("[0-9]*-*/"))
    held = HostCache(cache, store).take(version)
    check(held.directory, policy.history[version])
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [held.directory.name]


def test_what_a_killed_reader_left_goes_with_the_next_version(policy, store, tmp_path) -> None:
    """Nobody may ever ask for the same one again."""
    version = policy.publish_chain(2)[-1]
    cache = tmp_path / "cache"
    process = FRESH.Process(target=take_and_stop, args=(store.location, cache, version))
    process.start()
    process.join(PATIENCE)
    assert [path for path in cache.iterdir() if path.name.startswith(".")]
    policy.change()
    held = HostCache(cache, store).take(policy.publish().version)
    left = {path.name for path in cache.iterdir()}
    assert left == {held.directory.name, held.directory.name + ".lock"}


def take_with_little_room(root: Path, cache: Path, version: int, limit: int) -> None:
    """Exit with 3 where the disk is full, as far as this process may know."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        HostCache(cache, WeightStore(root)).take(version)
    except OSError:
        raise SystemExit(3) from None


def test_a_full_disk_leaves_no_half_version(policy, store, tmp_path) -> None:
    version = policy.publish_chain(2)[-1]
    cache = tmp_path / "cache"
    process = FRESH.Process(
        target=take_with_little_room, args=(store.location, cache, version, 4096)
    )
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 3
    assert not [path for path in cache.iterdir() if path.is_dir()]
    check(HostCache(cache, store).take(version).directory, policy.history[version])


def test_folders_of_the_former_release_go_unless_an_engine_of_it_still_serves_them(
    policy, counting, tmp_path
) -> None:
    first, second, third = policy.publish_chain(3)
    former = tmp_path / "cache" / "engines"
    for name in ("7-ab", "8-cd"):
        (former / name).mkdir(parents=True)
        (former / name / "model.safetensors").write_bytes(b"tensors")
        (former / f"{name}.use").touch()
    (former / "b.lock").touch()
    cache = HostCache(tmp_path / "cache", counting)
    with (former / "8-cd.use").open("ab") as serving:
        fcntl.flock(serving, fcntl.LOCK_SH)
        cache.take(first)
        assert sorted(path.name for path in former.iterdir()) == ["8-cd", "8-cd.use", "b.lock"]
        assert (former / "8-cd" / "model.safetensors").exists()
    with (former / "b.lock").open("ab") as fetching:
        fcntl.flock(fetching, fcntl.LOCK_EX)
        cache.take(second)
        assert sorted(path.name for path in former.iterdir()) == ["b.lock"]
    cache.take(third)
    assert not former.exists()


def inodes(directory: Path) -> set[int]:
    return {path.stat().st_ino for path in directory.glob("*.safetensors")}


def test_a_version_out_of_use_is_turned_into_the_next_one(policy, store, tmp_path) -> None:
    """Its files are patched where they lie; a version that is held is not touched."""
    first, second, third, fourth = policy.publish_chain(4)
    cache = HostCache(tmp_path / "cache", store, keep=2)
    old = cache.take(first)
    files = inodes(old.directory)
    held = cache.take(second)
    taken = cache.take(third)  # the first is still in use
    assert not inodes(taken.directory) & files
    check(old.directory, policy.history[first])
    old.release()
    last = cache.take(fourth)
    assert inodes(last.directory) == files
    for kept, version in ((held, second), (taken, third), (last, fourth)):
        check(kept.directory, policy.history[version])
    assert not old.directory.exists()


def test_a_version_out_of_use_that_has_holes_is_turned_into_the_next_one(
    policy, store, tmp_path
) -> None:
    """Through a map, a full disk would end the process at the first of them."""
    policy.tensors["embed.weight"] = torch.zeros(1 << 16, dtype=torch.bfloat16)
    versions = policy.publish_chain(2)
    policy.tensors["embed.weight"] = torch.ones(1 << 16, dtype=torch.bfloat16)
    versions.append(policy.publish(base=versions[1]).version)
    cache = HostCache(tmp_path / "cache", store, keep=2)
    old = cache.take(versions[0])
    path = old.directory / "model-0.safetensors"
    content = path.read_bytes()
    with path.open("wb") as file:
        file.write(content[:4096])
        file.truncate(len(content))
    assert not has_room_to_change(path)
    cache.take(versions[1]).release()
    old.release()
    files = inodes(old.directory)
    last = cache.take(versions[2])
    assert inodes(last.directory) == files
    check(last.directory, policy.history[versions[2]])


def test_a_file_turned_into_another_one_is_not_taken_for_the_one_that_was_checked(
    policy, store
) -> None:
    first, _, third = policy.publish_chain(3)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        base = Path(root) / "base"
        base.mkdir()
        manifest = check_out(store, first, base)
        checked = CheckedShards()
        for shard in manifest.shards():
            checked.check(base / shard.file_name, shard)
            assert has_room_to_change(base / shard.file_name)
        (base / "manifest.json").unlink()
        check_out(store, third, base, {first: base})
        assert not any(checked.has(base / s.file_name, s) for s in manifest.shards())


@pytest.mark.parametrize("damage", ["flip", "cut", "lost"])
def test_a_version_out_of_use_that_is_damaged_is_not_used(
    policy, store, tmp_path, damage: str
) -> None:
    versions = policy.publish_chain(3)
    cache = HostCache(tmp_path / "cache", store, keep=2)
    old = cache.take(versions[0])
    cache.take(versions[1]).release()
    path = old.directory / "model-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content if damage == "flip" else content[:-1])
    if damage == "lost":
        path.unlink()
    old.release()
    taken = cache.take(versions[2])
    check(taken.directory, policy.history[versions[2]])
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_a_tensor_that_did_not_change_is_not_written(policy, store, tmp_path) -> None:
    versions = policy.publish_chain(2)
    base = tmp_path / "base"
    base.mkdir()
    check_out(store, versions[0], base)
    policy.tensors["layer.bias"] = policy.tensors["layer.bias"] + 1
    third = policy.publish(base=versions[1]).version
    policy.tensors["layer.bias"] = policy.tensors["layer.bias"] + 1
    fourth = policy.publish(base=third).version
    (base / "manifest.json").unlink()
    check_out(store, third, base, {versions[0]: base})
    (base / "manifest.json").unlink()
    untouched = base / "model-0.safetensors"  # the embedding

    before = untouched.stat().st_mtime_ns
    check_out(store, fourth, base, {third: base})
    check(base, policy.history[fourth])
    assert untouched.stat().st_mtime_ns == before
    check(base, policy.history[fourth])


def test_blocks_are_shared_where_the_file_system_can(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"x" * 8192)
    if clone_file(source, target):
        assert target.read_bytes() == source.read_bytes()
    else:
        assert not target.exists()
    with pytest.raises(FileNotFoundError):
        clone_file(tmp_path / "none", tmp_path / "c")
    assert not (tmp_path / "c").exists()
