"""Per-token advantages (and returns) of every estimator behind one entry, `compute_advantages`.

Groups are told apart by id, never by position or size, and must be whole: estimators relative to
the group read all its rewards. Only whitening needs the whole batch; its moments merge over ranks.
Everything is float64 inside and float32 at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sluice.algo.inputs import MissingColumnError
from sluice.algo.kl import estimate_kl
from sluice.algo.moments import Moments
from sluice.algo.scan import discounted_returns, generalized_advantages, place_terminal
from sluice.algo.spec import AdvantageSpec, required_columns

STD_EPSILON = 1e-6  # of a group's standard deviation, as GRPO implementations have it
WHITEN_EPSILON = 1e-8

MergeMoments = Callable[[Moments], Moments]
FloatList = list[float]


@dataclass(frozen=True, kw_only=True)
class AdvantageRow:
    """One sample as an estimator sees it; per-token tensors cover the response.

    loss_mask: bool[response]. columns: float[response] by name. rewards: the per-sample columns
    `reward`, `raw_reward`. What columns hold outside the mask is not read.
    """

    sample_id: str
    group_id: str
    loss_mask: torch.Tensor
    rewards: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)


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
    rows: Sequence[AdvantageRow], spec: AdvantageSpec, merge: MergeMoments | None = None
) -> AdvantageColumns:
    """Advantages of `rows` (whole groups) as `spec` says.

    merge: given this rank's moments returns those of every rank; called exactly once when
    `spec.whitens` and never otherwise, also on a rank without rows, so it may be a collective.
    A row without trained tokens gets zeros, but its reward counts in its group. A group of one
    has advantage 0 under grpo, rloo and reinforce_plus_plus_baseline.
    Raises MissingColumnError and ValueError naming the sample.
    """
    for row in rows:
        _check_row(row, spec)
    kl = [_kl_of(row, spec) for row in rows]
    scores = _scores(rows, spec, kl)
    found = [_estimate(*each, spec) for each in zip(rows, scores, kl, strict=True)]
    advantages = [_add_teacher(row, pair[0], spec) for row, pair in zip(rows, found, strict=True)]
    trained = [a[row.loss_mask] for a, row in zip(advantages, rows, strict=True)]
    moments = Moments.of_tensor(torch.cat(trained)) if trained else Moments()
    metrics = _metrics(rows, spec, moments, kl)
    if spec.whitens:
        whole = moments if merge is None else merge(moments)
        advantages = [
            whiten(a, row.loss_mask, whole) for a, row in zip(advantages, rows, strict=True)
        ]
    return AdvantageColumns(
        advantages=[a.float() for a in advantages],
        returns=[pair[1].float() for pair in found] if spec.name == "gae" else None,
        moments=moments,
        metrics=metrics,
    )


def group_moments(rewards: Sequence[float], group_ids: Sequence[str]) -> dict[str, Moments]:
    """Moments of the rewards of each group; of disjoint parts of a group they merge."""
    members: dict[str, FloatList] = {}
    for reward, group in zip(rewards, group_ids, strict=True):
        members.setdefault(group, []).append(reward)
    return {group: Moments.of_values(values) for group, values in members.items()}


def group_relative(reward: float, group: Moments, *, scale_by_std: bool) -> float:
    """GRPO (arXiv 2402.03300): (reward - mean) / (standard deviation + 1e-6); 0 in a group of one.

    Without the scale: Dr.GRPO (arXiv 2503.20783).
    """
    centered = reward - group.mean
    if not scale_by_std or group.count < 2:
        return centered
    return centered / (group.standard_deviation + STD_EPSILON)


def leave_one_out(reward: float, group: Moments) -> float:
    """RLOO (arXiv 2402.14740): reward - mean of the others; 0 in a group of one."""
    if group.count < 2:
        return 0.0
    return (reward - group.mean) * group.count / (group.count - 1)


def whiten(values_T: torch.Tensor, mask_T: torch.Tensor, moments: Moments) -> torch.Tensor:
    """(value - mean) / standard deviation on trained tokens, 0 on others."""
    scaled_T = (values_T - moments.mean) / (moments.standard_deviation + WHITEN_EPSILON)
    return torch.where(mask_T, scaled_T, 0.0)


def _check_row(row: AdvantageRow, spec: AdvantageSpec) -> None:
    if missing := required_columns(spec) - row.columns.keys() - row.rewards.keys():
        raise MissingColumnError(missing, f"sample {row.sample_id}")
    if spec.reward_column is not None and not math.isfinite(row.rewards[spec.reward_column]):
        raise ValueError(f"sample {row.sample_id}: {spec.reward_column} is not finite")
    for name, values in row.columns.items():
        if values.shape != row.loss_mask.shape:
            raise ValueError(
                f"sample {row.sample_id}: {name} has {values.numel()} values "
                f"for {row.loss_mask.numel()} response tokens"
            )


def _kl_of(row: AdvantageRow, spec: AdvantageSpec) -> torch.Tensor:
    """float64[response], coefficient x KL to the reference on trained tokens."""
    if not spec.kl_coefficient or spec.student_column is None:
        return torch.zeros(row.loss_mask.shape, dtype=torch.float64)
    kl_T = estimate_kl(
        row.columns[spec.student_column].double(),
        row.columns["reference_logprobs"].double(),
        spec.kl_estimator or "k1",
    )
    return torch.where(row.loss_mask, spec.kl_coefficient * kl_T, 0.0)


def _scores(
    rows: Sequence[AdvantageRow], spec: AdvantageSpec, kl: Sequence[torch.Tensor]
) -> FloatList:
    """One number a sample: its reward, relative to its group where the estimator is."""
    if spec.reward_column is None:
        return [0.0] * len(rows)
    rewards = [float(row.rewards[spec.reward_column]) for row in rows]
    if spec.name in ("grpo", "rloo"):  # one score a sample: the KL of the sample as a whole
        rewards = [r - kl_T.sum().item() for r, kl_T in zip(rewards, kl, strict=True)]
    if spec.name not in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        return rewards
    ids = [row.group_id for row in rows]
    groups = group_moments(rewards, ids)
    if spec.name == "rloo":
        return [leave_one_out(r, groups[g]) for r, g in zip(rewards, ids, strict=True)]
    scaled = spec.name == "grpo" and spec.scale_by_std is not False
    return [
        group_relative(r, groups[g], scale_by_std=scaled) for r, g in zip(rewards, ids, strict=True)
    ]


def _estimate(
    row: AdvantageRow, score: float, kl_T: torch.Tensor, spec: AdvantageSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_T, returns_T) of one sample, float64, before the teacher and whitening."""
    mask_T = row.loss_mask
    zeros_T = torch.zeros_like(kl_T)
    if spec.name in ("grpo", "rloo"):
        return torch.where(mask_T, score, zeros_T), zeros_T
    if spec.name == "distillation":
        return zeros_T, zeros_T
    if spec.name == "provided":
        return torch.where(mask_T, row.columns["advantages"].double(), 0.0), zeros_T
    rewards_T = place_terminal(mask_T, score) - kl_T
    gamma = 1.0 if spec.gamma is None else spec.gamma
    if spec.name != "gae":
        return discounted_returns(rewards_T, mask_T, gamma), zeros_T
    gae_lambda = 1.0 if spec.gae_lambda is None else spec.gae_lambda
    return generalized_advantages(
        rewards_T, row.columns["values"], mask_T, gamma=gamma, gae_lambda=gae_lambda
    )


def _add_teacher(
    row: AdvantageRow, advantages_T: torch.Tensor, spec: AdvantageSpec
) -> torch.Tensor:
    """On-policy distillation: + coefficient x (teacher - student) log-prob, on trained tokens."""
    if not spec.has_teacher or spec.student_column is None:
        return advantages_T
    coefficient = 1.0 if spec.teacher_coefficient is None else spec.teacher_coefficient
    student_T = row.columns[spec.student_column].double()
    gap_T = row.columns["teacher_logprobs"].double() - student_T
    return advantages_T + torch.where(row.loss_mask, coefficient * gap_T, 0.0)


def _metrics(
    rows: Sequence[AdvantageRow],
    spec: AdvantageSpec,
    moments: Moments,
    kl: Sequence[torch.Tensor],
) -> dict[str, tuple[float, float]]:
    metrics = {"advantage": (moments.mean * moments.count, moments.count)}
    if spec.has_kl:
        metrics["kl_in_reward"] = (sum(kl_T.sum().item() for kl_T in kl), moments.count)
    if spec.has_teacher and spec.student_column is not None:
        total = 0.0
        for row in rows:
            gap_T = row.columns[spec.student_column] - row.columns["teacher_logprobs"]
            total += torch.where(row.loss_mask, gap_T.double(), 0.0).sum().item()
        metrics["kl_teacher"] = (total, moments.count)
    return metrics
