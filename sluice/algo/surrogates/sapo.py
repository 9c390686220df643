"""SAPO: a soft gate in place of a clip (arXiv 2511.20347)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens

if TYPE_CHECKING:
    import torch


class SapoSettings(PluginSettings):
    """Temperatures of the gate: the higher, the narrower."""

    tau_positive: float = Field(1.0, ge=1e-6, description="Where A > 0.")
    tau_negative: float = Field(1.05, ge=1e-6, description="Elsewhere.")


class Sapo(Loss):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A; its slope at 1 is that of r A."""

    settings_type = SapoSettings
    silent = True

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        negative_T = tokens.ratio.new_full(tokens.ratio.shape, self.settings.tau_negative)
        tau_T = negative_T.masked_fill(tokens.advantages > 0, self.settings.tau_positive)
        gate_T = (tau_T * (tokens.ratio - 1)).sigmoid() * 4 / tau_T
        return -gate_T * tokens.advantages
