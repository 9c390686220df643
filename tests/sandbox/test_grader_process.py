"""The grader of programs in the process that an episode worker gives it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import psutil
import pytest

from services.rollout.config import GraderPoolConfig
from services.rollout.environments.environment import Response, Task
from services.rollout.environments.isolation import GraderPool
from services.rollout.environments.registry import ENVIRONMENTS


async def _rewards(pool: GraderPool, *programs: str, **values: Any) -> list[float]:
    values = {"seconds": 60.0, "group_seconds": 120.0} | values
    settings = {"reward": "code", "reward_settings": values}
    task = asdict(Task(prompt="double", answer="assert double(2) == 4"))
    responses = [asdict(Response(text=program)) for program in programs]
    found = await pool.call("reward", settings, task=task, responses=responses)
    return [reward["reward"] for reward in found]


@pytest.fixture
async def pool():
    pool = GraderPool("prompts", ENVIRONMENTS["prompts"], GraderPoolConfig(timeout_seconds=300))
    yield pool
    await pool.close()


async def test_hostile_programs_cost_their_own_reward_alone(pool: GraderPool) -> None:
    right = "def double(x): return 2 * x"
    bombs = ["import os\nwhile True: os.fork()", "b = [bytes(1 << 20) for _ in iter(int, 1)]"]
    kill = "import os\nfor n in range(1, 400):\n  try: os.kill(n, 9)\n  except OSError: pass"
    assert await _rewards(pool, right, *bombs, kill, right, cpu_seconds=2) == [1, 0, 0, 0, 1]
    assert await _rewards(pool, right) == [1]


async def test_a_group_that_is_given_up_leaves_no_program() -> None:
    config = GraderPoolConfig(timeout_seconds=1, start_seconds=5, attempts=1)
    pool = GraderPool("prompts", ENVIRONMENTS["prompts"], config)
    with pytest.raises(Exception, match="did not answer"):
        await _rewards(pool, "import time\ntime.sleep(3600)", seconds=3600, group_seconds=3600)
    await pool.close()
    jails = [one for one in psutil.process_iter() if "jail.py" in " ".join(_command(one))]
    assert not [one for one in jails if one.parent() is None or one.parent().pid == 1]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
