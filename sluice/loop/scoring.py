"""`sluice eval`: the data sets of a run, on the weights that engines serve now."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import RouterClient
from sluice.config import ConfigError
from sluice.loop.config import RunConfig
from sluice.loop.evaluation import EvaluationLane
from sluice.loop.fleet import NoEngineError
from sluice.loop.workers import EpisodeWorkers

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
