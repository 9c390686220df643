"""CISPO (arXiv 2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens
from sluice.algo.surrogates.ppo_clip import ClipLow

if TYPE_CHECKING:
    import torch


class CispoSettings(PluginSettings):
    """The weight is bounded by 1 + clip_high, and by 1 - clip_low from below."""

    clip_high: float = Field(gt=0)
    clip_low: ClipLow | None = Field(None, description="None is no lower bound.")


class Cispo(Loss):
    """-stopgrad(clip(r)) A log p: every token keeps a gradient, only its weight is bounded."""

    settings_type = CispoSettings
    silent = True

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        low = 0.0 if self.settings.clip_low is None else 1 - self.settings.clip_low
        high = 1 + self.settings.clip_high
        tokens.record("clipped_low", tokens.fixed_ratio < low)
        tokens.record("clipped_high", tokens.fixed_ratio > high)
        return -tokens.fixed_ratio.clamp(low, high) * tokens.advantages * tokens.outputs
