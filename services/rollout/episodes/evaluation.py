"""Evaluations: rollouts in a lane of their own, summed up at the end."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.rollout import metrics
from services.rollout.episodes.rollouts import Lane, Rollouts
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.scores import report_of


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """pass_at: the k of pass@k. threshold: raw reward that passes. limit: groups at once, 0 any."""

    pass_at: tuple[int, ...]
    threshold: float
    limit: int


def evaluation_from_proto(request: pb.EvaluateRequest) -> EvaluationSettings:
    """Raises InvalidFieldError."""
    count = request.rollout.sample_count
    if any(not 1 <= k <= count for k in request.pass_at):
        raise InvalidFieldError("pass_at", f"must be within 1..{count}, the samples of a task")
    threshold = request.pass_threshold if request.HasField("pass_threshold") else 1.0
    if not math.isfinite(threshold):
        raise InvalidFieldError("pass_threshold", "must be finite")
    if request.max_running_groups < 0:
        raise InvalidFieldError("max_running_groups", "must not be negative")
    return EvaluationSettings(
        pass_at=tuple(request.pass_at), threshold=threshold, limit=request.max_running_groups
    )


class Evaluations:
    """Scores data sets beside the rollouts of the worker."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def follow(self, request: pb.EvaluateRequest) -> AsyncIterator[pb.EvaluateResponse]:
        """Settled groups, then the report. Raises what Rollouts.follow raises."""
        settings = evaluation_from_proto(request)
        finished: list[pb.FinishedGroup] = []
        failed_count = 0
        lane = Lane(is_evaluation=True, limit=settings.limit)
        async for event in self._rollouts.follow(request.rollout, lane):
            outcome = event.WhichOneof("event") or ""
            metrics.EVALUATED_GROUPS.labels(outcome).inc()
            if outcome == "finished":
                finished.append(event.finished)
                yield pb.EvaluateResponse(finished=event.finished)
            else:
                failed_count += 1
                yield pb.EvaluateResponse(failed=event.failed)
        report = report_of(
            finished, failed_count, pass_at=settings.pass_at, threshold=settings.threshold
        )
        yield pb.EvaluateResponse(report=report)
