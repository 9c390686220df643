"""Settings of a gateway."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from sluice.address import ServerAddress
from sluice.config import Config, ProcessConfig
from sluice.place import Place, PlaceText, StorePlace, directory_of, within
from sluice.runtime.server import LAST_PORT, ServerConfig


class TinkerConfig(Config):
    """HTTP beside gRPC: the host, the TLS files and the token (the API key) of `server`."""

    port: int = Field(0, ge=0, le=LAST_PORT, description="0 takes a free one.")
    model_name: str = Field("", description="What programs name; default: `model` as given.")
    lora_alpha: float = Field(32.0, gt=0, description="Of every adapter, whatever its rank.")
    attention: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"), description="Layers that `train_attn` stands for."
    )
    mlp: tuple[str, ...] = Field(
        ("gate_proj", "up_proj", "down_proj"), description="Layers that `train_mlp` stands for."
    )
    max_body_bytes: int = Field(64 << 20, ge=1024, description="Of a request; then 413.")
    max_waiting: int = Field(
        1024, ge=1, description="Training requests of one model that are not done; then 429."
    )
    order_seconds: float = Field(
        600.0, gt=0, description="A training request waits for the one before it; then it fails."
    )
    max_running: int = Field(1024, ge=1, description="Sampling requests at once; then 429.")
    max_samples: int = Field(1024, ge=1, description="Of one sampling request.")
    body_seconds: float = Field(60.0, gt=0, description="For the body of a request; then 408.")
    poll_seconds: float = Field(
        30.0, gt=0, le=40, description="An answer is waited for; then the client asks again."
    )
    request_seconds: float = Field(600.0, gt=0, description="One sampling request, then it fails.")
    recovery_seconds: float = Field(
        600.0, gt=0, description="Services that are down are waited for; then a request fails."
    )
    session_seconds: float = Field(
        3600.0, gt=0, description="Without a heartbeat; then the session's models are unloaded."
    )
    checkpoint_steps: int = Field(
        16,
        ge=0,
        description="Steps of a model between checkpoints to go back to; 0 keeps every request "
        "since the last `save_state`.",
    )
    kept_snapshots: int = Field(
        64,
        ge=1,
        description="Weights of a model that were saved without a name, the newest; while its "
        "session lives.",
    )
    kept_answers: int = Field(
        256, ge=16, description="Answers of a model that can be asked for again."
    )


class GatewayConfig(ProcessConfig):
    """Gateway: Tinker's HTTP API over a trainer with `lora` and the engines of a router."""

    model: Path = Field(description="HF directory: the base, with its tokenizer.")
    trainer: ServerAddress = Field(description="host:port of its gRPC server.")
    router: ServerAddress = Field(description="host:port of its gRPC server.")
    journal: Path = Field(description="File of what clients asked for; it outlives the process.")
    store: StorePlace = Field(description="The store of the trainer: a directory, or a bucket.")
    weights: PlaceText = Field("", description="Where versions of weights are, if not in `store`.")
    tinker: TinkerConfig = TinkerConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _can_remove_its_checkpoints(self) -> GatewayConfig:
        if self.tinker.checkpoint_steps and directory_of(self.store) is None:
            raise ValueError(
                "tinker.checkpoint_steps must be 0 with a bucket: what is replaced is not removed "
                "there"
            )
        return self

    @property
    def weights_location(self) -> Place:
        """Where versions of weights are."""
        return self.weights or within(self.store, "weights")

    @property
    def model_name(self) -> str:
        return self.tinker.model_name or str(self.model)
