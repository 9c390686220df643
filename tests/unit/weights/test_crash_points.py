"""A writer killed at every single file operation of publishing, pinning and retaining."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sluice.weights.checkpoint import describe_shard, encode_header
from sluice.weights.shards import load_verified
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE

HERE = Path(__file__).parent


def check(root: Path, told: set[str]) -> None:
    store = WeightStore(root, durable=False)
    for record in store.list():
        ((_, tensor),) = load_verified(record.directory, store.manifest(record.version))
        assert tensor.tolist() == [record.version] * 64
    versions = set(store.versions())
    assert 1 in versions or "committed 2" in told or "committed 1" not in told
    assert 2 in versions or "committed 2" not in told
    assert "removed 1" not in told or versions == {2}
    assert 2 in store.pins() or "pinned 2" not in told
    staging = store.allocate(None)
    allocated = {int(line.split()[1]) for line in told if line.startswith("allocated")}
    assert staging.version > max(allocated | versions, default=0)
    assert len(list((root / "staging").iterdir())) == 2, "a dead writer's directory is left"
    header, _ = encode_header({"w": ("U8", (64,))})
    (staging.directory / "a.safetensors").write_bytes(header + b"\0" * 64)
    store.commit(staging, [describe_shard(staging.directory / "a.safetensors")], [], 0)
    store.retain(1)
    assert not list((root / "trash").iterdir())


def test_a_crash_at_any_operation_leaves_a_sound_store(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, HERE.parent / "crash_points.py", HERE / "publish_scenario.py", tmp_path],
        check=True,
        timeout=PATIENCE,
        env={"PYTHONPATH": str(HERE.parents[2])},
    )
    runs = sorted(tmp_path.glob("*.told"))
    assert len(runs) > 50
    for path in runs:
        check(path.with_suffix(""), set(path.read_text().splitlines()))
