"""The unclipped ratio: the policy gradient off policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.algo.surrogate import Loss, Tokens

if TYPE_CHECKING:
    import torch


class ImportanceSampling(Loss):
    """-r A."""

    silent = True

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.ratio * tokens.advantages
