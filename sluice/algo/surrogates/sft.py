"""The negative log-likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.algo.surrogate import Loss, Tokens

if TYPE_CHECKING:
    import torch


class Likelihood(Loss):
    """-log p."""

    has_ratio = False
    columns = ()

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        tokens.record("negative_logprob", -tokens.outputs)
        return -tokens.outputs


class CrossEntropy(Likelihood):
    """-log p, by the name that Tinker has for it; a sample's `weight` is its factor."""
