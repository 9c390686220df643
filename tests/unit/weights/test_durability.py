"""What of a weight store is left when the machine goes down: what was synced, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sluice.weights.manifest import MANIFEST_NAME, decode_manifest, digest_bytes
from sluice.weights.shards import write_shard
from sluice.weights.store import StoredVersion, WeightStore
from tests.durable_disk import DurableDisk


class Disk(DurableDisk):
    """Of a store of weights."""

    def check(self) -> None:
        """A version that has its name has all its files, whole."""
        for name in self.entries("versions"):
            self.check_version(name)

    def check_version(self, name: str) -> None:
        inodes = self.entries("versions", name)
        found = {file: self.contents.get(inode) for file, inode in inodes.items()}
        manifest = decode_manifest(found[MANIFEST_NAME] or b"")
        for file, entry in manifest.files.items():
            data = found.get(file)
            assert data is not None, f"{file} of version {name} is not durable"
            assert (len(data), digest_bytes(data)) == (entry.size, entry.digest), file


def publish(store: WeightStore, companions: list[Path], *, promised: bool = False) -> StoredVersion:
    """Shards that nobody has synced, as those that another process wrote may be.

    Ranks announce through a store of theirs that is not durable.
    """
    staging, ranks = store.allocate(None), WeightStore(store.location, durable=False)
    tensors = {"a": torch.arange(5.0), "b": torch.ones(3)}
    shards = [
        write_shard(staging.directory, f"{name}.safetensors", {name: tensor}, sync=False)
        for name, tensor in tensors.items()
    ]
    for shard in shards:
        ranks.announce(staging.version, shard, staging.directory)
    if promised:
        store.promise(staging, shards, companions, 1)
        return store.fulfil(staging)
    return store.commit(staging, shards, companions, 1)


@pytest.fixture
def companions(tmp_path: Path) -> list[Path]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3"}))
    return [path]


@pytest.mark.parametrize("promised", [False, True])
def test_what_commit_has_returned_outlives_the_machine(
    tmp_path: Path, companions: list[Path], promised: bool
) -> None:
    disk = Disk(tmp_path / "store")
    with disk.in_use():
        store = WeightStore(disk.root)
        for number in (1, 2):
            record = publish(store, companions, promised=promised)
            assert record.version == number
            assert set(disk.entries("versions")) == {f"{n:08d}" for n in range(1, number + 1)}
            disk.check()
        assert set(disk.entries("allocated")) == {"00000001", "00000002"}
        store.pin(1, "somebody")
        assert disk.entries("pins", "00000001").keys() == {"somebody"}
        store.pin(2, "another")
        assert set(disk.entries("pins")) == {"00000001", "00000002"}


def test_folders_whose_maker_died_before_the_disk_had_them_are_durable_too(
    tmp_path: Path, companions: list[Path]
) -> None:
    disk = Disk(tmp_path / "store")
    with disk.in_use():
        WeightStore(disk.root, durable=False)
        publish(WeightStore(disk.root), companions)
        assert set(disk.entries("versions")) == {"00000001"}


def test_a_version_is_synced_once_a_file(tmp_path: Path, companions: list[Path]) -> None:
    disk = Disk(tmp_path / "store")
    with disk.in_use():
        store = WeightStore(disk.root)
        disk.file_syncs = disk.folder_syncs = 0
        publish(store, companions)
        # two shards, config, index and manifest; and the number that was given out
        assert disk.file_syncs == 6
        assert disk.folder_syncs == 3  # of the number, of the files, and of the version


def test_the_disk_of_the_test_forgets_what_nobody_synced(
    tmp_path: Path, companions: list[Path]
) -> None:
    """A control: it is not so that all is found again."""
    disk = Disk(tmp_path / "store")
    with disk.in_use():
        publish(WeightStore(disk.root, durable=False), companions)
        assert disk.entries("versions") == {}
        with pytest.raises(KeyError):
            disk.check_version("00000001")
