"""How many threads work beside others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from sluice import priority
from sluice.priority import threads_beside
from sluice.weights.manifest import ShardFile
from sluice.weights.shards import PublishedShards
from tests.patience import PATIENCE


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 2), (2, 2), (8, 2), (12, 3), (16, 4), (32, 8), (192, 8)]
)
def test_a_quarter_of_the_cores_is_used(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(priority, "usable_cores", lambda: cores)
    assert threads_beside() == threads


@pytest.mark.parametrize(("cores", "threads"), [(2, 2), (16, 4)])
def test_so_many_shards_are_written_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, threads: int
) -> None:
    """All of them meet."""
    monkeypatch.setattr(priority, "usable_cores", lambda: cores)
    meeting = threading.Barrier(threads)
    shards = PublishedShards(keep=False, sync=False)
    shards.begin(None)

    def written(_: ShardFile) -> None:
        meeting.wait(PATIENCE)

    tensors = {"weight": torch.ones(3)}
    pending = [
        shards.submit(tmp_path, f"{number}.safetensors", tensors, written=written)
        for number in range(threads)
    ]
    assert len({wait().file_name for wait in pending}) == threads
