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

    The share is exact to 1/65536 of the range of covariances, and at least one token.
    """

    settings_type = KlCovSettings
    rounds = 4

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        fine = self._narrow(tokens, "fine", *self._coarse(tokens))[0]
        chosen_T = (covariances(tokens) >= fine) & tokens.mask
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
        name, low, width = ("coarse", *self._range(tokens)) if number == 2 else self._fine(tokens)
        place_T = ((cov_T - low) / width * BINS).floor() if width else cov_T.new_zeros(cov_T.shape)
        kept_T = place_T[(place_T >= 0) & (place_T <= BINS)].long().clamp(max=BINS - 1)
        counts = kept_T.bincount(minlength=BINS)
        above = (place_T > BINS).sum()
        names = {f"{name}/{i}": counts[i].double() for i in range(BINS) if counts[i]}
        return names | {f"{name}/above": above.double()}

    def _range(self, tokens: Tokens) -> tuple[float, float]:
        """(lowest covariance, highest - lowest)."""
        high, low = tokens.measured.get("high/max", 0.0), -tokens.measured.get("low/max", 0.0)
        return low, high - low

    def _coarse(self, tokens: Tokens) -> tuple[float, float]:
        return self._narrow(tokens, "coarse", *self._range(tokens))

    def _fine(self, tokens: Tokens) -> tuple[str, float, float]:
        return ("fine", *self._coarse(tokens))

    def _narrow(self, tokens: Tokens, name: str, low: float, width: float) -> tuple[float, float]:
        """(lower edge, width) of the bin where the share of highest covariances ends."""
        measured = tokens.measured
        wanted = max(1.0, self.settings.share * measured["tokens"] // 1)
        count = measured.get(f"{name}/above", 0.0)
        for index in range(BINS - 1, -1, -1):
            count += measured.get(f"{name}/{index}", 0.0)
            if count >= wanted:
                return low + index * width / BINS, width / BINS
        return low, width / BINS
