"""The grader of programs in the process that an episode worker gives it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import psutil
import pytest

from services.rollout.config import GraderPoolConfig
from services.rollout.environments.environment import Response, Task
from services.rollout.environments.isolation import GraderPool
from services.rollout.environments.registry import ENVIRONMENTS
from tests.patience import PATIENCE

pytestmark = pytest.mark.isolation


async def _rewards(pool: GraderPool, *programs: str, **values: Any) -> list[float]:
    values = {"seconds": PATIENCE, "group_seconds": 6 * PATIENCE} | values
    settings = {"reward": "code", "reward_settings": values}
    task = asdict(Task(prompt="double", answer="assert double(2) == 4"))
    responses = [asdict(Response(text=program)) for program in programs]
    found = await pool.call("reward", settings, task=task, responses=responses)
    return [reward["reward"] for reward in found]


@pytest.fixture
async def pool():
    config = GraderPoolConfig(timeout_seconds=PATIENCE, start_seconds=PATIENCE)
    pool = GraderPool("prompts", ENVIRONMENTS["prompts"], config)
    yield pool
    await pool.close()


async def test_hostile_programs_cost_their_own_reward_alone(pool: GraderPool) -> None:
    right = "def double(x): return 2 * x"
    bombs = ["import os\nwhile True: os.fork()", "b = [bytes(1 << 20) for _ in iter(int, 1)]"]
    kill = "import os\nfor n in range(1, 400):\n  try: os.kill(n, 9)\n  except OSError: pass"
    assert await _rewards(pool, right, *bombs, kill, right, cpu_seconds=2) == [1, 0, 0, 0, 1]
    assert await _rewards(pool, right) == [1]


async def test_a_group_that_is_given_up_leaves_no_program(pool: GraderPool) -> None:
    sleeps = "import time\ntime.sleep(3600)"
    before = set(_family())
    call = asyncio.create_task(_rewards(pool, sleeps, seconds=3600, group_seconds=3600))
    async with asyncio.timeout(PATIENCE):
        while not (programs := [one for one in _family() if "ask.py" in _command(one)]):
            await asyncio.sleep(0.05)
        family = [one for one in _family() if one not in before]
        assert programs[0] in family and len(family) >= 5  # two of the worker, three of the sandbox
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await pool.close()
        while any(_runs(one) for one in family):
            await asyncio.sleep(0.05)


def _family() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _runs(process: psutil.Process) -> bool:
    """A zombie does not: nobody reaps an orphan where the first process is no init."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
