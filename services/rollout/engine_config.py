"""Settings of one engine replica."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.rollout.sglang_config import SglangConfig
from sluice.config import Config


class EngineConfig(Config):
    """Backend, model and limits of an engine.

    Without `model` the engine starts empty and builds itself from the first prepared version.
    """

    backend: Literal["reference", "sglang"] = "reference"
    model: str | None = Field(None, description="HF model directory, served as version 0.")
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_running: int = Field(256, ge=1, description="Samples that decode at once.")
    max_model_length: int = Field(4096, ge=2, description="Prompt and response together.")
    max_cached_tokens: int = Field(
        0, ge=0, description="Tokens that may be reserved at once; 0: all slots at full length."
    )
    prefill_chunk_tokens: int = Field(
        512, ge=1, description="Prompt tokens per step; bounds how long a step delays decoding."
    )
    prefix_cache_tokens: int = Field(
        8192, ge=0, description="Prompt tokens kept for prompts that begin alike; 0: none."
    )
    waiting_limit: int = Field(4096, ge=1, description="Samples that may wait for a slot.")
    threads: int = Field(0, ge=0, description="Threads of one operation; 0 leaves torch's own.")
    deterministic: bool = Field(
        False,
        description="A sample's tokens and log-probs do not depend, to the bit, on its neighbours;"
        " every decode step then costs max_running rows on one thread, and no prefix is shared.",
    )
    routed_experts: bool = Field(
        False,
        description="Completions bring the experts that their tokens were sent to, for a trainer"
        " that replays them (routing_replay: rollout); needs a mixture of experts.",
    )
    sglang: SglangConfig = SglangConfig()

    @model_validator(mode="after")
    def _one_thread_when_deterministic(self) -> EngineConfig:
        # How work is cut over threads depends on how much there is.
        if self.deterministic and self.threads > 1:
            raise ValueError("threads: deterministic needs 1")
        return self

    @property
    def cache_tokens(self) -> int:
        """Tokens of all running samples together that may be reserved."""
        return self.max_cached_tokens or self.max_running * self.max_model_length
