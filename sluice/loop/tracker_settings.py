"""Settings of the trackers that a run is shown in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from sluice.config import Config

SENT_SPANS = "otel.sent.json"  # beside the state of trackers: which spans a collector has


class TensorBoardConfig(Config):
    """Event files for `tensorboard --logdir`."""

    directory: Path | None = Field(None, description="Default: RUN_DIR/tensorboard.")


class WandbConfig(Config):
    """A run of Weights & Biases; the key is WANDB_API_KEY, as its own programs have it."""

    project: str = Field("sluice", min_length=1)
    entity: str = ""
    name: str = Field("", description="Default: that of the run directory.")
    group: str = ""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: below RUN_DIR/wandb, for `wandb sync`."
    )


class MlflowConfig(Config):
    """A run of MLflow."""

    uri: str = Field(min_length=1, description="Tracking server, or file:///directory.")
    experiment: str = Field("sluice", min_length=1)
    name: str = Field("", description="Default: that of the run directory.")


class TrackioConfig(Config):
    """A run of trackio, on this machine or in a Space of Hugging Face."""

    project: str = Field("sluice", min_length=1)
    name: str = Field("", description="Default: that of the run directory.")
    space: str = Field("", description="user/name; empty is this machine, below RUN_DIR/trackio.")


class OtelConfig(Config):
    """Spans of the run's trace, to a collector of OpenTelemetry, by OTLP over HTTP."""

    endpoint: str = Field(
        pattern=r"^https?://[^/\s]+(/\S*)?$",
        max_length=2_000,
        description="URL; without a path it is that of OTLP, /v1/traces.",
    )
    service_name: str = Field("sluice", min_length=1)
    name: str = Field("", description="Attribute sluice.run; default: that of the run directory.")
    samples: bool = Field(True, description="Spans of samples too, five and more of each.")
    timeout_seconds: float = Field(10, gt=0, le=600, description="For one request.")

    @field_validator("endpoint")
    @classmethod
    def _has_path(cls, value: str) -> str:
        return value if "/" in value.partition("://")[2] else f"{value}/v1/traces"


class TrackersConfig(Config):
    """Those that a run has; none by default. Each needs the extra of its name."""

    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    trackio: TrackioConfig | None = None
    otel: OtelConfig | None = None
    finish_seconds: float = Field(
        60.0, gt=0, le=3600, description="For what is left at the end of a run, of all together."
    )
