"""PPO's clipped surrogate (arXiv 1707.06347), with clip-higher (2503.14476) and dual clip.

Dual clip: arXiv 1912.09729.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens

if TYPE_CHECKING:
    import torch


def _below_one(clip_low: float) -> float:
    if clip_low >= 1:
        raise ValueError("must be below 1: ratios are clipped to at least 1 - clip_low")
    return clip_low


ClipLow = Annotated[float, Field(gt=0), AfterValidator(_below_one)]


class ClipSettings(PluginSettings):
    """The ratio is clipped into [1 - clip_low, 1 + clip_high]."""

    clip_low: ClipLow
    clip_high: float | None = Field(None, gt=0, description="None is clip_low.")
    dual_clip: float | None = Field(None, gt=1, description="Bound of the ratio where A < 0.")


def clipped(tokens: Tokens, ratio_T: torch.Tensor, settings: ClipSettings) -> torch.Tensor:
    """-min(r A, clip(r) A), for A < 0 at most -c A with dual clip; zero gradient where clipped."""
    advantages_T = tokens.advantages
    low = 1 - settings.clip_low
    high = 1 + (settings.clip_low if settings.clip_high is None else settings.clip_high)
    loss_T = -(ratio_T * advantages_T).minimum(ratio_T.clamp(low, high) * advantages_T)
    tokens.record("clipped_low", (ratio_T < low) & (advantages_T < 0))
    tokens.record("clipped_high", (ratio_T > high) & (advantages_T > 0))
    if settings.dual_clip is not None:
        bound_T = -settings.dual_clip * advantages_T
        beyond_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = bound_T.where(beyond_T, loss_T)
        tokens.record("clipped_dual", beyond_T)
    return loss_T


class PpoClip(Loss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""

    settings_type = ClipSettings
    silent = True

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        return clipped(tokens, tokens.ratio, self.settings)


class TinkerPpoSettings(PluginSettings):
    """The bounds themselves, as Tinker's loss_fn_config has them."""

    clip_low_threshold: float = Field(0.8, ge=0)
    clip_high_threshold: float = Field(1.2, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.clip_low_threshold > self.clip_high_threshold:
            raise ValueError("clip_low_threshold is above clip_high_threshold")
        return self


class TinkerPpo(Loss):
    """-min(r A, clip(r, clip_low_threshold, clip_high_threshold) A)."""

    settings_type = TinkerPpoSettings
    silent = True

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        low, high = self.settings.clip_low_threshold, self.settings.clip_high_threshold
        clipped_T = tokens.ratio.clamp(low, high)
        tokens.record("clipped_low", (tokens.ratio < low) & (tokens.advantages < 0))
        tokens.record("clipped_high", (tokens.ratio > high) & (tokens.advantages > 0))
        return -(tokens.ratio * tokens.advantages).minimum(clipped_T * tokens.advantages)
