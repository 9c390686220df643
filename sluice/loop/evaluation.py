"""Greedy score on held-out prompts, through the same episode workers."""

from __future__ import annotations

import logging

from sluice.loop.config import RunConfig
from sluice.loop.prompts import load_prompts
from sluice.loop.requests import build_evaluation
from sluice.loop.workers import EpisodeWorkers, WorkerLostError

logger = logging.getLogger(__name__)


class EvaluationError(Exception):
    """An evaluation could not be finished; the message says why."""


async def evaluate(
    config: RunConfig, workers: EpisodeWorkers, version: int, step: int, attempts: int = 5
) -> float:
    """Mean reward of one greedy sample per held-out task. Raises EvaluationError."""
    assert config.evaluation is not None
    prompts = load_prompts(config.evaluation.prompts, config.seed)
    tasks = [(f"eval-{step}-{i}", prompts.task(i)) for i in range(config.evaluation.groups)]
    rewards: dict[str, float] = {}
    failure = ""
    for trial in range(attempts):
        missing = [task for task in tasks if task[0] not in rewards]
        request = build_evaluation(config, missing, version, trial)
        try:
            async for response in workers.rollout(request):
                if response.WhichOneof("event") == "finished":
                    rewards[response.finished.group_id] = response.finished.rewards[0]
                else:
                    failure = response.failed.error.message
        except WorkerLostError as error:
            failure = str(error)
        if len(rewards) == len(tasks):
            return sum(rewards.values()) / len(rewards)
        logger.warning("evaluation: %d of %d done: %s", len(rewards), len(tasks), failure)
    raise EvaluationError(f"{len(tasks) - len(rewards)} held-out groups failed: {failure}")
