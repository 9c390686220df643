"""Weights for tokens that other weights or another engine sampled, and what to drop of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sluice.algo.kl import LOG_RATIO_LIMIT, bounded_exp
from sluice.algo.spec import ImportanceSpec, LossSpec


@dataclass(frozen=True, kw_only=True)
class SequenceSums:
    """Sums over the trained tokens of each sample; float[N]."""

    tokens: torch.Tensor
    log_ratio: torch.Tensor  # current - old
    log_importance: torch.Tensor  # old - rollout
    vetoed: torch.Tensor  # tokens below the veto bound

    def mean(self, sums_N: torch.Tensor) -> torch.Tensor:
        return sums_N / self.tokens.clamp(min=1)


def needs_sequence_sums(spec: LossSpec) -> bool:
    """Says whether any term of the loss looks at a whole sample; decided by the spec alone."""
    importance = spec.importance
    return (
        spec.name == "gspo"
        or spec.opsm_delta is not None
        or (importance is not None and (importance.level != "token" or importance.veto is not None))
    )


@torch.no_grad()
def sum_sequences(
    terms_KT: torch.Tensor, sample_index_T: torch.Tensor, sample_count: int
) -> SequenceSums:
    """Returns segment sums of [tokens, log ratio, log importance, vetoed], 0 where untrained."""
    sums_KN = terms_KT.new_zeros(4, sample_count).index_add_(1, sample_index_T, terms_KT)
    return SequenceSums(
        tokens=sums_KN[0],
        log_ratio=sums_KN[1],
        log_importance=sums_KN[2],
        vetoed=sums_KN[3],
    )


@torch.no_grad()
def importance_weights(
    log_importance_T: torch.Tensor,
    sample_index_T: torch.Tensor,
    sums: SequenceSums | None,
    spec: ImportanceSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weight_T, dropped_T): the factor of each token's loss, and the tokens left out.

    log_importance_T = log-prob under the trainer's old policy - under the rollout engine.
    `sums` is needed for the levels sequence and geometric and for the veto.
    """
    log_T = log_importance_T
    if spec.level != "token":
        assert sums is not None
        log_N = sums.log_importance
        log_N = sums.mean(log_N) if spec.level == "geometric" else log_N
        log_T = log_N[sample_index_T]
    weight_T = bounded_exp(log_T)
    high = torch.inf if spec.high is None else spec.high
    low = 0.0 if spec.low is None else spec.low
    dropped_T = torch.zeros_like(weight_T, dtype=torch.bool)
    if spec.mode in ("truncate", "clip"):
        weight_T = weight_T.clamp(low, high)
    else:
        dropped_T = (weight_T < low) | (weight_T > high)
    if spec.mode == "reject":
        weight_T = torch.ones_like(weight_T)
    if spec.veto is not None:
        assert sums is not None
        dropped_T = dropped_T | (sums.vetoed > 0)[sample_index_T]
    return weight_T.masked_fill(dropped_T, 0.0), dropped_T


def below_veto(log_importance_T: torch.Tensor, spec: ImportanceSpec | None) -> torch.Tensor:
    """Returns bool[T]: tokens whose own weight is below the veto bound."""
    if spec is None or spec.veto is None:
        return torch.zeros_like(log_importance_T, dtype=torch.bool)
    bounded_T = log_importance_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return bounded_T.exp() < spec.veto


@torch.no_grad()
def opsm_dropped(
    advantages_T: torch.Tensor, sample_index_T: torch.Tensor, sums: SequenceSums, delta: float
) -> torch.Tensor:
    """Returns bool[T]: bad tokens of samples the policy has left, mean(old - current) > delta.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556).
    """
    far_N = sums.mean(-sums.log_ratio) > delta
    return far_N[sample_index_T] & (advantages_T < 0)
