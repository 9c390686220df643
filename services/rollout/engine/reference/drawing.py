"""Draws tokens for many rows at once, each row by its own temperature, truncation and seed.

A draw is a pure function of (logits, sampling, seed, position): uniform numbers come from a
counter-based hash, not from a generator with state, so neighbours and order do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from services.rollout.engine.interface import Numbers, Sampling

SEGMENT = 256  # vocabulary entries per segment of the two-level search
FEW = 128  # most likely tokens that a nucleus is first looked for in


@dataclass(frozen=True)
class Drawn:
    """tokens int64[B]; log-probabilities float32[B], of the tempered distribution and at 1.

    broken: bool[B], rows whose logits are not finite, which say nothing; None where there is none.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    logprobs_t1: torch.Tensor
    broken: torch.Tensor | None = None


class DrawSettings:
    """Sampling of B rows; what is off in every row costs nothing.

    seeds: int64[B]; temperature: float32[B], 0 for greedy; top_k: int64[B], 0 for off;
    top_p: float32[B], 1 for off.
    """

    def __init__(
        self,
        seeds: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
    ) -> None:
        self.seeds, self.temperature, self.top_k, self.top_p = seeds, temperature, top_k, top_p
        greedy, cut = temperature == 0, (top_k > 0) | (top_p < 1)
        divisor = temperature.masked_fill(greedy, 1)[:, None]
        self.greedy = greedy if bool(greedy.any()) else None
        self.all_greedy = bool(greedy.all())
        self.divisor = divisor if bool((divisor != 1).any()) else None
        self.truncated = cut.nonzero()[:, 0] if bool(cut.any()) else None

    @staticmethod
    def of(
        samplings: Sequence[Sampling],
        counts: Sequence[int],
        seeds: Sequence[int],
        device: torch.device,
    ) -> DrawSettings:
        """counts[i] rows of samplings[i], with one seed per row."""
        repeats = torch.tensor(counts, device=device)

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(repeats)

        return DrawSettings(
            torch.tensor(seeds, dtype=torch.int64, device=device),
            column([sampling.temperature for sampling in samplings], torch.float32),
            column([sampling.top_k for sampling in samplings], torch.int64),
            column([sampling.top_p for sampling in samplings], torch.float32),
        )

    def select(self, rows: torch.Tensor) -> DrawSettings:
        return DrawSettings(*(column[rows] for column in self._columns()))

    def joined(self, other: DrawSettings) -> DrawSettings:
        pairs = zip(self._columns(), other._columns(), strict=True)
        return DrawSettings(*(torch.cat(pair) for pair in pairs))

    def padded(self, rows: int) -> DrawSettings:
        """With rows of plain sampling added."""
        more = rows - len(self.seeds)
        return DrawSettings(
            pad(self.seeds, (0, more)),
            pad(self.temperature, (0, more), value=1.0),
            pad(self.top_k, (0, more)),
            pad(self.top_p, (0, more), value=1.0),
        )

    def _columns(self) -> tuple[torch.Tensor, ...]:
        return self.seeds, self.temperature, self.top_k, self.top_p


def draw(
    logits: torch.Tensor,
    settings: DrawSettings,
    positions: torch.Tensor,
    forbidden: torch.Tensor | None = None,
) -> Drawn:
    """Draws one token per row of `logits` float32[B, V], to stand at `positions` int64[B].

    forbidden: int64[B, S] tokens that a row must not draw, others than 0..V-1 are none; it may draw
    another. Log-probabilities are before these, and before truncation. A greedy row reports those
    at temperature 1.
    Rows that are not finite are told, and index nothing with what they would give.
    """
    scaled = logits if settings.divisor is None else logits / settings.divisor
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    normalizer = top[:, 0] + weights.sum(-1).log_()
    if not bool((finite := normalizer.isfinite()).all()):
        even = logits.masked_fill(~finite[:, None], 0.0)
        return replace(draw(even, settings, positions, forbidden), broken=~finite)
    allowed = scaled
    if forbidden is not None:
        allowed = scaled.masked_fill(_mask(forbidden, logits.shape[1]), float("-inf"))
        weights = (allowed - allowed.amax(-1, keepdim=True)).exp_()  # those left may be tiny
    if settings.all_greedy:
        tokens = allowed.argmax(-1)
    else:
        tokens = _choose(allowed, weights, settings, positions)
        if settings.greedy is not None:
            tokens = torch.where(settings.greedy, allowed.argmax(-1), tokens)
    logprobs = scaled.gather(1, tokens[:, None])[:, 0] - normalizer
    if settings.divisor is None:
        return Drawn(tokens, logprobs, logprobs)
    plain = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return Drawn(tokens, logprobs, plain)


def _mask(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """bool[B, width]: what tokens int64[B, S] name; others than 0..width-1 name nothing."""
    places = torch.where((tokens >= 0) & (tokens < width), tokens, width)
    named = torch.zeros(len(tokens), width + 1, dtype=torch.bool, device=tokens.device)
    return named.scatter_(1, places, True)[:, :width]


def _choose(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    settings: DrawSettings,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Tokens drawn in proportion to `weights`, which are exp(`scaled`) up to a factor."""
    if settings.truncated is not None:
        rows = settings.truncated
        kept = scaled[rows] >= _thresholds(scaled[rows], weights[rows], settings)
        weights[rows] = weights[rows] * kept
    return _invert(weights, uniform(settings.seeds, positions))


def draw_fixed(
    logits: torch.Tensor,
    settings: DrawSettings,
    positions: torch.Tensor,
    rows: int,
    forbidden: torch.Tensor | None = None,
) -> Drawn:
    """Draws for B rows filled up to `rows`, so that its shapes do not depend on B."""
    more, count = rows - len(logits), len(logits)
    none = None if forbidden is None else pad(forbidden, (0, 0, 0, more), value=-1)
    drawn = draw(
        pad(logits, (0, 0, 0, more)), settings.padded(rows), pad(positions, (0, more)), none
    )
    broken = None if drawn.broken is None else drawn.broken[:count]
    return Drawn(drawn.tokens[:count], drawn.logprobs[:count], drawn.logprobs_t1[:count], broken)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64[B] in [0, 1): SplitMix64 (Steele et al. 2014) of seed and position."""
    state = _mix(seeds) + (positions + 1) * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
    return _shift(_mix(state), 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64, which torch has only arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _invert(weights: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """The index at which the running sum of `weights` [B, V] passes chance x total, in float64.

    Wide rows are searched in two levels, since a running sum over all of V is the slow part.
    """
    width = weights.shape[1]
    if width <= 4 * SEGMENT:
        sums = weights.cumsum(-1, dtype=torch.float64)
        target = chance[:, None] * sums[:, -1:]
        return torch.searchsorted(sums, target, right=True)[:, 0]
    padded = pad(weights, (0, -width % SEGMENT)).unflatten(1, (-1, SEGMENT))
    totals = padded.sum(-1, dtype=torch.float64)
    sums = totals.cumsum(-1)
    target = chance[:, None] * sums[:, -1:]
    segment = torch.searchsorted(sums, target, right=True)
    rest = target - (sums - totals).gather(1, segment)
    inner = padded.gather(1, segment[:, :, None].expand(-1, 1, SEGMENT))[:, 0]
    inner_sums = inner.cumsum(-1, dtype=torch.float64)
    # The two levels round differently: stay inside the segment's own sums.
    rest = torch.minimum(rest.clamp_(min=0), inner_sums[:, -1:] * (1 - 2.0**-52))
    return (segment * SEGMENT + torch.searchsorted(inner_sums, rest, right=True))[:, 0]


def _thresholds(
    scaled: torch.Tensor, weights: torch.Tensor, settings: DrawSettings
) -> torch.Tensor:
    """[R, 1]: the smallest value of `scaled` [R, V] that top-k, then top-p of the rest, leave.

    Values that are equal stay or go together. Only as many of the largest values are looked
    at as the rows need, and what comes out does not depend on how many that were.
    """
    assert settings.truncated is not None
    top_k, top_p = settings.top_k[settings.truncated], settings.top_p[settings.truncated]
    width = scaled.shape[1]
    limits = torch.where(top_k > 0, top_k.clamp(max=width), width)[:, None]
    largest = int(top_k.max())
    while True:
        largest = min(max(largest, FEW), width)
        values = scaled.topk(largest).values
        heights = (values - values[:, :1]).exp_()
        sums = heights.cumsum(-1, dtype=torch.float64)
        seen = limits.clamp(max=largest)
        total = torch.where(
            limits < width, sums.gather(1, seen - 1), weights.sum(-1, True, dtype=torch.float64)
        )
        wanted = top_p[:, None] * total
        rank = torch.arange(largest, device=scaled.device)
        counts = ((rank < limits) & (sums - heights < wanted)).sum(-1, keepdim=True)
        counts = counts.clamp_(min=1)  # of a top_p that is 0 as a float32, the likeliest
        short = (limits > largest) & (top_p[:, None] < 1) & (sums[:, -1:] < wanted)
        if largest == width or not bool(short.any()):
            break
        largest *= 16
    everything = (top_p[:, None] >= 1) & (limits == width)
    return values.gather(1, counts - 1).masked_fill_(everything, float("-inf"))


class Written(NamedTuple):
    """Tokens and log-probabilities of one sample, and the experts of all it drew but the last."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    logprobs_t1: Sequence[float]
    experts: torch.Tensor | None = None  # int16[drawn - 1, mixture layers, chosen], if watched


class Outputs:
    """Keeps what running samples drew, one slot each, in tables that grow by doubling."""

    def __init__(self, device: torch.device) -> None:
        self._free: list[int] = []
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, 0, device=device)
        self._logprobs_t1 = torch.zeros(0, 0, device=device)
        self._experts: torch.Tensor | None = None  # int16[slots, width, mixture layers, chosen]

    def reserve(self, count: int, width: int) -> list[int]:
        """Reserves slots for `count` samples of up to `width` tokens."""
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
        """Writes token number counts[i] (from 0) of slots[i]; both int64[B]."""
        place = (slots, counts)
        self._tokens[place] = drawn.tokens
        self._logprobs[place] = drawn.logprobs
        if drawn.logprobs_t1 is not drawn.logprobs:
            self._logprobs_t1[place] = drawn.logprobs_t1

    def write_experts(
        self, slots: torch.Tensor, counts: torch.Tensor, experts: torch.Tensor
    ) -> None:
        """Writes the experts of token number counts[i] (from 0) of slots[i], int16[B, L, k]."""
        if self._experts is None:
            self._experts = experts.new_zeros(*self._tokens.shape, *experts.shape[1:])
        self._experts[slots, counts] = experts

    def _experts_of(self, slot: int, end: int) -> torch.Tensor | None:
        return None if self._experts is None else self._experts[slot, : max(end - 1, 0)]

    def read(
        self, slots: Sequence[int], extents: Sequence[tuple[int, int]], tempered: Sequence[bool]
    ) -> list[Written]:
        """Returns tokens extents[i] = (first, end) of each slot.

        Without temperature both log-probabilities are one; `write` may have left the second.
        """
        if not slots:
            return []
        device, limit = self._tokens.device, self._tokens.shape[1] - 1
        longest = max(end - first for first, end in extents)
        firsts = torch.tensor([first for first, _ in extents], device=device)
        columns = (firsts[:, None] + torch.arange(longest, device=device)).clamp_(max=limit)
        place = (torch.tensor(slots, device=device)[:, None], columns)
        tokens = self._tokens[place].to("cpu", torch.int32).numpy()
        logprobs = self._logprobs[place].cpu().numpy()
        plain = self._logprobs_t1[place].cpu().numpy() if any(tempered) else logprobs
        written = []
        for row, (first, end) in enumerate(extents):
            length = end - first  # copies: a short sample does not keep the rows of all
            drawn = Numbers(logprobs[row, :length].copy())
            both = Numbers(plain[row, :length].copy()) if tempered[row] else drawn
            experts = self._experts_of(slots[row], end)
            written.append(Written(Numbers(tokens[row, :length].copy()), drawn, both, experts))
        return written
