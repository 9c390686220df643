"""Weights of samples and the one normaliser of a step, so that losses can stay plain sums.

A step's loss is sum_i weight_i * sum_t loss_it / normalizer. Weights depend on a sample and its
group alone and normalisers of disjoint sets of groups add up, so no split of a step into calls,
micro-batches or ranks changes the number. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.algo.spec import LossSpec


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """`weights[i]` multiplies the summed token losses of sample i; `normalizer` divides the step.

    `normalizer` may be 0 when no token is trained on: such a step has no gradient to divide.
    """

    weights: tuple[float, ...]
    normalizer: float


def weigh_samples(
    spec: LossSpec, token_counts: Sequence[int], group_ids: Sequence[str]
) -> LossWeights:
    """Weighs samples with `token_counts[i]` trained (unmasked) tokens in `group_ids[i]`.

    token_mean: every trained token counts the same. sample_mean: every sample with a trained
    token does. group_mean: every group with one does. constant: every token the same, divided by
    constant_length x all samples (Dr.GRPO, arXiv 2503.20783). A group must be given whole.
    """
    if len(token_counts) != len(group_ids):
        raise ValueError(f"{len(token_counts)} token counts but {len(group_ids)} group ids")
    if spec.aggregation == "token_mean":
        return LossWeights(weights=(1.0,) * len(token_counts), normalizer=float(sum(token_counts)))
    if spec.aggregation == "constant":
        assert spec.constant_length is not None
        normalizer = spec.constant_length * len(token_counts)
        return LossWeights(weights=(1.0,) * len(token_counts), normalizer=normalizer)
    by_group = spec.aggregation == "group_mean"
    units = [group if by_group else str(i) for i, group in enumerate(group_ids)]
    totals: Counter[str] = Counter()
    for unit, count in zip(units, token_counts, strict=True):
        totals[unit] += count
    weights = tuple(1.0 / totals[unit] if totals[unit] else 0.0 for unit in units)
    return LossWeights(weights=weights, normalizer=float(sum(1 for n in totals.values() if n)))
