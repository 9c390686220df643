"""What finished groups of a data set amount to; for episode workers and their callers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sluice.algo.evaluation import TaskScores, summarise
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import rollout_service_pb2 as pb


def report_of(
    finished: Sequence[pb.FinishedGroup],
    failed_count: int,
    *,
    pass_at: Sequence[int] = (),
    threshold: float = 1.0,
) -> pb.EvaluationReport:
    """Each group is a task; an episode passes from a raw reward of `threshold` on.

    Means are NaN without groups. Raises ValueError for a k above the episodes of a task.
    """
    summary = summarise([_task_scores(group, threshold) for group in finished], pass_at)
    lengths = [length for group in finished for length in group.response_lengths]
    reasons = [reason for group in finished for reason in group.finish_reasons]
    truncated = sum(reason == sample_pb2.FINISH_REASON_LENGTH for reason in reasons)
    return pb.EvaluationReport(
        group_count=summary.task_count,
        failed_group_count=failed_count,
        reward_mean=summary.reward_mean,
        reward_std=summary.reward_std,
        reward_error=summary.reward_error,
        pass_at=dict(summary.pass_at),
        response_length_mean=sum(lengths) / len(lengths) if lengths else math.nan,
        truncated_share=truncated / len(reasons) if reasons else math.nan,
        min_version=min((group.min_version for group in finished), default=0),
        max_version=max((group.max_version for group in finished), default=0),
    )


def _task_scores(group: pb.FinishedGroup, threshold: float) -> TaskScores:
    """The last sample of an episode speaks for it."""
    episodes = {detail.episode: index for index, detail in enumerate(group.details)}
    last = sorted(episodes.values()) or range(len(group.rewards))
    return TaskScores(
        rewards=[group.rewards[index] for index in last],
        passes=[group.raw_rewards[index] >= threshold for index in last],
    )
