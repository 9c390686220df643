"""What a decode step needs to know of each lane, as tensors in packed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from services.rollout.backends.reference.drawing import DrawSettings
from services.rollout.backends.reference.lanes import Request


@dataclass(frozen=True)
class Columns:
    """One row per lane, int64[B] where not said otherwise.

    tokens: drawn last, not yet in the cache; positions: where it stands; counts: tokens drawn;
    budgets: tokens allowed; slots: in the outputs; stops: int64[B, S], filled up with -1.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    budgets: torch.Tensor
    slots: torch.Tensor
    stops: torch.Tensor
    settings: DrawSettings

    @staticmethod
    def of(
        requests: Sequence[Request],
        repeats: torch.Tensor,
        tokens: torch.Tensor,
        slots: Sequence[int],
        settings: DrawSettings,
    ) -> Columns:
        """Lanes with their first token: repeats[i] of requests[i]."""
        widest = max(len(request.stops) for request in requests)
        stops = [[*r.stops, *[-1] * (widest - len(r.stops))] for r in requests]

        def column(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            each = torch.tensor(values, dtype=torch.int64, device=tokens.device)
            return each.repeat_interleave(repeats, 0)

        return Columns(
            tokens=tokens,
            positions=column([request.prompt.length for request in requests]),
            counts=torch.ones_like(tokens),
            budgets=column([request.budget for request in requests]),
            slots=torch.tensor(slots, device=tokens.device),
            stops=column(stops),
            settings=settings,
        )

    def select(self, rows: torch.Tensor) -> Columns:
        return _columns([column[rows] for column in self._plain()], self.settings.select(rows))

    def joined(self, other: Columns) -> Columns:
        width = max(self.stops.shape[1], other.stops.shape[1])
        mine, theirs = self._plain(width), other._plain(width)
        plain = [torch.cat(pair) for pair in zip(mine, theirs, strict=True)]
        return _columns(plain, self.settings.joined(other.settings))

    def stopped(self) -> torch.Tensor:
        """bool[B]: the last token is a stop token."""
        return (self.tokens[:, None] == self.stops).any(1)

    def advance(self, tokens: torch.Tensor) -> None:
        """Every lane drew one more token."""
        self.tokens.copy_(tokens)
        self.positions.add_(1)
        self.counts.add_(1)

    def _plain(self, stops: int = 0) -> tuple[torch.Tensor, ...]:
        wide = pad(self.stops, (0, max(0, stops - self.stops.shape[1])), value=-1)
        return self.tokens, self.positions, self.counts, self.budgets, self.slots, wide


def _columns(plain: Sequence[torch.Tensor], settings: DrawSettings) -> Columns:
    tokens, positions, counts, budgets, slots, stops = plain
    return Columns(tokens, positions, counts, budgets, slots, stops, settings)
