"""Requests and their samples as the core of the engine tracks them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from services.rollout.engine import Delta, FinishReason, Generation, Sampling
from sluice.samples.sample import VersionSpan


@dataclass(eq=False)
class Prompt:
    """A prompt on its way through prefill; the cache and logits serve all samples of it."""

    token_ids: torch.Tensor  # int64[length] on the host
    done: int = 0  # tokens whose keys and values are in `kv`
    kv: torch.Tensor | None = None  # [layers, 2, kv_heads, length, head_dim]
    logits: torch.Tensor | None = None  # float32[V] after the last token

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def restart(self) -> None:
        """Forget what older weights made of it."""
        self.done, self.kv, self.logits = 0, None, None


@dataclass(eq=False)
class Request:
    """A generation: samples 0..started-1 have begun, `ended` of them have finished."""

    key: int
    generation: Generation
    prompt: Prompt
    seeds: tuple[int, ...]
    stops: frozenset[int]
    budget: int  # tokens each sample may have
    started: int = 0
    ended: int = 0

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def sampling(self) -> Sampling:
        return self.generation.sampling

    @property
    def unstarted(self) -> int:
        return self.generation.sample_count - self.started

    @property
    def reserved(self) -> int:
        """Cache tokens one sample may come to use."""
        return self.prompt.length + self.budget


@dataclass(eq=False)
class Scoring:
    """Log-probabilities wanted of the prompt's tokens from `first` on, gathered by chunk."""

    key: int
    prompt: Prompt
    first: int
    logprobs: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Lane:
    """A running sample. Its last token is drawn but not yet in the cache."""

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprobs_t1: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    sent: int = 0  # tokens already handed out

    @property
    def position(self) -> int:
        """Where the last token stands in the sequence."""
        return self.request.prompt.length + len(self.token_ids) - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.token_ids and self.token_ids[-1] in self.request.stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.request.budget else None

    def append(
        self,
        tokens: list[int],
        logprobs: list[float],
        logprobs_t1: list[float],
        version: tuple[int, str],
    ) -> None:
        """Add tokens that one version drew."""
        first = len(self.token_ids)
        self.token_ids += tokens
        self.logprobs += logprobs
        self.logprobs_t1 += logprobs_t1
        last = len(self.token_ids) - 1
        if self.spans and (self.spans[-1].version, self.spans[-1].digest) == version:
            first = self.spans.pop().first_token
        number, digest = version
        self.spans.append(
            VersionSpan(version=number, digest=digest, first_token=first, last_token=last)
        )

    def take_delta(self, finish_reason: FinishReason | None) -> Delta:
        """What was not handed out yet."""
        first, self.sent = self.sent, len(self.token_ids)
        return Delta(
            index=self.index,
            token_ids=tuple(self.token_ids[first:]),
            logprobs=tuple(self.logprobs[first:]),
            logprobs_t1=tuple(self.logprobs_t1[first:]),
            spans=tuple(
                VersionSpan(
                    version=span.version,
                    digest=span.digest,
                    first_token=max(first, span.first_token),
                    last_token=span.last_token,
                )
                for span in self.spans
                if span.last_token >= first
            ),
            finish_reason=finish_reason,
        )
