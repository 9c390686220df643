"""A model that is published again and again."""

from __future__ import annotations

from pathlib import Path

import torch

from sluice.place import is_bucket
from sluice.weights.manifest import ShardFile, delta_name
from sluice.weights.shards import PublishedShards
from sluice.weights.store import Announcement, StoredVersion, WeightStore


class Policy:
    """A model of two shards that changes a little from version to version."""

    def __init__(self, store: WeightStore, *, keep: bool = True, size: int = 4000) -> None:
        self.store = store
        self.shards = PublishedShards(keep=keep, sync=False)
        self.generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "embed.weight": self._random(size),
            "layer.weight": self._random(size // 4),
            "layer.bias": self._random(7).to(torch.float32),
            "router.bias": torch.tensor([True, False, True]),
            "step": torch.tensor(0, dtype=torch.int64),
        }
        self.history: dict[int, dict[str, torch.Tensor]] = {}
        self.companions: list[Path] = []

    def change(self, share: float = 0.01) -> None:
        """Move a share of the elements a little."""
        for name in ("embed.weight", "layer.weight"):
            old = self.tensors[name]
            moved = torch.rand(old.shape, generator=self.generator) < share
            self.tensors[name] = torch.where(moved, old * 1.01, old)
        self.tensors["step"] = self.tensors["step"] + 1

    def publish(self, base: int | None = None) -> StoredVersion:
        """As a rank does: two files, as deltas against `base` where that is what was kept."""
        publication = Publication(self, base)
        for part in range(2):
            publication.write(part)
        return publication.commit()

    def publish_chain(self, count: int) -> list[int]:
        """A whole version and `count - 1` deltas, each on the one before."""
        versions = [self.publish().version]
        for _ in range(count - 1):
            self.change()
            versions.append(self.publish(base=versions[-1]).version)
        return versions

    def _random(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(torch.bfloat16)


class Publication:
    """A version in the making, file by file."""

    def __init__(self, policy: Policy, base: int | None = None) -> None:
        self._policy, self._base = policy, base
        self.staging = policy.store.allocate(max(policy.history, default=None))
        self.version = self.staging.version
        self._written: list[ShardFile] = []
        policy.shards.begin(base)

    def write(self, part: int) -> Path:
        """Write one of the two files; where it lies."""
        tensors = self._policy.tensors
        names = [n for n in tensors if (n == "embed.weight") is (part == 0)]
        shard = self._policy.shards.write(
            self.staging.directory, f"model-{part}.safetensors", {n: tensors[n] for n in names}
        )
        self._written.append(shard)
        stored = delta_name(shard.file_name) if shard.delta else shard.file_name
        return self.staging.directory / stored

    def announce(self, path: Path) -> Announcement:
        """Announce the file that was written last, as a rank does of this store."""
        store, shard = self._policy.store, self._written[-1]
        if is_bucket(store.location):
            store.upload(self.version, path)
            store.announce(self.version, shard, base=self._base)
        else:
            store.announce(self.version, shard, path.parent, base=self._base)
        (found,) = (a for a in store.announced(self.version) if a.shard == shard)
        return found

    def commit(self) -> StoredVersion:
        policy = self._policy
        policy.shards.finish(self.version)
        record = policy.store.commit(
            self.staging, self._written, policy.companions, step=0, base=self._base
        )
        policy.history[record.version] = dict(policy.tensors)
        return record
