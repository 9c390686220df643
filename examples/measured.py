"""A training run on services of its own, and what it cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from sluice.cli import run_training, supervised
from sluice.loop.config import RunConfig
from sluice.loop.report import read_metrics
from sluice.loop.run import Run
from sluice.supervise import Supervisor, UpConfig


@dataclass
class Cost:
    """Wall time of the whole, and processor time of all processes to the end of training."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    rewards: list[float] = field(default_factory=list)  # mean of each step
    scores: list[float] = field(default_factory=list)  # held-out, before ... after


async def measured_run(services: UpConfig, config: RunConfig, cost: Cost) -> None:
    """Bring services up, train, take them down; fills in `cost`."""
    start = time.monotonic()
    supervisor = Supervisor(services)

    async def measure(_: Run) -> None:
        cost.cpu_seconds = supervisor.cpu_seconds()

    async with supervised(supervisor):
        await run_training(config, on_end=measure)
    rows = read_metrics(Path(config.run_dir))
    cost.rewards = [row["reward_mean"] for row in rows if "reward_mean" in row]
    cost.scores = [row["score"] for row in rows if "score" in row]
    cost.seconds = time.monotonic() - start
