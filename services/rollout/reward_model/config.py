"""Settings of a process that serves a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sluice.config import Config, ProcessConfig
from sluice.runtime.server import LAST_PORT, ServerConfig


class ClassifyConfig(Config):
    """HTTP beside gRPC: the host, the TLS files and the token (the API key) of `server`."""

    port: int = Field(0, ge=0, le=LAST_PORT, description="0 takes a free one.")
    max_requests: int = Field(256, ge=1, description="At once; then 503.")
    max_texts: int = Field(1024, ge=1, description="Of one request; then 400.")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Of one request; then 413.")
    request_seconds: float = Field(60.0, gt=0, description="One request; then 504.")


class BatchConfig(Config):
    """Texts of whatever requests, of about one length, that the model is shown together."""

    max_texts: int = Field(64, ge=1, description="Of one batch.")
    max_tokens: int = Field(
        16_384, ge=1, description="Of one batch, with its padding; a longer text is one alone."
    )
    max_waiting_texts: int = Field(4096, ge=1, description="Of all requests; then 503.")


class RewardModelConfig(ProcessConfig):
    """Reward model: the scores of one model with a value head, over HTTP."""

    model: Path = Field(
        description="HF directory: a sequence classifier of one label, or a critic of a trainer."
    )
    name: str = Field(
        "",
        max_length=256,
        pattern=r"^[^@\s]*$",
        description="What requests call it; default: the name of the directory.",
    )
    digest: str = Field(
        "",
        pattern=r"^([0-9a-f]{32})?$",
        description="Of its tensors, as the log says it; others are refused. Default: any.",
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_length: int = Field(
        0, ge=0, description="Tokens of a text; then 400. 0: as many as the model has places."
    )
    threads: int = Field(0, ge=0, description="Threads of one operation; 0 leaves torch's own.")
    stuck_seconds: float = Field(
        120.0,
        gt=0,
        description="Of one batch; longer, and it is not ready; after twice as long it ends.",
    )
    batch: BatchConfig = BatchConfig()
    classify: ClassifyConfig = ClassifyConfig()
    server: ServerConfig = ServerConfig()

    @property
    def model_name(self) -> str:
        """What requests call it."""
        return self.name or self.model.absolute().name
