"""Requests and their samples as the core of the engine tracks them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from services.rollout.backends.reference.outputs import Written
from services.rollout.engine import Delta, FinishReason, Generation, Sampling, Timing
from sluice.samples.sample import VersionSpan

Version = tuple[int, str]  # number and digest
TopTokens = tuple[tuple[int, float], ...]  # likeliest first, with log-probabilities


@dataclass(eq=False)
class Prompt:
    """A prompt on its way through prefill; the cache and logits serve all samples of it."""

    token_ids: torch.Tensor  # int64[length] on the host
    length: int
    chain: tuple[int, ...] = ()  # hashes of its blocks, for the prefix cache
    done: int = 0  # tokens whose keys and values are in `kv`
    kv: torch.Tensor | None = None  # [layers, 2, kv_heads, length, head_dim]
    logits: torch.Tensor | None = None  # float32[V] after the last token
    experts: torch.Tensor | None = None  # int16[done, mixture layers, chosen], if watched

    @staticmethod
    def of(token_ids: Sequence[int]) -> Prompt:
        return Prompt(torch.tensor(token_ids, dtype=torch.int64), len(token_ids))

    def restart(self) -> None:
        """Forget what was made of it."""
        self.done, self.kv, self.logits, self.experts = 0, None, None, None

    def add_experts(self, chosen: torch.Tensor) -> None:
        """Those of the next chunk. Never in place: samples keep what they began with."""
        self.experts = chosen if self.experts is None else torch.cat([self.experts, chosen])


@dataclass(eq=False)
class Request:
    """A generation: samples 0..started-1 have begun, `ended` of them have finished."""

    key: int
    generation: Generation
    prompt: Prompt
    seeds: tuple[int, ...]
    stops: tuple[int, ...]
    budget: int  # tokens each sample may have
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
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
    def samples_to_start(self) -> int:
        """Samples that will take a slot."""
        return self.unstarted

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
    top_count: int = 0
    logprobs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    unstarted: int = 1  # it counts like a sample while it waits,
    samples_to_start: int = 0  # but takes no slot
    reserved: int = 0


@dataclass(eq=False)
class Lane:
    """A running sample. `versions` says from which of its tokens on each version drew."""

    request: Request
    index: int
    slot: int = 0  # in the outputs
    sent: int = 0  # tokens already handed out
    began: float = 0.0  # when its first token was drawn; 0: never
    prompt_experts: torch.Tensor | None = None  # int16[prompt, mixture layers, chosen]
    versions: list[tuple[int, Version]] = field(default_factory=list)

    @property
    def tempered(self) -> bool:
        return self.request.sampling.temperature not in (0, 1)

    def mark(self, count: int, version: Version) -> None:
        """Tokens from number `count` on come from `version`."""
        if self.versions and self.versions[-1][0] == count:
            self.versions.pop()
        self.versions.append((count, version))

    def delta(self, written: Written, finish_reason: FinishReason | None) -> Delta:
        """Hand out tokens that follow those already sent."""
        first, self.sent = self.sent, self.sent + len(written.token_ids)
        return Delta(
            index=self.index,
            token_ids=written.token_ids,
            logprobs=written.logprobs,
            logprobs_t1=written.logprobs_t1,
            spans=self._spans(first, self.sent),
            finish_reason=finish_reason,
            timing=self._timing() if finish_reason else None,
            routed_experts=self._experts(written) if finish_reason else None,
        )

    def _experts(self, written: Written) -> np.ndarray | None:
        """Of the prompt and of all drawn tokens but the last."""
        if self.prompt_experts is None:
            return None
        told = [self.prompt_experts]
        if written.experts is not None:  # None: nothing has been decoded yet
            told.append(written.experts)
        return torch.cat(told).cpu().numpy()

    def _timing(self) -> Timing:
        """Of a sample that ends now."""
        now, request = time.monotonic(), self.request
        admitted = request.admitted or now
        began = self.began or now
        return Timing(
            queue=admitted - request.arrived, prefill=began - admitted, decode=now - began
        )

    def _spans(self, first: int, end: int) -> tuple[VersionSpan, ...]:
        if first == end:
            return ()
        untils = [*(begin for begin, _ in self.versions[1:]), end]
        return tuple(
            VersionSpan(
                version=version,
                digest=digest,
                first_token=max(begin, first),
                last_token=min(until, end) - 1,
            )
            for (begin, (version, digest)), until in zip(self.versions, untils, strict=True)
            if max(begin, first) < min(until, end)
        )
