"""What `sluice sft run.yaml` is told."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from sluice.algo.spec import LossSpec
from sluice.config import Config, ProcessConfig
from sluice.loop.config import RetentionConfig
from sluice.runtime.security import SecurityConfig


class RowsConfig(Config):
    """A JSONL or Parquet file. A row has `messages` (and `tools`), or `prompt` and `answer`."""

    file: Path
    shuffle: bool = Field(True, description="Anew every epoch, from the seed.")


class SftConfig(ProcessConfig):
    """Supervised training on conversations. Flags override the file, e.g. `--epochs 3`."""

    run_dir: Path
    services: Path | None = Field(None, description="services.json of `sluice up`.")
    trainer: str = Field("", description="host:port, instead of `services`.")
    store: Path | None = Field(
        None, description="Shared store; None is that of `services`, or run_dir/store."
    )
    security: SecurityConfig = SecurityConfig()

    tokenizer: Path = Field(description="Model directory with tokenizer and chat template.")
    rows: RowsConfig
    rows_per_step: int = Field(32, gt=0)
    epochs: int = Field(1, gt=0, description="Every row once in each.")
    steps: int | None = Field(None, gt=0, description="End here instead, if that is earlier.")
    loss: LossSpec = LossSpec(name="sft")
    seed: int = 0
    initial_checkpoint: str = Field(
        "", description="checkpoints/<id> to begin with; empty is what the trainer holds."
    )
    checkpoint_every: int = Field(50, ge=0, description="Steps; 0 is never.")
    resume: bool = Field(False, description="Go on with what run_dir holds.")
    retention: RetentionConfig = RetentionConfig()
    service_timeout_seconds: float = Field(300, gt=0, description="For the trainer to be ready.")

    @field_validator("loss")
    @classmethod
    def _is_supervised(cls, loss: LossSpec) -> LossSpec:
        if loss.name != "sft":
            raise ValueError(f"rows of a file have no rewards for loss {loss.name}; use sft")
        return loss

    @model_validator(mode="after")
    def _trainer_is_named(self) -> SftConfig:
        if self.services is None and not self.trainer:
            raise ValueError("give services or trainer")
        return self

    @property
    def store_dir(self) -> Path:
        return self.store or self.run_dir / "store"
