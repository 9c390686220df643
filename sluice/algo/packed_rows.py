"""Rows end to end, and sums over their trained tokens.

Time is counted in trained tokens: an observation between two of them (a tool's answer) is no
step, gets no reward and no value, and costs no discount.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

CHUNK = 128  # a triangular product inside, one carry between: 128 times fewer Python steps


def discounted_suffix_sums(terms_T: torch.Tensor, discount: float) -> torch.Tensor:
    """Returns y_t = x_t + discount * y_{t+1}, float64[T]."""
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
    """Returns float64[T] with `reward` on the last trained token; all zero when there is none."""
    rewards_T = torch.zeros(mask_T.shape, dtype=torch.float64, device=mask_T.device)
    trained = mask_T.nonzero()
    if len(trained):
        rewards_T[trained[-1]] = reward
    return rewards_T


def discounted_returns(rewards_T: torch.Tensor, mask_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """Returns the sum of rewards from each trained token on, 0 on others; float64[T]."""
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
    """Returns (advantages_T, returns_T) of one whole response, float64[T], 0 on untrained tokens.

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


class InvalidAdvantageError(ValueError):
    """What columns and settings come to for a sample is no number to train on."""

    def __init__(self, sample_id: str, problem: str) -> None:
        self.sample_id = sample_id
        super().__init__(f"sample {sample_id!r}: {problem}")


class AdvantageRow(NamedTuple):
    """One sample as an estimator sees it; per-token tensors cover the response.

    loss_mask: bool[response]. columns: float[response] by name. rewards: the per-sample columns,
    `reward` among them. What columns hold outside the mask is not read. episode: of which
    rollout of the group this is a sample, where one may have several; None is one of its own.
    """

    sample_id: str
    group_id: str
    loss_mask: torch.Tensor
    rewards: Mapping[str, float] = {}
    columns: Mapping[str, torch.Tensor] = {}
    episode: int | None = None


def join_rows(
    parts: Sequence[torch.Tensor], *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns the parts, one a row, end to end; of no rows [0, *shape] of a dtype.

    Nothing empty is put before them, for which PyTorch would take five times as long.
    """
    return torch.cat([*parts]) if parts else torch.empty(0, *shape, dtype=dtype)


@dataclass(frozen=True)
class PackedRows:
    """Rows end to end: what is asked of every token takes one operation, not one a row.

    mask: bool[T]. lengths: of each row.
    """

    rows: Sequence[AdvantageRow]
    mask: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(cls, rows: Sequence[AdvantageRow]) -> PackedRows:
        masks = [row.loss_mask for row in rows]
        return cls(rows, join_rows(masks, dtype=torch.bool), [mask.shape[0] for mask in masks])

    def column(self, name: str) -> torch.Tensor:
        """float64[T]."""
        parts = [row.columns[name] for row in self.rows]
        return join_rows(parts).double()

    def split(self, values_T: torch.Tensor) -> list[torch.Tensor]:
        """Returns the values of each row."""
        return list(values_T.split(self.lengths)) if self.rows else []

    def check(self, values_T: torch.Tensor, what: str) -> None:
        """Raises InvalidAdvantageError where that of a trained token is no float32."""
        wrong_T = ~values_T.float().isfinite() & self.mask
        if not wrong_T.any():
            return
        for row, own_T, found_T in zip(
            self.rows, self.split(values_T), self.split(wrong_T), strict=True
        ):
            if found_T.any():
                token = int(found_T.int().argmax())
                found = f"{own_T[token].item():g}, no float32,"
                problem = f"has {what} of {found} at response token {token}"
                raise InvalidAdvantageError(row.sample_id, problem)

    def trained_counts(self) -> list[int]:
        """Returns how many tokens of each row are trained on."""
        owners_T = torch.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))
        counts: list[int] = torch.bincount(
            owners_T[self.mask], minlength=len(self.lengths)
        ).tolist()
        return counts

    def sums(self, name: str) -> list[float]:
        """Returns those of a column over the trained tokens of each row."""
        return [part_T.sum().item() for part_T in self.split(self.masked(self.column(name)))]

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.mask.shape, dtype=torch.float64)

    def masked(self, values_T: torch.Tensor) -> torch.Tensor:
        """Returns the values of trained tokens, 0 on others."""
        return torch.where(self.mask, values_T, 0.0)

    def spread(self, scores: Sequence[float]) -> torch.Tensor:
        """Returns each row's score on its trained tokens."""
        lengths_N = torch.tensor(self.lengths, dtype=torch.int64)
        scores_N = torch.tensor(scores, dtype=torch.float64)
        return self.masked(torch.repeat_interleave(scores_N, lengths_N))

    def returns(self, scores: Sequence[float], kl_T: torch.Tensor, gamma: float) -> torch.Tensor:
        """Returns the discounted sums of each row's terminal score less the KL of its tokens."""
        found = [
            discounted_returns(place_terminal(row.loss_mask, score) - own_T, row.loss_mask, gamma)
            for row, score, own_T in zip(self.rows, scores, self.split(kl_T), strict=True)
        ]
        return torch.cat([self.zeros()[:0], *found])

    def generalized(
        self, scores: Sequence[float], kl_T: torch.Tensor, gamma: float, gae_lambda: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (advantages_T, returns_T) by `generalized_advantages` of the column `values`."""
        found = [
            generalized_advantages(
                place_terminal(row.loss_mask, score) - own_T,
                row.columns["values"],
                row.loss_mask,
                gamma=gamma,
                gae_lambda=gae_lambda,
            )
            for row, score, own_T in zip(self.rows, scores, self.split(kl_T), strict=True)
        ]
        advantages, returns = zip(*found, strict=True) if found else ((), ())
        none = self.zeros()[:0]
        return torch.cat([none, *advantages]), torch.cat([none, *returns])
