"""REINFORCE, without an old policy; GPG (arXiv 2504.02546) is it on advantages of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.algo.surrogate import Loss, Tokens

if TYPE_CHECKING:
    import torch


class Reinforce(Loss):
    """-A log p."""

    has_ratio = False
    silent = True

    def token_losses(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.advantages * tokens.outputs


class Gpg(Reinforce):
    """-A log p, for the advantage `gpg`."""
