"""A model that is published again and again."""

from __future__ import annotations

from pathlib import Path

import torch

from sluice.weights.shards import PublishedShards
from sluice.weights.store import StoredVersion, WeightStore


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
        staging = self.store.allocate(max(self.history, default=None))
        self.shards.begin(base)
        names = [["embed.weight"], [n for n in self.tensors if n != "embed.weight"]]
        shards = [
            self.shards.write(
                staging.directory, f"model-{i}.safetensors", {n: self.tensors[n] for n in part}
            )
            for i, part in enumerate(names)
        ]
        self.shards.finish(staging.version)
        record = self.store.commit(staging, shards, self.companions, step=0, base=base)
        self.history[record.version] = dict(self.tensors)
        return record

    def publish_chain(self, count: int) -> list[int]:
        """A whole version and `count - 1` deltas, each on the one before."""
        versions = [self.publish().version]
        for _ in range(count - 1):
            self.change()
            versions.append(self.publish(base=versions[-1]).version)
        return versions

    def _random(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(torch.bfloat16)
