"""Bodies of Tinker's requests that are JSON, checked."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sluice.samples.sample import MOST_TOP

LARGEST_SEED = 2**63 - 1
LARGEST_NUMBER = 2**31 - 1  # of a rank, of tokens, or of a model of a session
LONGEST_SECONDS = 100 * 365 * 24 * 3600  # that anything is kept for: dates end with the year 9999


class Body(BaseModel):
    """Fields that are not known are refused: what they ask for would not happen."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    type: str | None = None


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    session_id: str


class AskedLora(Body):
    rank: int = Field(ge=1, le=LARGEST_NUMBER)
    seed: int | None = Field(None, ge=-(2**63), le=LARGEST_SEED)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0, le=LARGEST_NUMBER)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: AskedLora | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OfModel(Body):
    model_id: str


class AdamBody(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(OfModel):
    seq_id: int = Field(ge=1)
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(OfModel):
    seq_id: int = Field(ge=1)
    path: str | None = None
    ttl_seconds: int | None = Field(None, gt=0, le=LONGEST_SECONDS)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfModel):
    seq_id: int = Field(ge=1)
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(None, gt=0, le=LONGEST_SECONDS)
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, le=LARGEST_NUMBER)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class OfSampler(Body):
    sampling_session_id: str


class PromptChunk(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str = "encoded_text"
    tokens: list[int] | None = None


class ModelInput(Body):
    chunks: list[PromptChunk]


class SamplingParams(Body):
    max_tokens: int | None = Field(None, ge=1, le=LARGEST_NUMBER)
    seed: int | None = Field(None, ge=-(2**63), le=LARGEST_SEED)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1, le=LARGEST_NUMBER)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleTokens(Body):
    num_samples: int = Field(1, ge=1)
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    topk_sample_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(Body):
    request_id: str


class WeightsInfo(Body):
    tinker_path: str


class FinishSession(Body):
    reason: dict[str, Any] = {}
    detail: str | None = None


class SetTtl(Body):
    ttl_seconds: int | None = Field(None, gt=0, le=LONGEST_SECONDS)
