"""Clip-Cov and KL-Cov: hold back the few tokens that cost most entropy (arXiv 2505.22617).

Those whose log-prob and advantage are high together: cov_t = (A_t - mean A)(log p_t - mean log p),
means over all trained tokens of the pass. log p is the old policy's, so that the same tokens are
chosen however the rows are split; in the first mini-batch of a step it is the current one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens
from sluice.algo.surrogates.ppo_clip import ClipSettings, clipped

if TYPE_CHECKING:
    import torch

BINS = 256  # of the range of covariances, and once more of the bin that holds the threshold


def measure_means(tokens: Tokens) -> dict[str, torch.Tensor]:
    """What `covariances` needs, summed."""
    return {
        "tokens": tokens.mask.sum().double(),
        "advantage": tokens.advantages.double().sum(),
        "logprob": tokens.old.double().sum(),
    }


def covariances(tokens: Tokens) -> torch.Tensor:
    """float64[T]; of masked tokens no number of use."""
    count = max(tokens.measured["tokens"], 1.0)
    advantages_T = tokens.advantages.double() - tokens.measured["advantage"] / count
    return advantages_T * (tokens.old.double() - tokens.measured["logprob"] / count)


class ClipCovSettings(ClipSettings):
    """Of the tokens with low < cov < high, so many that they are `share` of all, by lot."""

    share: float = Field(2e-4, gt=0, le=1)
    low: float = 1.0
    high: float = 5.0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low is not below high")
        return self


class ClipCov(Loss):
    """PPO's clipped surrogate, without a gradient at a `share` of the tokens of high covariance.

    Lots are drawn from a sample's id and a token's position.
    """

    settings_type = ClipCovSettings
    silent = True
    rounds = 2

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        inside = tokens.measured["inside"]
        wanted = self.settings.share * tokens.measured["tokens"]
        held_T = self._inside(tokens) & (tokens.draws < (wanted / inside if inside else 0.0))
        tokens.record("clipped_covariance", held_T)
        return clipped(tokens, tokens.ratio, self.settings).masked_fill(held_T, 0.0)

    def measure(self, tokens: Tokens, number: int) -> dict[str, torch.Tensor]:
        if number == 0:
            return measure_means(tokens)
        return {"inside": self._inside(tokens).sum().double()}

    def _inside(self, tokens: Tokens) -> torch.Tensor:
        cov_T = covariances(tokens)
        return (cov_T > self.settings.low) & (cov_T < self.settings.high) & tokens.mask


class KlCovSettings(PluginSettings):
    """The `share` of tokens of highest covariance pays for leaving the old policy."""

    share: float = Field(2e-3, gt=0, le=1)
    coefficient: float = Field(1.0, gt=0)


class KlCov(Loss):
    """-r A, plus coefficient x |log r| at the `share` of tokens of highest covariance.

    Covariances that differ by less than 1/65536 of their range are one, as those of tokens that
    were certain are; where the share ends among such tokens, lots decide, as in `ClipCov`.
    """

    settings_type = KlCovSettings
    rounds = 4

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        place_T = self._places(covariances(tokens), *self._coarse(tokens))
        last, part = self._last(tokens, "fine")
        drawn_T = (place_T == last) & (tokens.draws < part)
        chosen_T = ((place_T > last) | drawn_T) & tokens.mask
        tokens.record("penalised_covariance", chosen_T)
        penalty_T = self.settings.coefficient * tokens.log_ratio.abs()
        return penalty_T.masked_fill(~chosen_T, 0.0) - tokens.ratio * tokens.advantages

    def measure(self, tokens: Tokens, number: int) -> dict[str, torch.Tensor]:
        if number == 0:
            return measure_means(tokens)
        cov_T = covariances(tokens)[tokens.mask]
        if number == 1:
            if not len(cov_T):
                return {}
            return {"high/max": cov_T.max(), "low/max": -cov_T.min()}
        name, (low, width) = (
            ("coarse", self._range(tokens)) if number == 2 else ("fine", self._coarse(tokens))
        )
        place_T = self._places(cov_T, low, width)
        counts = place_T[(place_T >= 0) & (place_T < BINS)].bincount(minlength=BINS)
        names = {f"{name}/{i}": counts[i].double() for i in range(BINS) if counts[i]}
        return names | {f"{name}/above": (place_T >= BINS).sum().double()}

    def _range(self, tokens: Tokens) -> tuple[float, float]:
        """(lowest covariance, highest - lowest)."""
        high, low = tokens.measured.get("high/max", 0.0), -tokens.measured.get("low/max", 0.0)
        return low, high - low

    def _coarse(self, tokens: Tokens) -> tuple[float, float]:
        """(lower edge, width) of the coarse bin where the share ends."""
        (low, width), (index, _) = self._range(tokens), self._last(tokens, "coarse")
        return low + index * width / BINS, width / BINS

    def _places(self, cov_T: torch.Tensor, low: float, width: float) -> torch.Tensor:
        """The bin of each covariance; the upper edge is of the last one."""
        if not width:
            return cov_T.new_zeros(cov_T.shape).long()
        place_T = ((cov_T - low) / width * BINS).floor().clamp(-1, BINS + 1).long()
        return place_T.masked_fill(place_T == BINS, BINS - 1)

    def _last(self, tokens: Tokens, name: str) -> tuple[int, float]:
        """(the bin where the share of highest covariances ends, the part of it that is chosen)."""
        measured = tokens.measured
        wanted = max(1.0, self.settings.share * measured["tokens"] // 1)
        above = measured.get(f"{name}/above", 0.0)
        for index in range(BINS - 1, -1, -1):
            inside = measured.get(f"{name}/{index}", 0.0)
            if inside and above + inside >= wanted:
                return index, (wanted - above) / inside
            above += inside
        return 0, 1.0
