"""Requests and their samples as the core of the engine tracks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.rollout.backends.reference.outputs import Written
from services.rollout.engine import Delta, FinishReason, Generation, Sampling
from sluice.samples.sample import VersionSpan

Version = tuple[int, str]  # number and digest


@dataclass(eq=False)
class Prompt:
    """A prompt on its way through prefill; the cache and logits serve all samples of it."""

    token_ids: torch.Tensor  # int64[length] on the host
    length: int
    chain: tuple[int, ...] = ()  # hashes of its blocks, for the prefix cache
    done: int = 0  # tokens whose keys and values are in `kv`
    kv: torch.Tensor | None = None  # [layers, 2, kv_heads, length, head_dim]
    logits: torch.Tensor | None = None  # float32[V] after the last token

    @staticmethod
    def of(token_ids: Sequence[int]) -> Prompt:
        return Prompt(torch.tensor(token_ids, dtype=torch.int64), len(token_ids))

    def restart(self) -> None:
        """Forget what was made of it."""
        self.done, self.kv, self.logits = 0, None, None


@dataclass(eq=False)
class Request:
    """A generation: samples 0..started-1 have begun, `ended` of them have finished."""

    key: int
    generation: Generation
    prompt: Prompt
    seeds: tuple[int, ...]
    stops: tuple[int, ...]
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
    logprobs: list[float] = field(default_factory=list)
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
