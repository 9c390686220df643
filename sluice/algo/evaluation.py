"""Scores of a data set from several rewarded samples a task. Plain Python: services import it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """One task: what each of its episodes got, and whether it passes."""

    rewards: Sequence[float]
    passes: Sequence[bool]


@dataclass(frozen=True, kw_only=True)
class EvaluationSummary:
    """Means are of tasks: each counts once, however many episodes it has; NaN without tasks.

    reward_std: standard deviation over all episodes. reward_error: standard error of the mean,
    the spread of the tasks' means over the root of their number; NaN for fewer than two.
    """

    task_count: int
    reward_mean: float
    reward_std: float
    reward_error: float
    pass_at: Mapping[int, float] = field(default_factory=dict)


def pass_at_k(sample_count: int, pass_count: int, k: int) -> float:
    """Returns the chance that one of k samples passes, unbiased: 1 - C(n-c, k) / C(n, k).

    Chen et al., arXiv 2107.03374. `1 - (1 - c/n)^k` would be too low. Raises ValueError unless
    0 <= pass_count <= sample_count and 1 <= k <= sample_count.
    """
    if not 0 <= pass_count <= sample_count or not 1 <= k <= sample_count:
        raise ValueError(f"pass@{k} of {sample_count} samples with {pass_count} passes")
    return 1.0 - math.comb(sample_count - pass_count, k) / math.comb(sample_count, k)


def summarise(tasks: Sequence[TaskScores], pass_at: Sequence[int] = ()) -> EvaluationSummary:
    """Summarises the scores; raises ValueError for a k above the episodes of a task."""
    means = [statistics.fmean(task.rewards) for task in tasks]
    rewards = [reward for task in tasks for reward in task.rewards]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return EvaluationSummary(
        task_count=len(tasks),
        reward_mean=statistics.fmean(means) if means else math.nan,
        reward_std=statistics.pstdev(rewards) if rewards else math.nan,
        reward_error=error,
        pass_at={k: _mean_pass(tasks, k) for k in pass_at},
    )


def _mean_pass(tasks: Sequence[TaskScores], k: int) -> float:
    chances = [pass_at_k(len(task.passes), sum(task.passes), k) for task in tasks]
    return statistics.fmean(chances) if chances else math.nan
