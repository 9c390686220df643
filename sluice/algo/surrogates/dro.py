"""DRO (arXiv 2405.19107), with the advantage in place of reward - value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens

if TYPE_CHECKING:
    import torch


class DroSettings(PluginSettings):
    """How dear it is to leave the old policy."""

    dro_beta: float = Field(gt=0)


class Dro(Loss):
    """beta / 2 (log r)^2 - A log p."""

    settings_type = DroSettings

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        penalty_T = 0.5 * self.settings.dro_beta * tokens.log_ratio.square()
        return penalty_T - tokens.advantages * tokens.outputs
