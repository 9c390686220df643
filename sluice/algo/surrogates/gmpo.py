"""GMPO: the geometric mean of a sample's ratios (arXiv 2507.20673)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sluice.algo.kl import bounded_exp
from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens

if TYPE_CHECKING:
    import torch


class GmpoSettings(PluginSettings):
    """Log ratios of tokens are clipped into [-log_clip_low, log_clip_high]."""

    log_clip_low: float = Field(0.4, gt=0)
    log_clip_high: float = Field(0.4, gt=0)


class Gmpo(Loss):
    """-A exp(mean_t s min(s l_t, s clip(l_t))), l_t = log ratio, s = sign of A.

    Every token of a sample has the sample's value; its gradient goes through all of them.
    """

    settings_type = GmpoSettings
    silent = True

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        low, high = -self.settings.log_clip_low, self.settings.log_clip_high
        sign_T = tokens.advantages.sign()
        clipped_T = tokens.log_ratio.clamp(low, high)
        smaller_T = sign_T * (sign_T * tokens.log_ratio).minimum(sign_T * clipped_T)
        tokens.record("clipped_low", (tokens.log_ratio < low) & (tokens.advantages < 0))
        tokens.record("clipped_high", (tokens.log_ratio > high) & (tokens.advantages > 0))
        return -tokens.advantages * bounded_exp(tokens.sample_means(smaller_T))
