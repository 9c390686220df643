"""Scores on held-out data sets, through the same episode workers, beside training or not."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RemoteError, RouterClient
from sluice.config import ConfigError
from sluice.logs import printable_lines
from sluice.loop.config import EvaluationConfig, EvaluationSetConfig, RunConfig
from sluice.loop.fleet import POOL, NoEngineError
from sluice.loop.prompts import PromptSource, Task, load_prompts
from sluice.loop.report import RunReport
from sluice.loop.workers import (
    EpisodeWorkers,
    NoWorkerError,
    RolloutCall,
    RolloutFailedError,
    build_evaluation,
    cut_into_calls,
)
from sluice.runtime.wire import evaluation_report

logger = logging.getLogger(__name__)


class EvaluationError(Exception):
    """A data set could not be scored; the message says why."""


@dataclass(frozen=True)
class _HeldOutTask:
    group_id: str
    task: Task
    attempts: int = 1


@dataclass
class _Outcomes:
    """What became of the tasks of one data set, tried `attempts` times: CallEvents of its calls."""

    attempts: int
    finished_groups: list[pb.FinishedGroup] = field(default_factory=list)
    failed_count: int = 0
    failure: str = ""  # the last one

    async def wait_for_version(self, version: int) -> None:
        """Returns at once: scores may be of any version that the request allows."""

    def finished(self, group: _HeldOutTask, finished: pb.FinishedGroup) -> None:
        self.finished_groups.append(finished)

    def hopeless(self, group: _HeldOutTask, why: str) -> None:
        self.failed_count, self.failure = self.failed_count + 1, why

    def failed(self, group: _HeldOutTask, why: str) -> _HeldOutTask | None:
        if group.attempts < self.attempts:
            return replace(group, attempts=group.attempts + 1)
        self.hopeless(group, why)
        return None

    async def see_through(self, call: RolloutCall[_HeldOutTask]) -> None:
        """Follows a call to its end; counts what it still owes when it can not go on as failed."""
        try:
            await call.see_through()
        except (RemoteError, RolloutFailedError, NoWorkerError) as error:
            for group in call.waiting.values():
                self.hopeless(group, str(error))


class PrintedScores:
    """Prints rows as JSON lines on stdout, notes on stderr; nothing is written to the run.

    Without a step: engines tell the version that they serve, and not of which step it is.
    """

    def note(self, text: str) -> None:
        Console(stderr=True).print(printable_lines(text), highlight=False, markup=False)

    def evaluation(self, row: dict[str, Any]) -> None:
        print(json.dumps({key: row[key] for key in row if key != "step"}), flush=True)

    def has_evaluation(self, when: str, dataset: str, step: int) -> bool:
        return False

    def last_score(self, dataset: str) -> float | None:
        return None


def open_dataset(config: RunConfig, name: str) -> PromptSource:
    """Opens the tasks of a data set. Raises ConfigError for prompts that cannot be read."""
    assert config.evaluation is not None, "it has data sets"
    data, where = config.evaluation.datasets[name], f"evaluation.datasets.{name}.prompts"
    return load_prompts(data.prompts, config.seed, config.environment_of(data), where)


class EvaluationLane:
    """The evaluations of a run; at most one at a time.

    Training that comes to the next one before the last has ended leaves that one out.
    """

    def __init__(
        self,
        config: RunConfig,
        workers: EpisodeWorkers,
        report: RunReport | PrintedScores,
        attempt: str = "",
    ) -> None:
        """Raises ConfigError for prompts that cannot be read.

        attempt: with another one workers run again what they have done for the same requests.
        """
        self._config, self._workers, self._report = config, workers, report
        self._attempt = attempt
        self._evaluation = config.evaluation
        datasets = {} if self._evaluation is None else self._evaluation.datasets
        self._sources = {name: open_dataset(config, name) for name in datasets}
        self._running: asyncio.Task[None] | None = None

    @property
    def is_beside(self) -> bool:
        """Whether training goes on meanwhile."""
        on = self._evaluation is not None and self._evaluation.beside_training
        return on and not (self._config.deterministic or self._config.placement == "colocated")

    @property
    def is_before_training(self) -> bool:
        return self._evaluation is not None and self._evaluation.before_training

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

    async def measure_now(self, version: int) -> None:
        """Score all data sets on this version, or later ones where a run goes on meanwhile.

        Raises EvaluationError.
        """
        if self._evaluation is not None:
            versions = engine_pb.VersionBounds(min_version=version)
            await self._measure(self._evaluation, "now", 0, version, versions)

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
        """Ends what runs; also when training goes back, which undoes its weights."""
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
        failures: list[str] = []
        for name, data in evaluation.datasets.items():
            if self._report.has_evaluation(when, name, step):
                continue
            start = time.monotonic()
            try:
                scored = await self._score(name, data, step, versions)
            except EvaluationError as error:  # the other data sets have scores all the same
                failures.append(str(error))
                continue
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
        if failures:
            raise EvaluationError("; ".join(failures))

    async def _score(
        self, name: str, data: EvaluationSetConfig, step: int, versions: engine_pb.VersionBounds
    ) -> pb.EvaluationReport:
        """Scores the tasks that can be. Raises EvaluationError where none could."""
        config, source = self._config, self._sources[name]
        outcomes = _Outcomes(config.group_attempts)

        def request(groups: Sequence[_HeldOutTask], trial: int) -> pb.EvaluateRequest:
            tasks = [(group.group_id, group.task) for group in groups]
            return build_evaluation(config, data, tasks, versions, f"{self._attempt}{trial}")

        count = min(data.groups, source.count)  # or some would be scored twice, others once
        tasks = [_HeldOutTask(f"eval-{step}-{name}-{i}", source.task(i)) for i in range(count)]

        async def see_through(share: Sequence[_HeldOutTask]) -> None:
            # in turn: each has the whole limit
            for groups, first in cut_into_calls(share, request):
                waiting = {group.group_id: group for group in groups}
                seconds = config.service_timeout_seconds
                await outcomes.see_through(
                    RolloutCall(self._workers, request, outcomes, waiting, seconds, first=first)
                )

        await asyncio.gather(*map(see_through, self._workers.split(tasks)))
        failed_count = outcomes.failed_count
        if not outcomes.finished_groups:
            raise EvaluationError(f"{name}: all {failed_count} tasks failed: {outcomes.failure}")
        return evaluation_report(
            outcomes.finished_groups,
            failed_count,
            pass_at=data.pass_at,
            threshold=data.pass_threshold,
        )


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


async def score_now(config: RunConfig, router: str) -> None:
    """Print the scores of every data set; no trainer is asked for anything.

    Raises ConfigError without data sets, NoEngineError without weights, EvaluationError.
    """
    if config.evaluation is None:
        raise ConfigError(
            "evaluation.datasets: the file names none to score; examples/run.yaml has one"
        )
    async with RouterClient(router, config.security) as client:
        seconds = config.service_timeout_seconds
        workers = EpisodeWorkers(client, config.security, seconds, ends_calls=True)
        try:
            version = await _serving_version(client)
            # rewards may have been changed since somebody asked for the same
            lane = EvaluationLane(config, workers, PrintedScores(), attempt=f"{uuid.uuid4()}/")
            await lane.measure_now(version)
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
