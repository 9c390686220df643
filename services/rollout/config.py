"""What a rollout process is told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.rollout.engine_config import EngineConfig
from sluice.config import Config, ProcessConfig
from sluice.runtime.server import ServerConfig


class GraderPoolConfig(Config):
    """Processes that make tasks and reward samples, per environment that needs them."""

    size: int = Field(2, ge=1, description="Processes of one environment.")
    timeout_seconds: float = Field(60.0, gt=0, description="One call; then the process is ended.")
    attempts: int = Field(2, ge=1, description="Calls of one group before it fails.")
    start_seconds: float = Field(120.0, gt=0, description="Import of an environment.")
    idle_seconds: float = Field(600.0, gt=0, description="Without work a process is ended.")


class EpisodesConfig(Config):
    """Limits of an episode worker."""

    max_open_groups: int = Field(
        16384, ge=1, description="Accepted and not settled; then QUEUE_FULL."
    )
    max_open_rollouts: int = Field(64, ge=1, description="Rollouts that run; then QUEUE_FULL.")
    max_running_groups: int = Field(1024, ge=1, description="Groups that run at once.")
    engine_attempts: int = Field(
        4, ge=1, description="Leases tried in a row for samples of a group without one token."
    )
    chunk_tokens: int = Field(
        0, ge=0, description="Asked of an engine at once, so lost with it at most; 0 asks for all."
    )
    orphan_seconds: float = Field(
        120.0, gt=0, description="A rollout nobody listens to for so long is stopped."
    )
    kept_rollouts: int = Field(
        64, ge=1, description="Settled rollouts that can be asked for again; then unpinned."
    )
    environments: dict[str, str] = Field(
        default_factory=dict, description="Further environments, name to `package.module:Class`."
    )
    graders: GraderPoolConfig = GraderPoolConfig()


class RolloutConfig(ProcessConfig):
    """Rollout service: one engine replica, one episode worker, or both."""

    roles: tuple[Literal["episodes", "engine"], ...] = ("episodes", "engine")
    engine_id: str = Field("rollout-0", min_length=1, description="The same after a restart.")
    pool: str = Field("policy", min_length=1, description="Engines that serve the same weights.")
    router: str = Field("", description="host:port; the episodes role needs it.")
    store: Path = Field(description="Shared store: blobs and weight versions.")
    store_sync: bool = Field(True, description="False: a crash of the machine may lose groups.")
    tokenizer: Path | None = Field(None, description="HF model directory; default: engine.model.")
    engine: EngineConfig = EngineConfig()
    episodes: EpisodesConfig = EpisodesConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _roles_have_what_they_need(self) -> RolloutConfig:
        if not self.roles:
            raise ValueError("roles: name episodes, engine, or both")
        if "episodes" in self.roles:
            if not self.router:
                raise ValueError("router: the episodes role needs one")
            if self.tokenizer_directory is None:
                raise ValueError("tokenizer: the episodes role needs one, or engine.model")
        return self

    @property
    def tokenizer_directory(self) -> Path | None:
        """Where the tokenizer lies."""
        if self.tokenizer is not None:
            return self.tokenizer
        return Path(self.engine.model) if self.engine.model else None

    @property
    def weights_root(self) -> Path:
        """The weight store inside the shared store."""
        return self.store / "weights"
