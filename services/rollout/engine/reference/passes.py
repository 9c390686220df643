"""One forward pass over decoding samples and prompt chunks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.rollout.engine.reference.attention import Block, ForwardPlan, PromptBlock
from services.rollout.engine.reference.batch import DecodeBatch
from services.rollout.engine.reference.lanes import PrefillPrompt, TopTokens
from services.rollout.engine.reference.model import ServingModel


@dataclass(eq=False)
class PromptWork:
    """The next `chunk` tokens of a prompt; with `score_from`, its tokens are scored from there."""

    prompt: PrefillPrompt
    chunk: int
    score_from: int | None = None
    top_count: int = 0  # likeliest tokens to name at each scored place
    logprobs: list[float] = field(default_factory=list)  # of the tokens scored in this pass
    top: list[TopTokens] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.prompt.done + self.chunk

    @property
    def whole(self) -> bool:
        return self.chunk == self.prompt.length

    def wanted(self) -> range:
        """Rows of the chunk whose logits are read."""
        if self.score_from is not None:
            first = max(self.score_from - 1 - self.prompt.done, 0)
            return range(first, min(self.chunk, self.prompt.length - 1 - self.prompt.done))
        return range(self.chunk - 1, self.chunk) if self.end == self.prompt.length else range(0)


def run_pass(
    model: ServingModel, batch: DecodeBatch, works: Sequence[PromptWork], *, apart: bool
) -> torch.Tensor | None:
    """Logits float32[batch width, V] of the decoding samples; None when there are none.

    Decoding and prompts share one pass; with `apart` each prompt chunk has one of its own.
    Prompts end up with their cache filled and, when complete, their last logits; scored ones
    with log-probabilities in their work.
    """
    if apart:
        for work in works:
            _run(model, None, [work])
        return _run(model, batch, []) if len(batch) else None
    if not works and not len(batch):
        return None
    return _run(model, batch, works)


def _run(
    model: ServingModel, batch: DecodeBatch | None, works: Sequence[PromptWork]
) -> torch.Tensor | None:
    device = model.cache_shape.device
    tokens, positions, blocks, keep = [], [], [], []
    width = batch.width if batch is not None else 0
    if batch is not None and width:
        decode_tokens, decode_positions, decode_blocks = batch.inputs()
        tokens.append(decode_tokens)
        positions.append(decode_positions)
        blocks += decode_blocks
        keep += list(range(width))
    ordered, first = [], width
    for members in _alike(works):
        blocks.append(_block(model, members))
        for work in members:
            tokens.append(work.prompt.token_ids[work.prompt.done : work.end].to(device))
            positions.append(torch.arange(work.prompt.done, work.end, device=device))
            keep += [first + row for row in work.wanted()]
            first += work.chunk
            ordered.append(work)
    plan = ForwardPlan(tuple(blocks))
    rows = torch.tensor(keep, dtype=torch.int64, device=device)
    logits = model.forward(torch.cat(tokens), torch.cat(positions), plan, rows)
    experts = model.take_experts()
    if experts is not None:
        if batch is not None and width:
            batch.note_experts(experts)
        for work, chosen in zip(
            ordered, experts[width:].split([work.chunk for work in ordered]), strict=True
        ):
            work.prompt.add_experts(chosen)
    _take(logits[width:], ordered)
    return logits[:width] if width else None


def _alike(works: Sequence[PromptWork]) -> list[list[PromptWork]]:
    """Whole prompts of one length share a block; a chunk of a longer one stands alone."""
    groups: dict[object, list[PromptWork]] = {}
    for work in works:
        groups.setdefault(work.chunk if work.whole else work, []).append(work)
    return list(groups.values())


def _block(model: ServingModel, works: list[PromptWork]) -> Block:
    prompt = works[0].prompt
    if prompt.kv is None:
        kv = model.cache_shape.allocate(len(works), prompt.length)
        for index, work in enumerate(works):
            work.prompt.kv = kv[:, :, index]
    else:
        kv = prompt.kv.unsqueeze(2)
    return PromptBlock(count=len(works), chunk=works[0].chunk, start=prompt.done, kv=kv)


def _take(logits: torch.Tensor, works: Sequence[PromptWork]) -> None:
    first = 0
    for work in works:
        wanted, done = work.wanted(), work.prompt.done
        rows = logits[first : first + len(wanted)]
        first += len(wanted)
        work.prompt.done = work.end
        if work.score_from is not None:
            targets = work.prompt.token_ids[done + wanted.start + 1 : done + wanted.stop + 1]
            chosen = rows.gather(1, targets.to(rows.device)[:, None])[:, 0]
            normalizer = rows.logsumexp(-1)
            work.logprobs = (chosen - normalizer).tolist()
            if work.top_count:
                work.top = _likeliest(rows, normalizer, work.top_count)
        elif work.prompt.done == work.prompt.length:
            work.prompt.logits = rows[0]


def _likeliest(logits: torch.Tensor, normalizer: torch.Tensor, count: int) -> list[TopTokens]:
    """Per row of `logits` [N, V]; log-probabilities round as those of the scored tokens do."""
    values, tokens = logits.topk(min(count, logits.shape[1]))
    logprobs = (values - normalizer[:, None]).tolist()
    return [tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), logprobs, strict=True)]
