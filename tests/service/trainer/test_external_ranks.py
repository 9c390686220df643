"""Ranks that torch.distributed.run starts, as under Slurm: the trainer only takes them in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sluice.ports import reserve_port
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    Outcome,
    RunningTrainer,
    end,
    make_groups,
    running_trainer,
    train_step,
    until,
    upload,
)

SAMPLES = make_groups("external")


@contextmanager
def launched(config: Path, port: int) -> Iterator[psutil.Process]:
    """Two ranks and who starts them, again and again."""
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--max-restarts=100", "--monitor-interval=0.2", "--rdzv-backend=c10d"),
            *("--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("-m", "services.trainer.rank", "--config", str(config)),
            *("--controller", f"127.0.0.1:{port}"),
        ],
        env={
            **os.environ,
            **{"SLUICE_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        },
    )
    try:
        yield psutil.Process(launcher.pid)
    finally:
        launcher.terminate()
        try:
            launcher.wait(PATIENCE)
        finally:
            launcher.kill()
            launcher.wait()


async def step_once(trainer: RunningTrainer, restarts: int) -> Outcome:
    """One step of ranks that were started so often again, and not once more."""
    async with trainer.client() as client:
        await until(client, lambda now: (now.state, now.restart_count) == (ACTIVE, restarts))
        return await train_step(client, await upload(client, f"batch-{restarts}", SAMPLES))


@pytest.mark.long
async def test_ranks_of_a_launcher_train_and_come_back_after_one_was_killed(
    tmp_path: Path, model: Path
) -> None:
    ranks = {"count": 2, "heartbeat_seconds": 0.2}
    with running_trainer(tmp_path / "local", model, ranks=ranks) as trainer:
        wanted = await step_once(trainer, 0)

    held = reserve_port("127.0.0.1")
    port = int(held.getsockname()[1])
    ranks |= {"restart_backoff": 1.0, "launch": "external", "listen_port": port}
    root = tmp_path / "external"
    with (
        held,
        running_trainer(root, model, ranks=ranks, log_level="INFO") as trainer,
        launched(root / "trainer.yaml", port) as launcher,
    ):
        assert await step_once(trainer, 0) == wanted
        for restarts, killed in ((1, 1), (2, 0)):
            children = launcher.children()
            assert len(children) == 2
            end(children[killed].pid, signal.SIGKILL)
            assert await step_once(trainer, restarts) == wanted  # from the start: nothing was saved
            assert {each.pid for each in launcher.children()}.isdisjoint({c.pid for c in children})
