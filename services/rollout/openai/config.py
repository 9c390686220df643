"""What the OpenAI-compatible port is told."""

from __future__ import annotations

from pydantic import Field

from sluice.config import Config


class OpenAIConfig(Config):
    """HTTP beside gRPC: the host, the TLS files and the token (the API key) of `server`."""

    port: int = Field(0, ge=0, description="0 takes a free one.")
    model_name: str = Field("", description="What callers name; default: the pool.")
    max_running: int = Field(256, ge=1, description="Requests at once; then 429.")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Of a request; then 413.")
    max_tokens: int = Field(
        4096, ge=1, description="Of an answer at most, and where a chat request does not say."
    )
    max_choices: int = Field(128, ge=1, description="Answers to one request: prompts times n.")
    request_seconds: float = Field(600.0, gt=0, description="One request; then 504.")
    open_groups: int = Field(1024, ge=1, description="Recorded groups at once; then 429.")
    kept_groups: int = Field(
        256, ge=1, description="Closed groups that stay in the store until they are deleted."
    )
