"""A training run on services of its own, and what it cost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from sluice.driver import run_training
from sluice.durable import DirectoryError, owned
from sluice.loop.config import RunConfig
from sluice.loop.policy_run import PolicyRun
from sluice.loop.report import read_metrics
from sluice.stack import UpConfig
from sluice.supervise import Supervisor, supervised

MARK = ".demo"  # of a directory that a demo may empty


def empty_directory(run_dir: Path) -> Path:
    """`run_dir`, absolute and emptied of an earlier run of a demo.

    Raises DirectoryError for one that holds anything else, or whose services still run.
    """
    run_dir = run_dir.absolute()
    mark = run_dir / MARK
    if run_dir.exists() and not mark.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise DirectoryError(
            f"--run-dir: {run_dir} holds no run of a demo, or one of an earlier release, and would "
            "be emptied; remove it, or give another directory"
        )
    with owned(run_dir, "up"):
        for each in run_dir.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each != mark:  # whoever is killed here may begin anew
                each.unlink()
        mark.touch()
    return run_dir


@dataclass
class Cost:
    """Wall time of the whole, and processor time of all processes, of this one and what it ran too.

    `startup_cpu` is what went by before training began, `training_cpu` what it took to its end.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    startup_cpu: float = 0.0
    training_cpu: float = 0.0
    rewards: list[float] = field(default_factory=list)  # mean of each step
    scores: list[float] = field(default_factory=list)  # held-out, before ... after

    def describe(self) -> str:
        """The figures for a last line."""
        return (
            f"steps={len(self.rewards)} seconds={self.seconds:.0f} "
            f"cpu_seconds={self.cpu_seconds:.1f} startup_cpu={self.startup_cpu:.1f} "
            f"cpu_per_step={self.training_cpu / len(self.rewards):.3f}"
        )


async def measured_run(
    services: UpConfig,
    config: RunConfig,
    cost: Cost,
    before: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Bring services up, train, take them down; fills in `cost`. `before`: on them, first."""
    start = time.monotonic()
    supervisor = Supervisor(services)

    async def train(run: PolicyRun) -> None:
        cost.startup_cpu = supervisor.cpu_seconds()
        await run.train()
        cost.training_cpu = supervisor.cpu_seconds() - cost.startup_cpu

    async with supervised(supervisor):
        if before is not None:
            await before()
        await run_training(config, train)
    cost.cpu_seconds = supervisor.cpu_seconds()
    rows = read_metrics(Path(config.run_dir))
    cost.rewards = [row["reward_mean"] for row in rows if "reward_mean" in row]
    cost.scores = [row["score"] for row in rows if "score" in row]
    cost.seconds = time.monotonic() - start


def held_out_score(run_dir: Path, dataset: str, when: str = "after") -> float:
    """The score on a data set of the evaluation, `before` or `after` training."""
    rows = [row for row in read_metrics(run_dir) if row.get("dataset") == dataset]
    (score,) = (row["score"] for row in rows if row["evaluation"] == when)
    return float(score)
