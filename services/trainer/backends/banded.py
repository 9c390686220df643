"""Causal attention that sees so many of the last keys, caps scores, or may attend to nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.trainer.backends.packing import LONG_TOKENS
from sluice.fused_operations import attend_masked


@dataclass(frozen=True)
class Scores:
    """How queries and keys are compared; None is transformers' default, or nothing.

    window: tokens, the own one among them. sinks: float[heads], scores of a key without a value.
    cap: scores x are cap * tanh(x / cap), but for sinks.
    """

    scaling: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None
    cap: float | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and not self.by_hand

    @property
    def by_hand(self) -> bool:
        """No kernel makes them."""
        return self.sinks is not None or self.cap is not None


def attend_banded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Causal attention of [N, heads, R, D] within the window, in blocks of queries.

    They stand at the end of K >= R keys and values.
    """
    total, groups = key.shape[2], query.shape[1] // key.shape[1]
    before = total - query.shape[2]
    places = torch.arange(total, device=query.device)
    if scores.by_hand and groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for start in range(before, total, LONG_TOKENS):
        stop = min(start + LONG_TOKENS, total)
        first = 0 if scores.window is None else max(0, start - scores.window + 1)
        distance = places[start:stop, None] - places[None, first:stop]
        visible = distance >= 0
        if scores.window is not None:
            visible &= distance < scores.window
        queries = query[:, :, start - before : stop - before]
        block = queries, key[:, :, first:stop], value[:, :, first:stop]
        if scores.by_hand:
            outputs.append(_attend_by_hand(*block, visible, scores))
            continue
        outputs.append(attend_masked(*block, visible, scores.scaling))
    return torch.cat(outputs, dim=2)


def _attend_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Attention with all scores in memory, by as many key heads as there are of queries.

    With sinks its softmax has one more entry a head, which adds nothing to the output.
    """
    scale = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    made = query @ key.transpose(2, 3) * scale
    if scores.cap is not None:
        made = (made / scores.cap).tanh() * scores.cap
    made = made.masked_fill(~visible, -torch.inf)
    if scores.sinks is not None:
        sink = scores.sinks.to(made.dtype)[None, :, None, None].expand(*made.shape[:3], 1)
        made = torch.cat([made, sink], dim=-1)
    weights = made.float().softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
