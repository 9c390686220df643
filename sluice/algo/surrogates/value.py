"""Losses of values: a critic's, and one that has the gradient of any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sluice.algo.plugins import PluginSettings
from sluice.algo.surrogate import Loss, Tokens
from sluice.algo.surrogates.reinforce import Reinforce

if TYPE_CHECKING:
    import torch


class ValueSettings(PluginSettings):
    """How far a value may go from what it was."""

    value_clip: float | None = Field(None, gt=0)


class ValueLoss(Loss):
    """Half the squared error; with value_clip the larger of it and that of the clipped value."""

    settings_type = ValueSettings
    head = "value"
    has_ratio = False
    columns = ("returns",)

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return self.columns if self.settings.value_clip is None else ("returns", "values")

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        values_T, returns_T = tokens.outputs, tokens.columns["returns"]
        clip = self.settings.value_clip
        loss_T = 0.5 * (values_T - returns_T).square()
        if clip is not None:
            old_T = tokens.columns["values"]
            moved_T = (values_T - old_T).clamp(-clip, clip)
            clipped_T = 0.5 * (old_T + moved_T - returns_T).square()
            tokens.record("clipped_value", clipped_T > loss_T)
            loss_T = loss_T.maximum(clipped_T)
        tokens.record("value_loss", loss_T)
        tokens.record("value", values_T)
        tokens.record("return", returns_T)
        return loss_T


class LinearValue(Reinforce):
    """-A v: where advantages are the derivatives of a loss by values, less those, its gradient."""

    head = "value"
