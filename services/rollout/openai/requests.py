"""Checks requests in the form that OpenAI's clients use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from pydantic import (
    BaseModel,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from services.rollout.engine.interface import Sampling
from services.rollout.engine.wire import VersionBounds
from services.rollout.environments.environment import LARGEST_REWARD
from sluice.runtime.http import ApiError, read_body, read_json
from sluice.samples.sample import LEAST_TEMPERATURE, MOST_TEMPERATURE

IGNORED = frozenset(  # of no effect on tokens
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # taken with these values alone
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),  # an answer may hold several
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
R = TypeVar("R", bound=BaseModel)
Text = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


async def parse(request: web.Request, kind: type[R], seconds: float) -> R:
    """Returns the checked body, which must be there in `seconds`.

    Raises ApiError, ValidationError and HTTPRequestEntityTooLarge.
    """
    return kind.model_validate(known_fields(read_json(await read_body(request, seconds))))


def known_fields(body: Any) -> dict[str, Any]:
    """Returns the body without what has no effect. Raises ApiError for what cannot be done."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    fields = {}
    for name, value in body.items():
        if value is None or name in IGNORED or value in NEUTRAL.get(name, ()):
            continue
        if name in NEUTRAL:
            allowed = " or ".join(repr(v) for v in NEUTRAL[name])
            raise ApiError(
                400, "unsupported_parameter", f"{name}: only {allowed} is supported", name
            )
        fields[name] = value
    return fields


class Record(BaseModel, extra="forbid", frozen=True, strict=True):
    """Where a call is recorded: a session is one episode, a group the episodes of one task."""

    group: Name
    session: Name
    min_version: int | None = Field(None, ge=0, lt=1 << 63)  # of the weights that answer
    exact_version: int | None = Field(None, ge=0, lt=1 << 63)

    @property
    def bounds(self) -> VersionBounds:
        return VersionBounds(min_version=self.min_version, exact_version=self.exact_version)

    @staticmethod
    def parse(text: str) -> Record:
        """Reads `group/session`, as in the header."""
        group, _, session = text.partition("/")
        return Record(group=group, session=session)


class StreamOptions(BaseModel, extra="forbid", strict=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI pads chunks with it; never done here


class CommonRequest(BaseModel, extra="forbid", strict=True):
    """What chat and text completions share; names beyond OpenAI's are vLLM's, or ours."""

    model: str = ""
    temperature: float = Field(1.0, ge=0, le=MOST_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=1 << 31)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=-(1 << 62), lt=1 << 62)
    stop: list[Text] = Field(default_factory=list, max_length=16)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    sluice_record: Record | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("top_k", mode="before")
    @classmethod
    def _top_k_off(cls, value: Any) -> Any:
        return 0 if value == -1 else value  # vLLM writes it so

    @field_validator("sluice_record", mode="before")
    @classmethod
    def _record_as_text(cls, value: Any) -> Any:
        return Record.parse(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _min_tokens_go_with_tokens(self) -> CommonRequest:
        if self.min_tokens and self.stop:
            raise ValueError("min_tokens is not supported with stop")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs of the sampled tokens are asked for."""
        return False

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Returns how to sample; every answer has a seed of its own."""
        seeds = () if self.seed is None else tuple(self.seed + index for index in range(self.n))
        return Sampling(
            max_new_tokens=max_new_tokens,
            # some clients say greedy by a number next to nothing
            temperature=self.temperature if self.temperature >= LEAST_TEMPERATURE else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            stop_token_ids=tuple(self.stop_token_ids),
            seeds=seeds,
            min_new_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )


class ChatRequest(CommonRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _fields_go_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.top_logprobs and self.stream:
            raise ValueError("top_logprobs is not supported with stream")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def shows_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(CommonRequest):
    """POST /v1/completions. A prompt is a text or token ids; there may be several."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @field_validator("prompt")
    @classmethod
    def _there_is_a_prompt(cls, value: Any) -> Any:
        if not value or (isinstance(value, list) and [] in value):
            raise ValueError("must not be empty")
        return value

    @model_validator(mode="after")
    def _fields_go_together(self) -> CompletionRequest:
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens 0 needs echo")
        if self.stream and (self.echo or self.logprobs):
            raise ValueError("echo and logprobs above 0 are not supported with stream")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class TokenizeRequest(BaseModel, extra="forbid", strict=True):
    """POST /tokenize: a text, or a conversation up to where the assistant begins."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True  # of a text

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(BaseModel, extra="forbid", strict=True):
    """POST /detokenize."""

    model: str = ""
    tokens: list[TokenId]


class RewardRequest(BaseModel, extra="forbid", strict=True):
    """POST /sluice/v1/groups/{group}/rewards: by session."""

    rewards: dict[Name, Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]] = Field(
        min_length=1
    )
