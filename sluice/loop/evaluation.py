"""Scores on held-out data sets, through the same episode workers, beside training or not."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from rich.console import Console

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RemoteError, RouterClient
from sluice.config import ConfigError
from sluice.loop.config import EvaluationConfig, EvaluationSetConfig, RunConfig
from sluice.loop.fleet import NoEngineError
from sluice.loop.prompts import PromptSource, Task, load_prompts
from sluice.loop.requests import build_evaluation
from sluice.loop.workers import EpisodeWorkers, NoWorkerError, WorkerLostError
from sluice.runtime.wire import evaluation_report

logger = logging.getLogger(__name__)

ATTEMPTS = 5
_HOPELESS = {grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.NOT_FOUND.value[0]}


class EvaluationError(Exception):
    """A data set could not be scored; the message says why."""


@dataclass
class _Progress:
    """What is known of the tasks of one data set, by group id."""

    missing: dict[str, Task]
    finished: dict[str, pb.FinishedGroup] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # for good
    failure: str = ""  # the last one

    def take(self, event: pb.EvaluateResponse) -> bool:
        """Whether it was a failure that another trial may mend."""
        if event.WhichOneof("event") == "finished":
            self.finished[event.finished.group_id] = event.finished
            self.missing.pop(event.finished.group_id, None)
        elif event.WhichOneof("event") == "failed":
            self.failure = event.failed.error.message
            if event.failed.error.code not in _HOPELESS:
                return True
            self.failed[event.failed.group_id] = self.failure
            self.missing.pop(event.failed.group_id, None)
        return False


class EvaluationReport(Protocol):
    """Where results go."""

    def note(self, text: str) -> None: ...

    def evaluation(self, row: dict[str, Any]) -> None: ...

    def has_evaluation(self, when: str, dataset: str, step: int) -> bool: ...

    def last_score(self, dataset: str) -> float | None: ...


class EvaluationLane:
    """The evaluations of a run; at most one at a time.

    Training that comes to the next one before the last has ended leaves that one out.
    """

    def __init__(
        self, config: RunConfig, workers: EpisodeWorkers, report: EvaluationReport
    ) -> None:
        """Raises ConfigError for prompts that cannot be read."""
        self._config, self._workers, self._report = config, workers, report
        self._evaluation = config.evaluation
        datasets = {} if self._evaluation is None else self._evaluation.datasets
        self._sources: Mapping[str, PromptSource] = {
            name: load_prompts(data.prompts, config.seed) for name, data in datasets.items()
        }
        self._running: asyncio.Task[None] | None = None

    @property
    def is_beside(self) -> bool:
        """Whether training goes on meanwhile."""
        on = self._evaluation is not None and self._evaluation.beside_training
        return on and not self._config.deterministic

    @property
    def has_reached(self) -> bool:
        """Every data set with a `stop_at_score` got it, by its latest score."""
        if self._evaluation is None:
            return False
        wanted = {n: d.stop_at_score for n, d in self._evaluation.datasets.items()}
        limits = {name: limit for name, limit in wanted.items() if limit is not None}
        scores = {name: self._report.last_score(name) for name in limits}
        return bool(limits) and all(
            score is not None and score >= limits[name] for name, score in scores.items()
        )

    def is_due(self, step: int) -> bool:
        """Whether training stops by here for an evaluation."""
        every = 0 if self._evaluation is None else self._evaluation.every_steps
        return bool(every) and step > 0 and step % every == 0

    async def measure(self, when: str, step: int, version: int) -> None:
        """Score all data sets on one version; those reported before are left out.

        Raises EvaluationError.
        """
        await self.settle()
        if self._evaluation is not None:
            versions = engine_pb.VersionBounds(exact_version=version)
            await self._measure(self._evaluation, when, step, version, versions)

    def begin(self, step: int, version: int) -> None:
        """Score all data sets while training goes on, on this version or later ones."""
        assert self._evaluation is not None
        if self._running is not None and not self._running.done():
            self._report.note(f"step {step}: the last evaluation still runs; this one is left out")
            return
        versions = engine_pb.VersionBounds(min_version=version)
        work = self._measure(self._evaluation, "during", step, version, versions)
        self._running = asyncio.create_task(self._report_failure(work), name="evaluation")

    async def settle(self) -> None:
        """Wait for what runs beside training."""
        if self._running is not None:
            await self._running
            self._running = None

    async def close(self) -> None:
        """End what runs; also when training goes back to a cut, which undoes its weights."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def _report_failure(self, work: Any) -> None:
        try:
            await work
        except EvaluationError as error:  # training matters more
            self._report.note(f"evaluation failed: {error}")

    async def _measure(
        self,
        evaluation: EvaluationConfig,
        when: str,
        step: int,
        version: int,
        versions: engine_pb.VersionBounds,
    ) -> None:
        for name, data in evaluation.datasets.items():
            if self._report.has_evaluation(when, name, step):
                continue
            start = time.monotonic()
            scored = await self._score(name, data, step, versions)
            row = {
                "evaluation": when,
                "dataset": name,
                "step": step,
                "weight_version": version,
                **_row(scored),
                "samples_per_group": data.samples,
                "seconds": time.monotonic() - start,
            }
            self._report.evaluation(row)

    async def _score(
        self, name: str, data: EvaluationSetConfig, step: int, versions: engine_pb.VersionBounds
    ) -> pb.EvaluationReport:
        """Scores of the tasks that could be scored. Raises EvaluationError when none could."""
        source = self._sources[name]
        tasks = {f"eval-{step}-{name}-{i}": source.task(i) for i in range(data.groups)}
        progress, trial = _Progress(tasks), 0
        for attempt in range(ATTEMPTS):
            if attempt:
                logger.warning("evaluation of %s: %s", name, progress.failure)
                await asyncio.sleep(min(2.0, 0.1 * 2**attempt))
            shares = self._workers.split(list(progress.missing.items()))
            follow = [self._follow(data, share, versions, trial, progress) for share in shares]
            trial += any(await asyncio.gather(*follow))
            if not progress.missing:
                break
        failed_count = len(progress.failed) + len(progress.missing)
        if not progress.finished:
            raise EvaluationError(f"{name}: all {failed_count} tasks failed: {progress.failure}")
        return evaluation_report(
            list(progress.finished.values()),
            failed_count,
            pass_at=data.pass_at,
            threshold=data.pass_threshold,
        )

    async def _follow(
        self,
        data: EvaluationSetConfig,
        tasks: Sequence[tuple[str, Task]],
        versions: engine_pb.VersionBounds,
        trial: int,
        progress: _Progress,
    ) -> bool:
        """One call; whether it told of failures, so that asking again needs another trial."""
        request = build_evaluation(self._config, data, tasks, versions, trial)
        has_failures = False
        try:
            async for event in self._workers.evaluate(request):
                has_failures |= progress.take(event)
        except (WorkerLostError, NoWorkerError) as error:
            progress.failure = str(error)
        except RemoteError as error:  # the request is refused: it would be again
            progress.failure = str(error)
            for group_id, _ in tasks:
                progress.failed[group_id] = str(error)
                progress.missing.pop(group_id, None)
        return has_failures


def _row(scored: pb.EvaluationReport) -> dict[str, Any]:
    return {
        "score": scored.reward_mean,
        "score_std": scored.reward_std,
        "score_error": None if math.isnan(scored.reward_error) else scored.reward_error,
        **{f"pass@{k}": scored.pass_at[k] for k in sorted(scored.pass_at)},
        "response_length_mean": scored.response_length_mean,
        "truncated_share": scored.truncated_share,
        "groups": scored.group_count,
        "failed_groups": scored.failed_group_count,
        "version_min": scored.min_version,
        "version_max": scored.max_version,
    }


POOL = "policy"


class PrintedScores:
    """Rows as JSON lines on stdout, notes on stderr; nothing is written to the run."""

    def note(self, text: str) -> None:
        Console(stderr=True).print(text, highlight=False)

    def evaluation(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)

    def has_evaluation(self, when: str, dataset: str, step: int) -> bool:
        return False

    def last_score(self, dataset: str) -> float | None:
        return None


async def score_now(config: RunConfig, router: str) -> None:
    """Print the scores of every data set; no trainer is asked for anything.

    Raises ConfigError without data sets, NoEngineError without weights, EvaluationError.
    """
    if config.evaluation is None:
        raise ConfigError("evaluation: the file names no data sets")
    async with RouterClient(router, config.security) as client:
        workers = EpisodeWorkers(client, config.security, config.service_timeout_seconds)
        try:
            version = await _serving_version(client)
            lane = EvaluationLane(config, workers, PrintedScores())
            await lane.measure("now", 0, version)
        finally:
            await workers.close()


async def _serving_version(client: RouterClient) -> int:
    """The newest that an engine serves."""
    engines = await client.list_engines(router_pb.ROLE_ENGINE)
    versions = [
        engine.weights.version
        for engine in engines
        if engine.HasField("weights") and (engine.pool or POOL) == POOL
    ]
    if not versions:
        raise NoEngineError("no engine serves any weights")
    return max(versions)
