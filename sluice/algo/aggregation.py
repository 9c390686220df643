"""Weights of samples and the one normaliser of a step, so that losses can stay plain sums.

A step's loss is sum_i weight_i * sum_t loss_it / normalizer. Weights depend on a sample and its
group alone and normalisers of disjoint sets of groups add up, so no split of a step into calls,
micro-batches or ranks changes the number. `Moments` are put together from parts as exactly: two
passes inside a part and Chan's formula between parts (Chan, Golub, LeVeque 1983), no
E[x^2] - E[x]^2, which cancels when the mean is large beside the spread. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.algo.estimator import Estimator, Sibling

if TYPE_CHECKING:
    import torch

    from sluice.algo.spec import LossSpec


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """`weights[i]` multiplies the summed token losses of sample i; `normalizer` divides the step.

    `normalizer` may be 0 when no token is trained on: such a step has no gradient to divide.
    """

    weights: tuple[float, ...]
    normalizer: float


def weigh_samples(
    spec: LossSpec,
    token_counts: Sequence[int],
    group_ids: Sequence[str],
    episodes: Sequence[Hashable] | None = None,
) -> LossWeights:
    """Weighs samples with `token_counts[i]` trained (unmasked) tokens in `group_ids[i]`.

    token_mean: every trained token counts the same. sample_mean: every episode with a trained
    token does. group_mean: every group with one does. constant: every token the same, divided by
    constant_length x all episodes (Dr.GRPO, arXiv 2503.20783). sum: every token the same, divided
    by nothing, be the step of one call or of many. A group must be given whole.
    `episodes[i]` names that of sample i, which may have several; None: each is one.
    """
    if len(token_counts) != len(group_ids):
        raise ValueError(f"{len(token_counts)} token counts but {len(group_ids)} group ids")
    if spec.aggregation == "token_mean":
        return LossWeights(weights=(1.0,) * len(token_counts), normalizer=float(sum(token_counts)))
    if spec.aggregation == "sum":
        return LossWeights(weights=(1.0,) * len(token_counts), normalizer=float(any(token_counts)))
    if spec.aggregation == "constant":
        assert spec.constant_length is not None
        count = len(token_counts) if episodes is None else len(set(episodes))
        normalizer = spec.constant_length * count
        return LossWeights(weights=(1.0,) * len(token_counts), normalizer=normalizer)
    units: Sequence[Hashable] = group_ids
    if spec.aggregation == "sample_mean":
        units = range(len(group_ids)) if episodes is None else episodes
    totals: Counter[Hashable] = Counter()
    for unit, count in zip(units, token_counts, strict=True):
        totals[unit] += count
    weights = tuple(1.0 / totals[unit] if totals[unit] else 0.0 for unit in units)
    return LossWeights(weights=weights, normalizer=float(sum(1 for n in totals.values() if n)))


@dataclass(frozen=True)
class Moments:
    """`m2` is the sum of squared deviations from `mean`. The empty one is all zeros."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of_values(cls, values: Iterable[float]) -> Moments:
        """Sums with exact rounding, so the order of the values does not matter at all."""
        numbers = list(values)
        if not numbers:
            return cls()
        mean = math.fsum(numbers) / len(numbers)
        mean = min(max(mean, min(numbers)), max(numbers))  # equal values deviate by exactly 0
        return cls(float(len(numbers)), mean, math.fsum((x - mean) ** 2 for x in numbers))

    @classmethod
    def of_tensor(cls, values_T: torch.Tensor) -> Moments:
        if values_T.numel() == 0:
            return cls()
        exact_T = values_T.double()
        mean = exact_T.mean().clamp(exact_T.min(), exact_T.max())
        return cls(float(values_T.numel()), mean.item(), (exact_T - mean).square().sum().item())

    def merge(self, other: Moments) -> Moments:
        """Returns the moments of both parts together; associative up to rounding."""
        count = self.count + other.count
        if count == 0:
            return Moments()
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * other.count / count,
            self.m2 + (other.m2 + delta * delta * self.count * other.count / count),
        )

    @property
    def standard_deviation(self) -> float:
        """Of the population the values were drawn from (n - 1); 0 for fewer than two values."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0


def merge_measured(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the measurements of all parts together."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in whole:
                whole[name] = value
            elif name.endswith("/max"):
                whole[name] = max(whole[name], value)
            else:
                whole[name] += value
    return whole


STD_EPSILON = 1e-6  # of a group's standard deviation, as GRPO implementations have it


@dataclass(frozen=True)
class RelatedScores:
    """scores: of each sample. metrics: name -> (sum, weight) over the groups that tell it."""

    scores: list[float]
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


def relate_siblings(
    siblings: Sequence[Sibling], group_ids: Sequence[str], estimator: Estimator
) -> RelatedScores:
    """Returns the number of each sample relative to its group, of which all samples are given.

    All samples of the batch are. Their order does not matter at all, nor where they were scored.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    related, told = [0.0] * len(siblings), dict[str, list[float]]()
    for places in members.values():
        whole = [siblings[place] for place in places]
        for place, score in zip(places, estimator.relate(whole), strict=True):
            related[place] = score
        for name, value in estimator.measure(whole).items():
            told.setdefault(name, []).append(value)
    keys = [(group, each.episode) for group, each in zip(group_ids, siblings, strict=True)]
    sizes = Counter(keys)
    scores = estimator.relate_batch(related, [1 / sizes[key] for key in keys])
    metrics = {name: (math.fsum(values), float(len(values))) for name, values in told.items()}
    return RelatedScores(scores, metrics)


def group_relative(rewards: Sequence[float], group: Moments, *, scale_by_std: bool) -> list[float]:
    """GRPO (arXiv 2402.03300): (reward - mean) / (standard deviation + 1e-6); 0 in a group of one.

    Without the scale: Dr.GRPO (arXiv 2503.20783).
    """
    mean = group.mean
    if not scale_by_std or group.count < 2:
        return [reward - mean for reward in rewards]
    scale = group.standard_deviation + STD_EPSILON
    return [(reward - mean) / scale for reward in rewards]


def leave_one_out(reward: float, group: Moments) -> float:
    """RLOO (arXiv 2402.14740): reward - mean of the others; 0 in a group of one."""
    if group.count < 2:
        return 0.0
    return (reward - group.mean) * group.count / (group.count - 1)
