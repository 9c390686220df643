"""Writers killed at any moment leave whole versions or none, and no number twice."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.weights.shards import load_verified
from sluice.weights.staging import LOCK_SUFFIX
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE

WRITER = Path(__file__).with_name("publish_forever.py")
ROOT = Path(__file__).parents[3]


def start_writer(root: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WRITER), str(root), name],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )


def kill_after(writer: subprocess.Popen[str], lines: int) -> list[str]:
    """What the writer had told when it was killed behind its line number `lines`."""
    assert writer.stdout is not None
    told = [writer.stdout.readline() for _ in range(lines)]
    assert all(told), "the writer died by itself"
    writer.kill()
    told += writer.stdout.readlines()
    writer.wait(PATIENCE)
    return [line for line in told if line.endswith("\n")]


def numbers(told: list[str], word: str) -> list[int]:
    return [int(line.split()[1]) for line in told if line.startswith(word)]


@pytest.mark.parametrize("seed", range(3))
def test_killed_writers_leave_whole_versions_only(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    allocated: list[int] = []
    committed: list[int] = []
    for round_number in range(2):
        writers = [start_writer(tmp_path, f"w{round_number}{i}") for i in range(2)]
        told = [kill_after(writer, draw.randrange(1, 40)) for writer in writers]
        allocated += [number for lines in told for number in numbers(lines, "allocated")]
        committed += [number for lines in told for number in numbers(lines, "committed")]
    store = WeightStore(tmp_path)
    assert committed
    assert len(set(allocated)) == len(allocated)
    assert set(committed) <= set(store.versions())
    for record in store.list():
        tensors = dict(load_verified(record.directory, store.manifest(record.version)))
        assert len(tensors) == 2
        assert all((t == record.version % 251).all() for t in tensors.values())
    staging = store.allocate(None)
    assert staging.version > max(allocated)
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == [
        staging.directory.name,
        staging.directory.name + LOCK_SUFFIX,
    ]
    store.abort(staging)


def test_sweep_spares_a_live_writer_of_another_process(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, "w")
    assert writer.stdout is not None
    try:
        before = WeightStore(tmp_path)
        for _ in range(20):
            before.sweep()
            assert writer.stdout.readline(), "the writer lost its directory and died"
    finally:
        writer.kill()
        writer.wait(PATIENCE)
        writer.stdout.close()
