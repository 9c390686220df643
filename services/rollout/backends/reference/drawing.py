"""Drawing tokens for many rows at once, each row by its own temperature, truncation and seed.

A draw is a pure function of (logits, sampling, seed, position): uniform numbers come from a
counter-based hash, not from a generator with state, so neighbours and order do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.rollout.engine import Sampling

SEGMENT = 256  # vocabulary entries per segment of the two-level search


@dataclass(frozen=True)
class DrawSettings:
    """Sampling of B rows. None stands for "off in every row", so that nothing is paid for it.

    temperature: float32[B] (1 in greedy rows); greedy: bool[B]; truncated: int64[R], the rows
    with top-k or top-p, with their top_k int64[R] (0: off) and top_p float32[R]; seeds: int64[B].
    """

    seeds: torch.Tensor
    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    truncated: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    largest_k: int  # over truncated rows; 0 when one of them has no top-k

    @staticmethod
    def of(
        samplings: Sequence[Sampling], seeds: Sequence[int], device: torch.device
    ) -> DrawSettings:
        """Settings of one row per (sampling, seed)."""

        def tensor(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        temperatures = [s.temperature or 1.0 for s in samplings]
        greedy = [s.temperature == 0 for s in samplings]
        cut = [i for i, s in enumerate(samplings) if s.temperature and (s.top_k or s.top_p < 1)]
        ks = [samplings[i].top_k for i in cut]
        return DrawSettings(
            seeds=torch.tensor(seeds, dtype=torch.int64, device=device),
            temperature=tensor(temperatures, torch.float32)
            if any(t != 1 for t in temperatures)
            else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            truncated=torch.tensor(cut, device=device) if cut else None,
            top_k=torch.tensor(ks, device=device) if cut else None,
            top_p=tensor([samplings[i].top_p for i in cut], torch.float32) if cut else None,
            largest_k=max(ks) if ks and all(ks) else 0,
        )


@dataclass(frozen=True)
class Drawn:
    """tokens int64[B]; log-probabilities float32[B], of the tempered distribution and at 1."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    logprobs_t1: torch.Tensor


def draw(logits: torch.Tensor, settings: DrawSettings, positions: torch.Tensor) -> Drawn:
    """One token per row of `logits` float32[B, V]; `positions` int64[B] is where it will stand.

    Log-probabilities are before truncation. A greedy row reports those at temperature 1.
    """
    scaled = logits if settings.temperature is None else logits / settings.temperature[:, None]
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    normalizer = top[:, 0] + weights.sum(-1).log_()
    chance = uniform(settings.seeds, positions)
    tokens = _invert(weights, chance)
    if settings.truncated is not None:
        rows = settings.truncated
        tokens[rows] = _draw_truncated(scaled[rows], chance[rows], settings)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, logits.argmax(-1), tokens)
    logprobs = scaled.gather(1, tokens[:, None])[:, 0] - normalizer
    if settings.temperature is None:
        return Drawn(tokens, logprobs, logprobs)
    plain = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return Drawn(tokens, logprobs, plain)


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
    padded = torch.nn.functional.pad(weights, (0, -width % SEGMENT)).unflatten(1, (-1, SEGMENT))
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


def _draw_truncated(
    scaled: torch.Tensor, chance: torch.Tensor, settings: DrawSettings
) -> torch.Tensor:
    """Draw from rows cut to top_k, then to the smallest set of mass top_p of what is left."""
    assert settings.top_k is not None and settings.top_p is not None
    width = scaled.shape[1]
    largest = min(settings.largest_k, width)
    values, order = (
        scaled.topk(largest) if largest else scaled.sort(stable=True, dim=-1, descending=True)
    )
    weights = (values - values[:, :1]).exp()
    rank = torch.arange(values.shape[1], device=scaled.device)
    limit = torch.where(settings.top_k > 0, settings.top_k, width)
    weights = weights.masked_fill_(rank >= limit[:, None], 0)
    sums = weights.cumsum(-1, dtype=torch.float64)
    before = (sums - weights) / sums[:, -1:]
    weights = weights.masked_fill_(before >= settings.top_p[:, None], 0)
    weights[:, 0] = 1  # the most likely token always stays, at top_p 0 too
    return order.gather(1, _invert(weights, chance)[:, None])[:, 0]
