"""Discounted suffix sums and generalised advantage estimation over the trained tokens of a sample.

Time is counted in trained tokens: an observation between two of them (a tool's answer) is no
step, gets no reward and no value, and costs no discount.
"""

from __future__ import annotations

from functools import lru_cache

import torch

CHUNK = 128  # a triangular product inside, one carry between: 128 times fewer Python steps


def discounted_suffix_sums(terms_T: torch.Tensor, discount: float) -> torch.Tensor:
    """y_t = x_t + discount * y_{t+1}, float64[T]."""
    length = terms_T.numel()
    if length == 0:
        return terms_T.double()
    rows = -(-length // CHUNK)
    padded_RC = terms_T.new_zeros(rows * CHUNK, dtype=torch.float64)
    padded_RC[:length] = terms_T
    padded_RC = padded_RC.view(rows, CHUNK)
    powers_CC, to_next_C = _powers(discount, terms_T.device)
    sums_RC = padded_RC @ powers_CC
    for row in range(rows - 2, -1, -1):
        sums_RC[row] += to_next_C * sums_RC[row + 1, 0]
    return sums_RC.view(-1)[:length]


@lru_cache(maxsize=16)
def _powers(discount: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(discount^(j - i) at [j, i] for j >= i, discount^(steps from i to the next chunk))."""
    steps_C = torch.arange(CHUNK, dtype=torch.float64, device=device)
    distance_CC = steps_C[:, None] - steps_C[None, :]
    powers_CC = torch.where(distance_CC >= 0, discount ** distance_CC.clamp(min=0), 0.0)
    return powers_CC, discount ** (CHUNK - steps_C)


def place_terminal(mask_T: torch.Tensor, reward: float) -> torch.Tensor:
    """float64[T] with `reward` on the last trained token; all zero when there is none."""
    rewards_T = torch.zeros(mask_T.shape, dtype=torch.float64, device=mask_T.device)
    trained = mask_T.nonzero()
    if len(trained):
        rewards_T[trained[-1]] = reward
    return rewards_T


def discounted_returns(rewards_T: torch.Tensor, mask_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum of the rewards from each trained token on, 0 on others; float64[T]."""
    returns_T = torch.zeros_like(rewards_T, dtype=torch.float64)
    returns_T[mask_T] = discounted_suffix_sums(rewards_T[mask_T], gamma)
    return returns_T


def generalized_advantages(
    rewards_T: torch.Tensor,
    values_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_T, returns_T) of one whole response, float64[T], 0 on untrained tokens.

    delta_t = r_t + gamma V_{t'} - V_t and A_t = delta_t + gamma lambda A_{t'}, where t' is the
    next trained token and the value after the last is 0 (arXiv 1506.02438). returns = A + V.
    """
    values = values_T[mask_T].double()
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    deltas = rewards_T[mask_T].double() + gamma * following - values
    advantages_T = torch.zeros(mask_T.shape, dtype=torch.float64, device=mask_T.device)
    returns_T = torch.zeros_like(advantages_T)
    advantages_T[mask_T] = discounted_suffix_sums(deltas, gamma * gae_lambda)
    returns_T[mask_T] = advantages_T[mask_T] + values
    return advantages_T, returns_T
