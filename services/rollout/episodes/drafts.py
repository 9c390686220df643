"""The samples of one prompt in the making: cut off on one engine, they go on by their token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.rollout.engine.interface import Delta, FinishReason, Generation, Sampling
from services.rollout.engine.wire import VersionBounds, join_deltas, join_experts
from services.rollout.episodes.leases import NO_HINTS, Hints
from services.rollout.episodes.trajectory import Timeline
from sluice.api.rollout.v1 import trace_pb2 as pb
from sluice.client import new_request_id
from sluice.samples.sample import VersionSpan


@dataclass(frozen=True, kw_only=True)
class SamplingPrompt:
    """What is to be sampled: `sample_count` continuations, sample i by seeds[i] if given.

    On the timeline they count from `first_episode` on.
    """

    group_id: str
    token_ids: tuple[int, ...]
    sample_count: int
    sampling: Sampling
    bounds: VersionBounds
    pool: str
    timeline: Timeline | None = None
    first_episode: int = 0
    hints: Hints = NO_HINTS

    def mark(self, kind: pb.SpanKind, place: str, indices: Sequence[int]) -> None:
        """What these samples did until now."""
        if self.timeline is not None:
            self.timeline.mark(kind, place, [self.first_episode + index for index in indices])

    def mark_sampled(self, place: str, deltas: Iterable[tuple[int, Delta]]) -> None:
        """These samples came from an engine."""
        if self.timeline is not None:
            for index, delta in deltas:
                self.timeline.sampled(place, self.first_episode + index, delta)


class PartialSamples:
    """What has come of each sample. One that was cut off keeps its tokens, spans and log-probs.

    An engine is asked for at most `chunk_tokens` at once (0: for all), so that no more is lost
    with it.
    """

    def __init__(self, prompt: SamplingPrompt, chunk_tokens: int) -> None:
        self._prompt, self._chunk = prompt, chunk_tokens
        self._open: dict[int, Delta] = {}
        self._done: dict[int, Delta] = {}

    @property
    def missing(self) -> list[int]:
        """Samples that have not ended."""
        return [i for i in range(self._prompt.sample_count) if i not in self._done]

    @property
    def bounds(self) -> VersionBounds:
        """Which weights may sample."""
        return self._prompt.bounds

    @property
    def token_count(self) -> int:
        """Tokens kept so far."""
        deltas = (*self._open.values(), *self._done.values())
        return sum(len(delta.token_ids) for delta in deltas)

    def is_begun(self, index: int) -> bool:
        """Whether a sample has tokens to go on from; then no other shares its request."""
        return index in self._open

    def ended(self) -> list[Delta]:
        """One whole delta per sample, by index; all have ended."""
        return [self._done[index] for index in range(self._prompt.sample_count)]

    def generation(self, indices: Sequence[int], dp_rank: int) -> Generation:
        """The request for these samples: several that have not begun, or one that has."""
        seeds = self._prompt.sampling.seeds
        so_far = self._open.get(indices[0])
        sampling = replace(
            self._prompt.sampling,
            seeds=tuple(seeds[index] for index in indices) if seeds else (),
            max_new_tokens=self._budget(indices[0]),
        )
        return Generation(
            request_id=new_request_id(),
            prompt_token_ids=(*self._prompt.token_ids, *(so_far.token_ids if so_far else ())),
            sampling=sampling,
            sample_count=len(indices),
            dp_rank=dp_rank,
        )

    def add(self, index: int, delta: Delta) -> bool:
        """Take what an engine answered for a sample; false when the engine aborted it."""
        asked = self._budget(index)
        whole = _append(self._open.pop(index, None), replace(delta, index=index))
        aborted = delta.finish_reason is FinishReason.ABORTED
        chunk_ended = delta.finish_reason is FinishReason.LENGTH and len(delta.token_ids) == asked
        is_full = len(whole.token_ids) >= self._prompt.sampling.max_new_tokens
        if (aborted or chunk_ended) and not is_full:
            if whole.token_ids:
                self._open[index] = replace(whole, finish_reason=None)
        else:
            reason = FinishReason.LENGTH if aborted else delta.finish_reason
            self._done[index] = replace(whole, finish_reason=reason)
        return not aborted or is_full

    def end(self, index: int) -> None:
        """A sample cannot grow: no engine has room for one token more."""
        self._done[index] = replace(self._open.pop(index), finish_reason=FinishReason.LENGTH)

    def _budget(self, index: int) -> int:
        so_far = self._open.get(index)
        left = self._prompt.sampling.max_new_tokens - (len(so_far.token_ids) if so_far else 0)
        return min(left, self._chunk) if self._chunk else left


def _append(so_far: Delta | None, more: Delta) -> Delta:
    """Spans of `more` count from the start of its own request."""
    if so_far is None:
        return more
    if not more.token_ids:  # aborted before it sampled anything
        return so_far
    offset = len(so_far.token_ids)
    spans = tuple(
        VersionSpan(
            version=span.version,
            digest=span.digest,
            first_token=span.first_token + offset,
            last_token=span.last_token + offset,
        )
        for span in more.spans
    )
    (joined,) = join_deltas([so_far, replace(more, spans=spans)])
    experts = join_experts(so_far.routed_experts, more.routed_experts)
    return replace(joined, routed_experts=experts)
