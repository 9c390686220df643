"""Where a run is shown besides: TensorBoard, Weights & Biases, MLflow, trackio, OpenTelemetry.

A tracker lives in a process of its own (`sluice/loop/tracking.py`), so that what it does to a
process, threads, signals and ends included, it does not do to the run.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sluice.config import Config
from sluice.loop.tracker_settings import (
    SENT_SPANS,
    MlflowConfig,
    OtelConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
)

IN_RUN_DIR = "tensorboard"  # id of a run whose event files go where its directory goes
NOT_TRACKED = ("step", "time", "evaluation", "dataset")  # keys of rows that are no values


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl by their keys; those that are not finite are left out.

    Of an evaluation each key is `eval/<data set>/<key>`; `skipped`, a list, is its length.
    """
    prefix = f"eval/{row['dataset']}/" if {"evaluation", "dataset"} <= row.keys() else ""
    found = {}
    for key, value in row.items():
        if key in NOT_TRACKED:
            continue
        number = len(value) if key == "skipped" and isinstance(value, list) else value
        if isinstance(number, int | float) and not isinstance(number, bool):
            try:
                if math.isfinite(value := float(number)):
                    found[prefix + key] = value
            except OverflowError:  # an integer of a file that was damaged
                continue
    return found


class Tracker(ABC):
    """One way to show a run. What its methods raise is told, and they are asked again."""

    package: ClassVar[str]  # that it imports
    config: ClassVar[type[Config]]

    def __init__(self, run_dir: Path, settings: Any, copy: str = "") -> None:
        """`settings` is of the class `config`; `copy` tells a copy of a run from the run that it is
        of. Nothing is imported yet."""
        self.run_dir, self.settings, self.copy = run_dir, settings, copy

    @property
    def name(self) -> str:
        """What the run is called."""
        return self._called(self.settings.name)

    def _called(self, name: str) -> str:
        name = name or self.run_dir.absolute().name
        return f"{name}-{self.copy}" if self.copy else name

    @abstractmethod
    def start(self, run_id: str, config: Mapping[str, Any]) -> str:
        """Opens the run of this id, or a new one where it is empty; returns its id."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Shows values of a step. Steps of evaluations may come late."""

    @abstractmethod
    def finish(self, outcome: str) -> None:
        """Ends the run: `done`, `stopped` or `failed`."""


class TensorBoardTracker(Tracker):
    """Event files; https://www.tensorflow.org/tensorboard."""

    package = "tensorboard"
    config = TensorBoardConfig

    def start(self, run_id: str, config: Mapping[str, Any]) -> str:
        from tensorboard.summary import Writer

        directory = self.settings.directory
        if directory is not None and self.copy:  # where the other's event files are
            directory /= self._called("")
        self._writer = Writer(str(directory or self.run_dir / "tensorboard"))
        return IN_RUN_DIR if directory is None else str(directory)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self, outcome: str) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Weights & Biases; https://docs.wandb.ai."""

    package = "wandb"
    config = WandbConfig

    def start(self, run_id: str, config: Mapping[str, Any]) -> str:
        import wandb

        self._run = wandb.init(
            project=self.settings.project,
            entity=self.settings.entity or None,
            name=self.name,
            group=self.settings.group or None,
            tags=list(self.settings.tags) or None,
            mode=self.settings.mode,
            dir=str(self.run_dir),
            config=dict(config),
            id=run_id or uuid.uuid4().hex[:8],
            resume="allow",
        )
        # evaluations may end late, and the steps of wandb itself only grow
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def finish(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "done" else 1)


class MlflowTracker(Tracker):
    """MLflow; https://mlflow.org/docs. It takes no `@` in keys: `pass@4` is `pass_at_4`."""

    package = "mlflow"
    config = MlflowConfig

    def start(self, run_id: str, config: Mapping[str, Any]) -> str:
        # its store of files, for file:///, asks to be allowed since MLflow 3.7
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(self.settings.uri)
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return run_id
        experiment = self._client.get_experiment_by_name(self.settings.experiment)
        experiment_id = (
            self._client.create_experiment(self.settings.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        run = self._client.create_run(experiment_id, run_name=self.name)
        self._run_id = str(run.info.run_id)
        flat = list(_flattened(config))
        for first in range(0, len(flat), 100):  # of one request
            params = [Param(key, text[:500]) for key, text in flat[first : first + 100]]
            self._client.log_batch(self._run_id, params=params)
        return self._run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(key.replace("@", "_at_"), value, now, step) for key, value in values.items()
        ]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + 1000])

    def finish(self, outcome: str) -> None:
        status = {"done": "FINISHED", "stopped": "KILLED"}.get(outcome, "FAILED")
        self._client.set_terminated(self._run_id, status)


def _flattened(config: Mapping[str, Any], prefix: str = "") -> Any:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


class TrackioTracker(Tracker):
    """trackio; https://huggingface.co/docs/trackio."""

    package = "trackio"
    config = TrackioConfig

    def start(self, run_id: str, config: Mapping[str, Any]) -> str:
        if not self.settings.space:
            os.environ.setdefault("TRACKIO_DIR", str((self.run_dir / "trackio").absolute()))
        import trackio

        name = run_id or self.name
        self._run = trackio.init(
            project=self.settings.project,
            name=name,
            space_id=self.settings.space or None,
            config=dict(config),
            resume="allow",
            embed=False,
        )
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        import trackio

        trackio.log(dict(values), step=step)

    def finish(self, outcome: str) -> None:
        import trackio

        trackio.finish()


class OtelTracker(Tracker):
    """OpenTelemetry; https://opentelemetry.io. Of a run it has the trace, and no rows."""

    package = "opentelemetry.exporter.otlp.proto.http"
    config = OtelConfig

    def start(self, run_id: str, config: Mapping[str, Any]) -> str:
        from sluice.loop.otel import SpanSender

        run_id = run_id or uuid.uuid4().hex
        state = self.run_dir / "trackers" / SENT_SPANS
        settings = self.settings.model_dump()
        self._sender = SpanSender(self.run_dir, run_id, state, settings, self.name)
        return run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._sender.send()  # what came to be there since; the spans of `step` itself come later

    def finish(self, outcome: str) -> None:
        self._sender.send()
        self._sender.close()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "otel": OtelTracker,
}
