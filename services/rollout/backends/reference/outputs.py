"""What running samples have drawn, kept as tensors until someone asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from services.rollout.backends.reference.drawing import Drawn


@dataclass(frozen=True)
class Written:
    """Tokens and log-probabilities of one sample, and the experts of all it drew but the last."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprobs_t1: tuple[float, ...]
    experts: torch.Tensor | None = None  # int16[drawn - 1, mixture layers, chosen], if watched


class Outputs:
    """One slot per running sample; tables [slots, width] grow by doubling."""

    def __init__(self, device: torch.device) -> None:
        self._free: list[int] = []
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, 0, device=device)
        self._logprobs_t1 = torch.zeros(0, 0, device=device)
        self._experts: torch.Tensor | None = None  # int16[slots, width, mixture layers, chosen]

    def reserve(self, count: int, width: int) -> list[int]:
        """Slots for `count` samples of up to `width` tokens."""
        slots, columns = self._tokens.shape
        more_slots = max(slots, count - len(self._free)) if len(self._free) < count else 0
        more_columns = max(columns, width - columns) if columns < width else 0
        if more_slots or more_columns:
            grow = (0, more_columns, 0, more_slots)
            self._tokens = pad(self._tokens, grow)
            self._logprobs = pad(self._logprobs, grow)
            self._logprobs_t1 = pad(self._logprobs_t1, grow)
            if self._experts is not None:
                self._experts = pad(self._experts, (0, 0, 0, 0, *grow))
            self._free += range(slots, slots + more_slots)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, slots: Sequence[int]) -> None:
        self._free += slots

    def write(self, slots: torch.Tensor, counts: torch.Tensor, drawn: Drawn) -> None:
        """Token number counts[i] (from 0) of slots[i]; both int64[B]."""
        place = (slots, counts)
        self._tokens[place] = drawn.tokens
        self._logprobs[place] = drawn.logprobs
        if drawn.logprobs_t1 is not drawn.logprobs:
            self._logprobs_t1[place] = drawn.logprobs_t1

    def write_experts(
        self, slots: torch.Tensor, counts: torch.Tensor, experts: torch.Tensor
    ) -> None:
        """Those that token number counts[i] (from 0) of slots[i] was sent to, int16[B, L, k]."""
        if self._experts is None:
            self._experts = experts.new_zeros(*self._tokens.shape, *experts.shape[1:])
        self._experts[slots, counts] = experts

    def _experts_of(self, slot: int, end: int) -> torch.Tensor | None:
        return None if self._experts is None else self._experts[slot, : max(end - 1, 0)]

    def read(
        self, slots: Sequence[int], extents: Sequence[tuple[int, int]], tempered: Sequence[bool]
    ) -> list[Written]:
        """Tokens extents[i] = (first, end) of each slot.

        Without temperature both log-probabilities are one; `write` may have left the second.
        """
        if not slots:
            return []
        device, limit = self._tokens.device, self._tokens.shape[1] - 1
        longest = max(end - first for first, end in extents)
        firsts = torch.tensor([first for first, _ in extents], device=device)
        columns = (firsts[:, None] + torch.arange(longest, device=device)).clamp_(max=limit)
        place = (torch.tensor(slots, device=device)[:, None], columns)
        tokens, logprobs = self._tokens[place].tolist(), self._logprobs[place].tolist()
        plain = self._logprobs_t1[place].tolist() if any(tempered) else logprobs
        written = []
        for row, (first, end) in enumerate(extents):
            drawn = tuple(logprobs[row][: end - first])
            both = tuple(plain[row][: end - first]) if tempered[row] else drawn
            experts = self._experts_of(slots[row], end)
            written.append(Written(tuple(tokens[row][: end - first]), drawn, both, experts))
        return written
