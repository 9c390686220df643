"""A version that is promised is found and pinned; it is none before its files are there, whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sluice.weights.checkpoint import describe_shard
from sluice.weights.errors import (
    InvalidCheckpointError,
    MissingFileError,
    StagingLostError,
    TensorDigestError,
    VersionExistsError,
    VersionNotFoundError,
)
from sluice.weights.manifest import DeltaFile, ShardFile
from sluice.weights.shards import PublishedShards, load_verified
from sluice.weights.staging import Staging
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE

HERE = Path(__file__).parent
FILE = "model-1.safetensors"
Tensors = dict[str, torch.Tensor]


def cast(shards: PublishedShards, staging: Staging, tensors: Tensors) -> ShardFile:
    """What a rank does before it writes a file."""
    shards.begin(None, behind=True)
    found = shards.write(staging.directory, FILE, tensors)
    shards.finish(staging.version)
    return found


@pytest.fixture
def shards() -> PublishedShards:
    return PublishedShards(keep=True, sync=False)


@pytest.fixture
def promised(store: WeightStore, shards: PublishedShards, tensors: Tensors) -> Staging:
    staging = store.allocate(None)
    store.promise(staging, [cast(shards, staging, tensors)], [], 3)
    return staging


def test_a_promise_is_found_and_is_no_version(
    store: WeightStore, promised: Staging, checkpoint: Path
) -> None:
    """Its digest is that of a version that was written at once, whose files are other ones."""
    found = store.find(1)
    assert (found.version, found.step, found.promised, found.directory) == (1, 3, True, None)
    assert store.expected(1).digest == found.digest
    assert not list(promised.directory.glob("*.safetensors"))
    assert (store.has(1), list(store.versions())) == (False, [])
    for read in (store.get, store.manifest):
        with pytest.raises(VersionNotFoundError):
            read(1)
    staging = store.allocate(1)
    shutil.copy(checkpoint / "model.safetensors", staging.directory / "other.safetensors")
    shard = describe_shard(staging.directory / "other.safetensors")
    assert store.commit(staging, [shard], [], 3).digest == found.digest


def test_what_is_written_behind_is_what_was_promised(
    store: WeightStore, promised: Staging, shards: PublishedShards, tensors: Tensors
) -> None:
    before = store.expected(1)
    written: list[str] = []
    shards.write_kept(1, promised.directory, lambda shard: written.append(shard.file_name))
    record = store.fulfil(promised)
    assert written == [FILE]
    assert (record.promised, record.directory is not None) == (False, True)
    assert store.manifest(1) == before == store.expected(1)
    assert store.find(1) == record == WeightStore(store.location).get(1)
    loaded = load_file(Path(store.location) / "versions/00000001" / FILE)  # by another reader
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert not list(Path(store.location, "promised").iterdir())
    assert store.sweep() == []
    with pytest.raises(StagingLostError):
        store.fulfil(promised)


def test_a_promise_that_is_taken_back_is_gone_and_its_number_with_it(
    store: WeightStore, promised: Staging
) -> None:
    store.pin(1, "engine")
    store.abort(promised)
    for look in (store.find, store.expected, lambda version: store.pin(version, "engine")):
        with pytest.raises(VersionNotFoundError):
            look(1)
    store.unpin(1, "engine")
    assert store.allocate(1).version == 2


def test_the_promise_of_a_writer_that_died_is_swept_and_that_of_a_live_one_is_not(
    store: WeightStore, promised: Staging
) -> None:
    other = WeightStore(store.location)
    other.sweep()
    assert other.find(1).promised
    promised.lock.close()  # as the kernel does for a process that died
    other.sweep()
    with pytest.raises(VersionNotFoundError):
        other.find(1)
    assert other.allocate(None).version == 2


def test_retention_spares_what_is_promised_and_counts_no_promise(
    store: WeightStore, shards: PublishedShards, tensors: Tensors, policy
) -> None:
    policy.publish()
    policy.publish()
    staging = store.allocate(2)
    store.promise(staging, [cast(shards, staging, tensors)], [], 0)
    store.pin(3, "engine")
    assert store.retain(1) == [1]
    assert store.find(3).promised
    shards.write_kept(3, staging.directory)
    store.fulfil(staging)
    assert store.pins() == {3: {"engine"}}
    assert store.retain(1) == [2]
    assert list(store.versions()) == [3]


def test_files_that_are_not_as_promised_make_no_version(
    store: WeightStore, promised: Staging, shards: PublishedShards, tensors: Tensors
) -> None:
    with pytest.raises(MissingFileError):
        store.fulfil(promised)
    shards.write_kept(1, promised.directory)
    path = promised.directory / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(MissingFileError):
        store.fulfil(promised)
    path.write_bytes(whole.replace(b"norm.weight", b"form.weight"))
    with pytest.raises(InvalidCheckpointError):
        store.fulfil(promised)
    assert not store.has(1)
    path.write_bytes(whole)
    assert store.fulfil(promised).version == 1


def test_a_byte_that_flips_behind_is_found_by_whoever_reads(
    store: WeightStore, promised: Staging, shards: PublishedShards
) -> None:
    shards.write_kept(1, promised.directory)
    path = promised.directory / FILE
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    record = store.fulfil(promised)
    with pytest.raises(TensorDigestError):
        dict(load_verified(record.directory, store.manifest(1)))


def test_nothing_is_promised_twice_nor_for_a_delta(
    store: WeightStore, promised: Staging, shards: PublishedShards, tmp_path: Path
) -> None:
    shard = store.expected(1).shards()[0]
    with pytest.raises(VersionExistsError):
        store.promise(promised, [shard], [], 3)
    delta = ShardFile(shard.file_name, shard.size, shard.digest, shard.tensors)
    object.__setattr__(delta, "delta", DeltaFile(1, "0" * 32, 1, 1))
    with pytest.raises(InvalidCheckpointError, match="delta"):
        store.promise(store.allocate(None), [delta], [], 3)
    with pytest.raises(StagingLostError):
        shards.write_kept(2, tmp_path)  # another version than the one kept
    with pytest.raises(VersionNotFoundError):
        store.fulfil(store.allocate(None))  # for which nothing is promised


@settings(max_examples=20)
@given(data=st.data())
def test_memory_that_is_filled_again_holds_the_new_version(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Version after version into the same memory, of any layout: each is as it was cast."""
    root = tmp_path_factory.mktemp("again")
    kept = PublishedShards(keep=True, sync=False)
    for version in range(1, data.draw(st.integers(2, 4)) + 1):
        sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        tensors = {f"w{i}": torch.randn(size) for i, size in enumerate(sizes)}
        kept.begin(None, behind=True)
        names = {name: torch.bfloat16 for name in tensors if data.draw(st.booleans())}
        report = kept.write(root, "a.safetensors", tensors, names)
        kept.finish(version)
        assert not (root / "a.safetensors").exists()
        for tensor in tensors.values():
            tensor.zero_()  # the next step
        expected = describe_after(kept, version, root)
        assert report == expected
        (root / "a.safetensors").unlink()


def describe_after(kept: PublishedShards, version: int, root: Path) -> ShardFile:
    kept.write_kept(version, root)
    found = describe_shard(root / "a.safetensors")
    (reported,) = kept.report(version)
    assert found.tensors == reported.tensors
    assert found.size == reported.size
    return reported


def test_a_crash_at_any_operation_keeps_each_promise_or_none_of_it(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, HERE.parent / "crash_points.py", HERE / "promise_scenario.py", tmp_path],
        check=True,
        timeout=PATIENCE,
        env={"PYTHONPATH": str(HERE.parents[2])},
    )
    runs = sorted(tmp_path.glob("*.told"))
    assert len(runs) > 50
    lost = 0
    for path in runs:
        store = WeightStore(path.with_suffix("") / "store", durable=False)
        told = [line.split() for line in path.read_text().splitlines()]
        digests = {int(words[1]): words[2] for words in told if words[0] == "promised"}
        fulfilled = {int(words[1]) for words in told if words[0] == "fulfilled"}
        staging = store.allocate(None)  # as a writer that starts again
        numbers = {int(words[1]) for words in told} | set(store.versions())
        assert staging.version > max(numbers, default=0)
        assert fulfilled <= set(store.versions())
        for version, digest in digests.items():
            if store.has(version):
                assert store.get(version).digest == digest
                dict(load_verified(store.get(version).directory, store.manifest(version)))
            else:
                lost += 1
                with pytest.raises(VersionNotFoundError):
                    store.find(version)
        assert not list((path.with_suffix("") / "store" / "promised").iterdir())
    assert lost > 10  # or the crashes would show nothing
