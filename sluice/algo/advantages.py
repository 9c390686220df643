"""Advantages of rows: scores of samples, related to those of siblings, on every token; whitened."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sluice.algo.aggregation import Moments, RelatedScores, relate_siblings
from sluice.algo.estimator import Sibling
from sluice.algo.losses import check_columns
from sluice.algo.packed_rows import AdvantageRow, InvalidAdvantageError, PackedRows
from sluice.algo.spec import AdvantageSpec, required_columns
from sluice.samples.sample import LARGEST_NUMBER

WHITEN_EPSILON = 1e-8

MergeMoments = Callable[[Moments], Moments]
FloatList = list[float]


@dataclass(frozen=True, kw_only=True)
class AdvantageColumns:
    """Columns in row order, float32[response], 0 outside the mask; returns only from gae.

    moments: of all trained tokens' advantages of these rows before whitening.
    metrics: name -> (sum, weight), to be added up over ranks.
    """

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor] | None
    moments: Moments
    metrics: Mapping[str, tuple[float, float]]


def compute_advantages(
    rows: Sequence[AdvantageRow],
    spec: AdvantageSpec,
    merge: MergeMoments | None = None,
    relative: Sequence[float] | None = None,
) -> AdvantageColumns:
    """Computes the advantages of `rows` as `spec` says.

    relative: what `relate_siblings` gives these rows among all of their groups; without it the
    rows are whole groups, and metrics have what the estimator tells of them.
    merge: given this rank's moments returns those of every rank; called exactly once when
    `spec.whitens` and never otherwise, also on a rank without rows, so it may be a collective.
    A row without trained tokens gets zeros, but its reward counts in its group. A group of one
    has advantage 0 under estimators that compare siblings.
    Raises MissingColumnError, PluginSettingError, InvalidAdvantageError, and ValueError naming the
    sample.
    """
    needed = required_columns(spec)
    for row in rows:
        _check_row(row, spec, needed)
    packed = PackedRows.of(rows)
    kl_T = _kl_of(packed, spec)
    related = _relative(packed, kl_T, spec) if relative is None else RelatedScores([*relative])
    advantages_T, returns_T = spec.estimator.estimate(packed, related.scores, kl_T)
    gap_T = _teacher_gap(packed, spec)
    if gap_T is not None:
        coefficient = 1.0 if spec.teacher_coefficient is None else spec.teacher_coefficient
        advantages_T = advantages_T + coefficient * gap_T
    packed.check(advantages_T, "an advantage")
    if returns_T is not None:
        packed.check(returns_T, "a return")
    moments = Moments.of_tensor(advantages_T[packed.mask]) if rows else Moments()
    metrics = {"advantage": (moments.mean * moments.count, moments.count), **related.metrics}
    if spec.has_kl:
        metrics["kl_in_reward"] = (kl_T.sum().item(), moments.count)
    if gap_T is not None:
        metrics["kl_teacher"] = (-gap_T.sum().item(), moments.count)
    if spec.whitens:
        whole = moments if merge is None else merge(moments)
        advantages_T = whiten(advantages_T, packed.mask, whole)
    return AdvantageColumns(
        advantages=packed.split(advantages_T.float()),
        returns=None if returns_T is None else packed.split(returns_T.float()),
        moments=moments,
        metrics=metrics,
    )


def whiten(values_T: torch.Tensor, mask_T: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Returns (value - mean) / standard deviation on trained tokens, 0 on others."""
    scaled_T = (values_T - moments.mean) / (moments.standard_deviation + WHITEN_EPSILON)
    return torch.where(mask_T, scaled_T, 0.0)


def _check_row(row: AdvantageRow, spec: AdvantageSpec, needed: frozenset[str]) -> None:
    for name in needed:
        if name in row.rewards:
            if not math.isfinite(row.rewards[name]):
                raise ValueError(f"sample {row.sample_id}: {name} is not finite")
        elif (values := row.columns.get(name)) is None:
            present = row.columns.keys() | row.rewards.keys()
            check_columns(needed, present, f"sample {row.sample_id}")
        elif values.shape != row.loss_mask.shape:
            raise ValueError(
                f"sample {row.sample_id}: {name} has {values.numel()} values "
                f"for {row.loss_mask.numel()} response tokens"
            )


def _kl_of(packed: PackedRows, spec: AdvantageSpec) -> torch.Tensor:
    """float64[T], coefficient x KL to the reference on trained tokens."""
    if not spec.kl_coefficient or spec.student_column is None:
        return packed.zeros()
    difference_T = packed.column(spec.student_column) - packed.column("reference_logprobs")
    return packed.masked(spec.kl_coefficient * spec.kl_form.estimate(difference_T))


def _teacher_gap(packed: PackedRows, spec: AdvantageSpec) -> torch.Tensor | None:
    """On-policy distillation: (teacher - student) log-prob on trained tokens, float64[T]."""
    if not spec.has_teacher or spec.student_column is None:
        return None
    gap_T = packed.column("teacher_logprobs") - packed.column(spec.student_column)
    return packed.masked(gap_T)


def score_rows(rows: Sequence[AdvantageRow], spec: AdvantageSpec) -> FloatList:
    """Returns the scores of each sample in turn, before its siblings count.

    `spec.estimator.width` numbers a sample. Raises MissingColumnError, InvalidAdvantageError and
    ValueError naming the sample.
    """
    needed = required_columns(spec)
    for row in rows:
        _check_row(row, spec, needed)
    packed = PackedRows.of(rows)
    return [score for scores in _scores(packed, _kl_of(packed, spec), spec) for score in scores]


def _scores(packed: PackedRows, kl_T: torch.Tensor, spec: AdvantageSpec) -> list[tuple[float, ...]]:
    column, overlong = spec.reward_column, spec.overlong
    rewards = [float(row.rewards[column]) if column else 0.0 for row in packed.rows]
    if overlong is not None:
        punished = zip(rewards, packed.lengths, strict=True)
        rewards = [reward + overlong.punish(length) for reward, length in punished]
    if spec.has_kl and spec.estimator.kl_in_score:  # one score: the whole sample's KL
        parts = packed.split(kl_T)
        rewards = [r - part_T.sum().item() for r, part_T in zip(rewards, parts, strict=True)]
    summed = {name: packed.sums(name) for name in spec.estimator.summed_columns}
    scores = [
        spec.estimator.scores(
            reward, {**row.rewards, **{name: sums[index] for name, sums in summed.items()}}
        )
        for index, (row, reward) in enumerate(zip(packed.rows, rewards, strict=True))
    ]
    for row, own in zip(packed.rows, scores, strict=True):
        for score in own:
            if not abs(score) <= LARGEST_NUMBER:  # NaN neither
                problem = f"has a score of {score:g}, not a finite number up to {LARGEST_NUMBER:g}"
                raise InvalidAdvantageError(row.sample_id, problem)
    return scores


def _relative(packed: PackedRows, kl_T: torch.Tensor, spec: AdvantageSpec) -> RelatedScores:
    scores = _scores(packed, kl_T, spec)
    if not spec.compares_siblings:
        return RelatedScores([own[0] for own in scores])
    siblings = [
        Sibling(own, length, row.sample_id if row.episode is None else row.episode)
        for row, own, length in zip(packed.rows, scores, packed.trained_counts(), strict=True)
    ]
    return relate_siblings(siblings, [row.group_id for row in packed.rows], spec.estimator)
