"""GSPO (arXiv 2507.18071) in its token form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.algo.kl import bounded_exp
from sluice.algo.surrogate import Loss, Tokens
from sluice.algo.surrogates.ppo_clip import ClipSettings, clipped

if TYPE_CHECKING:
    import torch


class Gspo(Loss):
    """PPO's clip of the sample's mean ratio in value, with each token's own gradient (eq. 14).

    Equal to the sequence form where a sample has one advantage, right where it has many.
    """

    settings_type = ClipSettings
    silent = True

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        mean_T = tokens.sample_means(tokens.fixed - tokens.old)
        log_ratio_T = mean_T + tokens.outputs - tokens.fixed
        return clipped(tokens, bounded_exp(log_ratio_T), self.settings)
