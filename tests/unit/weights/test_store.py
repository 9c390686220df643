"""Versions: numbers, parents, what a commit refuses, what retention spares."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.weights.checkpoint import INDEX_NAME, companion_files, encode_index, shard_paths
from sluice.weights.errors import (
    DuplicateFileError,
    DuplicateTensorError,
    InvalidCheckpointError,
    ManifestError,
    MissingFileError,
    MissingTensorError,
    StagingLostError,
    UnexpectedTensorError,
    VersionExistsError,
    VersionNotFoundError,
)
from sluice.weights.manifest import MANIFEST_NAME, ShardFile, seal, unseal
from sluice.weights.shards import write_shard
from sluice.weights.staging import Staging
from sluice.weights.store import REMEMBERED, StoredVersion, WeightStore
from tests.fresh import FRESH
from tests.patience import PATIENCE
from tests.unit.weights.allocating import allocate_many


def shard(
    staging: Staging, *names: str, file_name: str = "a.safetensors", value: float = 0.0
) -> ShardFile:
    return write_shard(staging.directory, file_name, {n: torch.full((2, 3), value) for n in names})


def publish(store: WeightStore, parent: int | None = None, value: float = 0.0) -> StoredVersion:
    staging = store.allocate(parent)
    return store.commit(staging, [shard(staging, "w", value=value)], [], step=5)


def test_a_version_is_visible_only_after_its_commit(store: WeightStore) -> None:
    with pytest.raises(VersionNotFoundError):
        store.latest()
    staging = store.allocate(None)
    written = shard(staging, "w")
    assert list(store.versions()) == []
    with pytest.raises(VersionNotFoundError) as failure:
        store.get(staging.version)
    assert failure.value.version == staging.version
    record = store.commit(staging, [written], [], step=5)
    assert store.latest() == store.get(record.version) == record
    assert (record.version, record.parent, record.step) == (1, None, 5)
    assert WeightStore(store.location).list() == [record]
    assert not list((Path(store.location) / "staging").iterdir())


def test_numbers_are_never_given_twice(store: WeightStore) -> None:
    store.abort(store.allocate(None))
    first = publish(store)
    second = publish(store, first.version)
    store.retain(1)
    third = WeightStore(store.location).allocate(second.version)
    assert (first.version, second.version, third.version) == (2, 3, 4)
    for path in (Path(store.location) / "allocated").iterdir():
        path.unlink()  # a store of which only the versions were copied
    assert WeightStore(store.location).allocate(second.version).version == 4


def test_processes_share_the_numbers(tmp_path: Path) -> None:
    found = FRESH.Queue()
    processes = [
        FRESH.Process(target=allocate_many, args=(str(tmp_path), 40, found)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    versions = [found.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join(PATIENCE)
    assert sorted(itertools.chain.from_iterable(versions)) == list(range(1, 121))


def test_parents_outlive_removed_versions(store: WeightStore) -> None:
    first = publish(store)
    second = publish(store, first.version)
    third = publish(store, second.version)
    assert list(store.retain(1)) == [first.version, second.version]
    assert store.parent(third.version) == second.version
    assert store.parent(second.version) == first.version
    assert store.parent(first.version) is None
    with pytest.raises(VersionNotFoundError):
        store.get(second.version)
    with pytest.raises(VersionNotFoundError):
        store.allocate(99)


def test_the_digest_names_the_weights_not_their_files(store: WeightStore) -> None:
    whole = store.allocate(None)
    one = store.commit(whole, [shard(whole, "a", "b")], [], 0)
    cut = store.allocate(1)
    shards = [
        shard(cut, "b", file_name="x.safetensors"),
        shard(cut, "a", file_name="y.safetensors"),
    ]
    assert store.commit(cut, shards, [], 1).digest == one.digest
    other = store.allocate(2)
    assert store.commit(other, [shard(other, "a", "b", value=1.0)], [], 2).digest != one.digest
    renamed = store.allocate(2)
    assert store.commit(renamed, [shard(renamed, "a", "c")], [], 2).digest != one.digest


def test_the_index_counts_bytes_exactly(store: WeightStore) -> None:
    staging = store.allocate(None)
    shards = [
        shard(staging, "a", "b", file_name="model-00001-of-00002.safetensors"),
        shard(staging, "c", file_name="model-00002-of-00002.safetensors"),
    ]
    record = store.commit(staging, shards, [], 0)
    index = json.loads((record.directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 2 * 3 * 4
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


def test_commit_refuses_duplicates(store: WeightStore, tmp_path: Path) -> None:
    staging = store.allocate(None)
    first = shard(staging, "w", "v")
    second = shard(staging, "w", file_name="b.safetensors")
    with pytest.raises(DuplicateTensorError) as failure:
        store.commit(staging, [first, second], [], 0)
    assert (failure.value.name, failure.value.files) == ("w", ("a.safetensors", "b.safetensors"))
    with pytest.raises(DuplicateFileError):
        store.commit(staging, [first, first], [], 0)
    with pytest.raises(DuplicateFileError):
        shard(staging, "x")
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(DuplicateFileError):
        store.commit(staging, [first], [config, config], 0)
    assert store.commit(staging, [first], [config], 0).version == 1  # nothing was lost


def test_commit_refuses_what_is_missing_or_unexpected(store: WeightStore) -> None:
    staging = store.allocate(None)
    written = shard(staging, "w")
    with pytest.raises(MissingTensorError):
        store.commit(staging, [], [], 0)
    with pytest.raises(MissingTensorError) as missing:
        store.commit(staging, [written], [], 0, expected={"w", "v"})
    assert missing.value.names == ("v",)
    with pytest.raises(UnexpectedTensorError) as unexpected:
        store.commit(staging, [written], [], 0, expected=set())
    assert unexpected.value.names == ("w",)
    reshaped = {"w": replace(written.tensors["w"], shape=(3, 2))}
    with pytest.raises(UnexpectedTensorError):
        store.commit(staging, [written], [], 0, expected=reshaped)
    with pytest.raises(MissingFileError) as lost:
        store.commit(staging, [replace(written, file_name="gone.safetensors")], [], 0)
    assert lost.value.file_name == "gone.safetensors"
    with pytest.raises(MissingFileError):
        store.commit(staging, [replace(written, size=written.size + 1)], [], 0)
    with pytest.raises(MissingFileError):
        store.commit(staging, [written], [Path("nowhere/config.json")], 0)
    with pytest.raises(InvalidCheckpointError, match="differ in: w"):
        store.commit(staging, [replace(written, tensors=reshaped)], [], 0)
    store.commit(staging, [written], [], 0, expected=written.tensors)


@pytest.mark.parametrize("name", ["../a.safetensors", MANIFEST_NAME, "a.bin", ""])
def test_commit_refuses_names_that_are_no_shard(store: WeightStore, name: str) -> None:
    staging = store.allocate(None)
    with pytest.raises(InvalidCheckpointError):
        store.commit(staging, [replace(shard(staging, "w"), file_name=name)], [], 0)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", 7])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"")
    (tmp_path / "model" / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(InvalidCheckpointError, match="index"):
        shard_paths(tmp_path / "model")


def test_a_lone_model_file_is_taken_before_an_index_beside_it(tmp_path: Path) -> None:
    """As transformers does; an index may be left of the shards that were there before."""
    (tmp_path / INDEX_NAME).write_bytes(encode_index(4, {"w": "model-00001-of-00002.safetensors"}))
    with pytest.raises(MissingFileError, match="00001-of-00002"):
        shard_paths(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert shard_paths(tmp_path) == [tmp_path / "model.safetensors"]


def test_folders_of_a_model_are_no_companions(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_old.py").mkdir()
    (tmp_path / "tokenizer.json").touch()
    assert companion_files(tmp_path) == [tmp_path / "tokenizer.json"]


def test_a_lone_model_file_cannot_hide_other_shards(store: WeightStore) -> None:
    staging = store.allocate(None)
    shards = [shard(staging, "a", file_name="model.safetensors"), shard(staging, "b")]
    with pytest.raises(InvalidCheckpointError):
        store.commit(staging, shards, [], 0)


def test_a_staging_serves_once(store: WeightStore, tmp_path: Path) -> None:
    staging = store.allocate(None)
    written = shard(staging, "w")
    store.commit(staging, [written], [], 0)
    with pytest.raises(StagingLostError):
        store.commit(staging, [written], [], 0)
    reused = (tmp_path / "other").open("w")  # takes the number of the closed lock file
    store.abort(staging)
    store.abort(staging)
    reused.write("still open")
    reused.close()
    assert store.get(staging.version).directory.is_dir()


def test_a_committed_version_is_never_replaced(store: WeightStore) -> None:
    record = publish(store)
    staging = replace(store.allocate(None), version=record.version)
    with pytest.raises(VersionExistsError):
        store.commit(staging, [shard(staging, "w", value=3.0)], [], 9)
    assert WeightStore(store.location).get(record.version) == record


def test_the_files_of_a_version_under_the_number_of_another_are_refused(
    store: WeightStore,
) -> None:
    directory = publish(store).directory
    assert directory is not None
    shutil.copytree(directory, directory.with_name("00000002"))
    with pytest.raises(ManifestError, match="version 2 has the manifest of 1"):
        store.get(2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 4}, "format that this release does not know"),
        ({"format": 3}, "of another kind"),
        ({"line": "../elsewhere"}, "must match"),
    ],
)
def test_a_manifest_of_a_later_release_or_another_kind_is_refused(
    store: WeightStore, change: dict[str, object], reason: str
) -> None:
    """It may need what this release knows nothing of; none of its bytes is damaged."""
    directory = publish(store).directory
    assert directory is not None
    path = directory / MANIFEST_NAME
    document = unseal(path.read_bytes(), "manifest_digest", MANIFEST_NAME) | change
    path.write_bytes(seal(document, "manifest_digest"))
    with pytest.raises(ManifestError, match=reason):
        store.get(1)


def test_the_sweep_takes_only_what_nobody_holds(store: WeightStore) -> None:
    live, dead = store.allocate(None), store.allocate(None)
    dead.lock.close()  # what the kernel does when its owner dies
    assert [path.name for path in WeightStore(store.location).sweep()] == [dead.directory.name]
    assert live.directory.is_dir()
    store.commit(live, [shard(live, "w")], [], 0)
    with pytest.raises(StagingLostError):
        store.commit(dead, [], [], 0)


def test_retention_leaves_no_trace_of_pins_on_what_is_gone(store: WeightStore) -> None:
    for _ in range(3):
        publish(store)
    store.pin(1, "engine")
    store.pin(2, "engine")
    store.unpin(1, "engine")
    store.retain(1)
    assert [path.name for path in (Path(store.location) / "pins").iterdir()] == ["00000002"]
    assert store.pins() == {2: {"engine"}}


def test_what_nfs_leaves_of_files_removed_while_open_is_nothing_of_the_store(
    store: WeightStore,
) -> None:
    publish(store)
    for folder in ("allocated", "promised", "announced/00000001", "pins/00000001"):
        directory = Path(store.location) / folder
        directory.mkdir(exist_ok=True)
        (directory / ".nfs000000000001f00d00000001").touch()
    second = publish(store, parent=1)
    assert second.version == 2
    assert store.pins() == {}
    assert store.announced(1) == []
    assert list(store.retain(1)) == [1]


def test_retention_spares_the_used_and_the_pinned(store: WeightStore) -> None:
    for _ in range(7):
        publish(store)
    store.pin(2, "engine/0")
    store.pin(2, "ledger")
    assert store.pins() == {2: {"engine/0", "ledger"}}
    assert list(store.retain(2, in_use={4}, pinned=[5])) == [1, 3]
    assert list(store.versions()) == [2, 4, 5, 6, 7]
    assert not list((Path(store.location) / "trash").iterdir())
    store.unpin(2, "engine/0")
    store.unpin(2, "engine/0")
    assert list(WeightStore(store.location).retain(2, in_use={4, 5})) == []
    store.unpin(2, "ledger")
    assert list(store.retain(2)) == [2, 4, 5]
    with pytest.raises(VersionNotFoundError):
        store.pin(2, "late")
    with pytest.raises(ValueError, match="keep_last"):
        store.retain(0)


def test_a_reader_of_every_version_forgets_the_old_ones(store: WeightStore, tmp_path: Path) -> None:
    """An engine reads one a step and removes none, so nothing else would tell it to."""
    reader = WeightStore(tmp_path / "store", durable=False)
    for number in range(70):
        record = reader.get(publish(store).version)
        if not number:
            first = weakref.ref(record)
    gc.collect()
    assert first() is None
    assert reader.get(1).digest == store.get(1).digest


def test_a_durable_store_behaves_alike(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    record = publish(store)
    store.pin(record.version, "x")
    assert list(store.retain(1)) == []


def test_retention_reads_what_is_kept_once(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of many adapters keeps thousands of versions, and removes some at each publish."""
    for number in range(REMEMBERED + 10):
        store.pin(publish(store).version, f"path-{number}")
    fresh, read = WeightStore(store.location, durable=False), list[str]()
    get = fresh._objects.get
    monkeypatch.setattr(fresh._objects, "get", lambda key: read.append(key) or get(key))
    assert list(fresh.retain(1)) == []
    assert len(read) == REMEMBERED + 10
    last = publish(store).version
    assert list(fresh.retain(1)) == []
    assert len(read) == REMEMBERED + 11
    fresh.unpin(1, "path-0")
    assert list(fresh.retain(1)) == [1]
    assert list(fresh.versions()) == list(range(2, last + 1))
    assert len(read) == REMEMBERED + 11
