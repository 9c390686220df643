"""What `sluice train run.yaml` is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from sluice.algo.spec import AdvantageSpec, LossSpec, required_columns
from sluice.config import Config, ProcessConfig
from sluice.runtime.security import SecurityConfig


class PromptsConfig(Config):
    """Where tasks come from: a JSONL or Parquet file, or indices of a generated data set."""

    file: Path | None = None
    index_count: int | None = Field(None, gt=0)
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> PromptsConfig:
        if (self.file is None) == (self.index_count is None):
            raise ValueError("give either file or index_count")
        return self


class EnvironmentConfig(Config):
    """An environment of the episode workers; `settings` are its own."""

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)


class SamplingConfig(Config):
    """How tokens are drawn."""

    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop_token_ids: tuple[int, ...] = ()


class AlgorithmConfig(Config):
    """How rewards become gradients."""

    advantage: AdvantageSpec = AdvantageSpec(name="grpo")
    loss: LossSpec = LossSpec(name="ppo_clip", clip_low=0.2)
    mini_batches: int = Field(1, gt=0)  # optimizer steps per rollout batch

    @property
    def columns(self) -> frozenset[str]:
        """What the rows must carry before advantages and losses are computed."""
        return required_columns(self.advantage) | required_columns(self.loss)


class EvaluationConfig(Config):
    """Greedy score on held-out prompts, before, after and every so many steps."""

    prompts: PromptsConfig
    environment: EnvironmentConfig | None = None  # None is the training environment
    groups: int = Field(64, gt=0)
    every_steps: int = Field(0, ge=0)  # 0 is before and after only
    stop_at_score: float | None = None


class RetentionConfig(Config):
    """What a run leaves in the shared store while it goes on."""

    cuts: int = Field(2, ge=1)  # kept with their checkpoints; a run resumes from the last
    blob_grace_seconds: float = Field(900, gt=0)  # blobs that nobody pins stay for so long


class RunConfig(ProcessConfig):
    """A training run. Flags override the file, e.g. `--steps 10`."""

    run_dir: Path
    services: Path | None = None  # services.json of `sluice up`
    trainer: str = ""  # host:port, instead of `services`
    router: str = ""
    store: Path | None = None  # shared store; None is that of `services`, or run_dir/store
    security: SecurityConfig = SecurityConfig()

    prompts: PromptsConfig
    environment: EnvironmentConfig
    sampling: SamplingConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    groups_per_step: int = Field(8, gt=0)
    samples_per_group: int = Field(8, gt=1)
    steps: int = Field(100, gt=0)
    stop_at_reward: float | None = None  # mean of the last `stop_window` steps
    stop_window: int = Field(10, gt=0)
    seed: int = 0
    deterministic: bool = False  # the same weights to the bit, however often it was resumed
    initial_checkpoint: str = ""  # checkpoints/<id> to begin with; "" is what the trainer holds
    max_staleness: int = Field(0, ge=0)  # steps; 0 is synchronous
    pause_mode: Literal["wait", "abort", "in_place"] = "in_place"
    checkpoint_every: int = Field(50, ge=0)  # steps; 0 is never
    resume: bool = False  # go on with what run_dir holds
    retention: RetentionConfig = RetentionConfig()
    group_timeout_seconds: float = Field(600, gt=0)
    group_attempts: int = Field(3, gt=0)  # issues of a group before it is dropped
    service_timeout_seconds: float = Field(300, gt=0)  # for services to be ready
    evaluation: EvaluationConfig | None = None

    @model_validator(mode="after")
    def _services_are_named(self) -> RunConfig:
        if self.services is None and not (self.trainer and self.router):
            raise ValueError("give services, or both trainer and router")
        return self

    @model_validator(mode="after")
    def _deterministic_is_synchronous(self) -> RunConfig:
        if self.deterministic and self.max_staleness:
            raise ValueError(
                "deterministic needs max_staleness 0: which weights an asynchronous sample "
                "comes from is a matter of time"
            )
        return self

    @property
    def store_dir(self) -> Path:
        return self.store or self.run_dir / "store"
