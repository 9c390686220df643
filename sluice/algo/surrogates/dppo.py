"""DPPO: a trust region of divergences in place of ratios (arXiv 2602.04879).

Its `log_ratio_coefficient` is that of Kimi K2.5 (arXiv 2602.02276); with `two_sided` it is what
prime-rl calls `ipo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens

if TYPE_CHECKING:
    import torch

SMALLEST = 1e-8  # of a probability that is left to other tokens


class DppoSettings(PluginSettings):
    """How far the probability of a token may go in the direction that its advantage pulls."""

    divergence: Literal["tv", "kl"] = "tv"
    high: float = Field(0.2, gt=0, description="Where A > 0; a probability (tv), or nats (kl).")
    low: float | None = Field(None, gt=0, description="Where A <= 0; None is high.")
    two_sided: bool = Field(False, description="Whichever way its advantage pulls.")
    ratio_limit: float = Field(20.0, gt=0, description="Largest weight of a token.")
    log_ratio_coefficient: float = Field(
        0.0, ge=0, description="Of (log r)^2 of every token, which pulls back to the old policy."
    )


class Dppo(Loss):
    """-stopgrad(min(r, ratio_limit)) A log p, on tokens that are within the trust region, and
    log_ratio_coefficient (log r)^2 on all.

    Of p and q, the token's probability now and under the old policy, tv is |p - q| and kl is
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)): of the token against all others. A token that
    is beyond `high` upwards with A > 0, or beyond `low` downwards with A <= 0, has no gradient of
    the first term; with `two_sided` whatever A is.
    """

    settings_type = DppoSettings
    silent = True

    @property
    def is_silent(self) -> bool:
        return not self.settings.log_ratio_coefficient

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        settings = self.settings
        now_T, old_T = tokens.fixed.clamp(max=0).exp(), tokens.old.clamp(max=0).exp()
        if settings.divergence == "tv":
            distance_T = (now_T - old_T).abs()
        else:
            others_T = ((1 - old_T).clamp(min=SMALLEST) / (1 - now_T).clamp(min=SMALLEST)).log()
            distance_T = old_T * (tokens.old - tokens.fixed) + (1 - old_T) * others_T
        low = settings.high if settings.low is None else settings.low
        rose_T = (now_T > old_T) & (distance_T > settings.high)
        fell_T = (now_T < old_T) & (distance_T > low)
        if not settings.two_sided:
            rose_T, fell_T = rose_T & (tokens.advantages > 0), fell_T & (tokens.advantages <= 0)
        tokens.record("clipped_high", rose_T)
        tokens.record("clipped_low", fell_T)
        weight_T = tokens.fixed_ratio.clamp(max=settings.ratio_limit)
        gain_T = (weight_T * tokens.advantages * tokens.outputs).masked_fill(rose_T | fell_T, 0.0)
        if not settings.log_ratio_coefficient:
            return -gain_T
        return settings.log_ratio_coefficient * tokens.log_ratio.square() - gain_T
