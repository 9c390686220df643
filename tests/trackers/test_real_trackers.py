"""Rows of a run in the real packages, read back by their own means; resumed, none is doubled."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sluice.loop.report import RunReport
from sluice.loop.tracker_settings import TrackersConfig
from tests.patience import PATIENCE

Points = list[tuple[int, float]]


def row(step: int) -> dict[str, Any]:
    facts = {"reward_mean": step / 8, "response_length_mean": 4.0, "groups/a b": 1, "skipped": []}
    return {"step": step, **facts}


def score(step: int) -> dict[str, Any]:
    facts = {"evaluation": "during", "dataset": "held_out", "score_error": None, "failed_groups": 0}
    return {**facts, "step": step, "score": 0.5, "pass@4": 0.75, "version_min": 1, "version_max": 1}


def run(run_dir: Path, steps: range, config: dict[str, Any], back_to: int | None) -> None:
    told = io.StringIO()
    with RunReport(run_dir, 9, Console(file=told, width=1000)) as report:
        report.begin("train", {})
        trackers = TrackersConfig.model_validate({**config, "finish_seconds": PATIENCE})
        report.track(trackers, {"seed": 7, "optim": {"learning_rate": 0.1}})
        report.start_trackers()
        if back_to is not None:
            report.truncate(back_to)
        for step in steps:
            report.step(row(step))
        report.evaluation(score(steps[0]))
    assert "trackers." not in told.getvalue(), told.getvalue()


def leveldb_records(data: bytes, header: int) -> Iterator[bytes]:
    """https://github.com/google/leveldb/blob/main/doc/log_format.md, after some bytes."""
    block, at, whole = 32768, header, b""
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        whole = part if kind in (1, 2) else whole + part  # full or first; else middle or last
        if kind in (1, 4):
            yield whole


def read_wandb(run_dir: Path) -> dict[str, Points]:
    from wandb.proto import wandb_internal_pb2 as pb

    found: dict[str, Points] = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for data in leveldb_records(path.read_bytes(), header=7):
            record = pb.Record()
            record.ParseFromString(data)
            items = {
                "/".join(item.nested_key) or item.key: float(item.value_json)
                for item in record.history.item
            }
            for key, value in items.items():
                found.setdefault(key, []).append((int(items["step"]), value))
    return found


def read_mlflow(run_dir: Path) -> dict[str, Points]:
    from mlflow import MlflowClient

    client = MlflowClient((run_dir / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("sluice")
    (only,) = client.search_runs([experiment.experiment_id])
    assert only.data.params == {"seed": "7", "optim.learning_rate": "0.1"}
    assert only.info.status == "FINISHED"
    return {
        key.replace("_at_", "@"): [
            (m.step, m.value) for m in client.get_metric_history(only.info.run_id, key)
        ]
        for key in only.data.metrics
    }


def read_trackio(run_dir: Path) -> dict[str, Points]:
    import os

    os.environ["TRACKIO_DIR"] = str((run_dir / "trackio").absolute())
    from trackio.sqlite_storage import SQLiteStorage

    found: dict[str, Points] = {}
    for logged in SQLiteStorage.get_logs("sluice", run_dir.name):
        for key, value in logged.items():
            if key not in ("step", "timestamp"):
                found.setdefault(key, []).append((int(logged["step"]), value))
    return found


READERS: dict[str, Callable[[Path], dict[str, Points]]] = {
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.parametrize("name", READERS)
def test_a_run_and_its_resumption_are_one_in_which_each_step_is_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    settings: dict[str, Any] = {
        "wandb": {"mode": "offline"},
        "mlflow": {"uri": (tmp_path / "mlflow").as_uri()},
        "trackio": {},
    }[name]
    run(tmp_path, range(1, 6), {name: settings}, None)
    run(tmp_path, range(4, 9), {name: settings}, 3)
    found = READERS[name](tmp_path)
    assert sorted(found["reward_mean"]) == [(step, step / 8) for step in range(1, 9)]
    assert sorted(found["eval/held_out/pass@4"]) == [(1, 0.75), (4, 0.75)]
    assert [value for _, value in found["groups/a b"]] == [1] * 8
