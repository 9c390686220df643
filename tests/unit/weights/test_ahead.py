"""Versions that are made on a host while they are published: whole and checked at their commit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from sluice.weights.errors import TensorDigestError
from sluice.weights.host_cache import HostCache
from sluice.weights.manifest import read_manifest
from sluice.weights.store import Announcement, WeightStore
from tests.contract.weight_store.policy import Policy, Publication
from tests.fresh import FRESH
from tests.patience import PATIENCE


class Counting(WeightStore):
    """A store that notes what is read of its committed versions."""

    def __init__(self, location: str) -> None:
        super().__init__(location, durable=False)
        self.fetched: list[str] = []

    def local_file(self, version: int, name: str, scratch: Path) -> Path:
        self.fetched.append(name)
        return super().local_file(version, name, scratch)


@pytest.fixture
def counting(store: WeightStore) -> Counting:
    return Counting(store.location)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(root: Path, counting: Counting) -> HostCache:
    return HostCache(root, counting)


def check(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    """By another reader than ours."""
    files = directory.glob("*.safetensors")
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def folders(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def inodes(directory: Path) -> set[int]:
    return {path.stat().st_ino for path in directory.glob("*.safetensors")}


def serve(cache: HostCache, policy: Policy, count: int = 2) -> list[int]:
    """A whole version and deltas, all of which were on the host and are out of use."""
    versions = policy.publish_chain(count)
    for version in versions:
        cache.take(version).release()
    return versions


def begin(policy: Policy, base: int | None) -> Publication:
    policy.change()
    return Publication(policy, base)


def announced(publication: Publication, part: int) -> Announcement:
    return publication.announce(publication.write(part))


def staged(cache: HostCache, publication: Publication, parts: int = 2) -> list[Path | None]:
    found = [announced(publication, part) for part in range(parts)]
    return [cache.stage(each).result(PATIENCE) for each in found]


def take(cache: HostCache, policy: Policy, publication: Publication) -> Path:
    held = cache.take(publication.commit().version)
    check(held.directory, policy.history[publication.version])
    assert read_manifest(held.directory).version == publication.version
    return held.directory


def test_deltas_are_applied_before_their_version_is_committed(
    policy, cache, root, counting
) -> None:
    """Where files lie that are two versions old; the commit leaves nothing to be read."""
    versions = serve(cache, policy)
    old = next(root.glob(f"{versions[0]:08d}-*/"))
    files = inodes(old)
    publication = begin(policy, versions[-1])
    counting.fetched.clear()
    paths = staged(cache, publication)
    assert sorted(counting.fetched) == ["model-0.safetensors.delta", "model-1.safetensors.delta"]
    assert {path.stat().st_ino for path in paths} == files
    for path in paths:
        expected = {name: policy.tensors[name] for name in load_file(path)}
        assert all(torch.equal(t, expected[name]) for name, t in load_file(path).items())
    counting.fetched.clear()
    directory = take(cache, policy, publication)
    assert inodes(directory) == files
    assert not [name for name in counting.fetched if "safetensors" in name]
    names = {path.name for path in directory.iterdir()}
    assert names == {*read_manifest(directory).files, "manifest.json"}


@pytest.mark.parametrize("count", [0, 1])
def test_what_no_version_lies_here_for_is_made_ahead_too(policy, cache, count) -> None:
    """A whole version into an empty cache, and a delta where the one before is in use."""
    versions = policy.publish_chain(count) if count else [None]
    held = [cache.take(version) for version in versions if version]
    publication = begin(policy, versions[-1])
    assert None not in staged(cache, publication)
    take(cache, policy, publication)
    for each, version in zip(held, versions, strict=False):
        check(each.directory, policy.history[version])


def test_a_file_that_was_not_announced_comes_with_the_version(policy, cache) -> None:
    versions = serve(cache, policy)
    publication = begin(policy, versions[-1])
    staged(cache, publication, parts=1)
    publication.write(1)
    take(cache, policy, publication)


def test_a_version_that_is_never_committed_leaves_nothing(policy, cache, root) -> None:
    versions = serve(cache, policy)
    publication = begin(policy, versions[-1])
    found = announced(publication, 0)
    assert cache.stage(found).result(PATIENCE) is not None
    policy.store.abort(publication.staging)
    cache.drop(publication.version)
    assert {name[:8] for name in folders(root)} == {f"{versions[-1]:08d}"}
    assert cache.stage(found).result(PATIENCE) is None  # nor does what comes late
    assert len(folders(root)) == 1
    later = begin(policy, None)
    assert None not in staged(cache, later)
    take(cache, policy, later)


def flip(path: Path, position: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_that_was_damaged_is_not_gone_on_from(policy, cache, root, damage, when) -> None:
    versions = serve(cache, policy)
    publication = begin(policy, versions[-1])
    if when == "before":
        damage(next(root.glob(f"{versions[0]:08d}-*/model-1.safetensors")))
    paths = staged(cache, publication)
    assert (paths[1] is None) is (when == "before")
    if when == "after":
        damage(paths[1])
    take(cache, policy, publication)


def test_a_delta_that_was_damaged_is_named_by_who_needs_it(policy, cache, root) -> None:
    versions = serve(cache, policy)
    serving = cache.take(versions[-1])
    publication = begin(policy, versions[-1])
    path = publication.write(0)
    flip(path, len(path.read_bytes()) // 2)
    assert cache.stage(publication.announce(path)).result(PATIENCE) is None
    assert cache.stage(announced(publication, 1)).result(PATIENCE) is None
    version = publication.commit().version
    cache.finish(version)
    with pytest.raises(TensorDigestError, match=r"embed\.weight"):
        cache.take(version)
    assert folders(root) == {serving.directory.name}


def test_a_file_that_is_another_in_the_manifest_is_made_anew(policy, cache) -> None:
    versions = serve(cache, policy)
    publication, other = begin(policy, versions[-1]), begin(policy, None)
    wrong = replace(announced(other, 0), version=publication.version)
    assert cache.stage(wrong).result(PATIENCE) is not None
    policy.change()
    for part in range(2):
        publication.write(part)
    take(cache, policy, publication)


def test_deltas_of_a_trainer_that_names_no_base_come_with_the_version(policy, cache) -> None:
    versions = serve(cache, policy)
    publication = begin(policy, versions[-1])
    found = [replace(announced(publication, part), base=None) for part in range(2)]
    assert [cache.stage(each).result(PATIENCE) for each in found] == [None, None]
    take(cache, policy, publication)


def test_of_several_engines_one_makes_a_version_and_all_have_its_files(
    policy, cache, root, counting
) -> None:
    versions = serve(cache, policy)
    others = [HostCache(root, counting) for _ in range(3)]
    publication = begin(policy, versions[-1])
    counting.fetched.clear()
    found = [announced(publication, part) for part in range(2)]
    asked = [each.stage(file) for file in found for each in (cache, *others)]
    assert len({pending.result(PATIENCE) for pending in asked}) == 2
    assert len(counting.fetched) == 2
    version = publication.commit().version
    with ThreadPoolExecutor(4) as pool:
        taking = [pool.submit(each.take, version) for each in others]  # who made it is not asked
        cache.finish(version)
        held = [each.result(PATIENCE) for each in taking]
    late = [each.stage(file).result(PATIENCE) for file in found for each in others]
    assert set(late) <= {None, *held[0].directory.glob("*.safetensors")}
    assert len({each.directory for each in held}) == 1
    check(held[0].directory, policy.history[version])
    assert len(folders(root)) == 2


def make_ahead(location: str, root: Path, found: list[Announcement], number: int) -> None:
    """Stop, or die, in the middle of the second file."""

    class Stopping(WeightStore):
        def announced_file(self, announcement: Announcement, scratch: Path) -> Path:
            if announcement == found[1]:
                # to this thread, which else goes on until another one has taken the signal
                signal.pthread_kill(threading.get_ident(), number)
            return super().announced_file(announcement, scratch)

    store = Stopping(location, durable=False)
    cache = HostCache(root, store)
    for each in found:
        cache.stage(each).result(PATIENCE)
    cache.take(each.version)


@pytest.fixture
def processes() -> Iterator[list[multiprocessing.process.BaseProcess]]:
    running: list[multiprocessing.process.BaseProcess] = []
    yield running
    for process in running:
        process.kill()
        process.join(PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_while_it_makes_a_version_holds_up_no_other(
    policy, store, root, cache, processes, number: signal.Signals
) -> None:
    versions = serve(cache, policy)
    publication = begin(policy, versions[-1])
    found = [announced(publication, part) for part in range(2)]
    maker = FRESH.Process(target=make_ahead, args=(store.location, root, found, number))
    processes.append(maker)
    maker.start()
    if number == signal.SIGKILL:
        maker.join(PATIENCE)
        assert maker.exitcode == -signal.SIGKILL
    else:
        until(lambda: psutil.Process(maker.pid).status() == psutil.STATUS_STOPPED)
    other = HostCache(root, store, draft_seconds=0.2)
    paths = [other.stage(each).result(PATIENCE) for each in found]
    assert (paths[1] is None) is (number == signal.SIGSTOP)
    directory = take(other, policy, publication)
    if number == signal.SIGSTOP:
        os.kill(maker.pid, signal.SIGCONT)
        maker.join(PATIENCE)
        assert maker.exitcode == 0
    check(directory, policy.history[publication.version])
    assert len(folders(root)) == 2


def until(happened) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_an_engine_that_was_killed_has_left_goes_with_the_next_version(
    policy, root, cache
) -> None:
    first, second = serve(cache, policy)
    left = root / f"{second + 1:08d}-draft"
    next(root.glob(f"{first:08d}-*/")).rename(left)
    (left / "manifest.json").unlink()
    left.with_name(f"{left.name}.lock").touch()
    policy.store.abort(begin(policy, second).staging)
    publication = begin(policy, None)
    for part in range(2):
        publication.write(part)
    take(cache, policy, publication)
    assert {name[:8] for name in folders(root)} == {
        f"{version:08d}" for version in (second, publication.version)
    }


def test_who_closes_waits_for_no_neighbour_and_leaves_nothing_half_made(
    policy, store, root, cache
) -> None:
    versions = serve(cache, policy)
    begun, let_go = threading.Event(), threading.Event()

    class Slow(WeightStore):
        def local_file(self, version: int, name: str, scratch: Path) -> Path:
            begun.set()
            assert let_go.wait(PATIENCE)
            return super().local_file(version, name, scratch)

    slow, waiting = HostCache(root, Slow(store.location, durable=False)), HostCache(root, store)
    publication = begin(policy, versions[-1])
    found = announced(publication, 0)
    making: Future[Path | None] = slow.stage(found)
    assert begun.wait(PATIENCE)
    asked = waiting.stage(found)
    waiting.close()
    assert asked.result(PATIENCE) is None
    slow.close()
    with ThreadPoolExecutor(1) as pool:
        dropped = pool.submit(slow.drop, publication.version)
        let_go.set()
        dropped.result(PATIENCE)
    making.result(PATIENCE)
    assert {name[:8] for name in folders(root)} == {f"{versions[-1]:08d}"}
    assert len(list(root.glob("*.lock"))) == 1
