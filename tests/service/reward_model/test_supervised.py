"""`sluice up` keeps a reward model while groups are scored by it: killed, stopped, and too slow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.rollout.environments.environment import Response, SettingError, Task
from services.rollout.environments.graders.grader import create_grader
from services.rollout.environments.graders.remote import RewardServiceTimeoutError
from services.rollout.environments.prompts import PromptsEnvironment, PromptsSettings
from services.rollout.environments.registry import Allowed
from sluice.config import parse_config
from sluice.runtime.addresses import read_entries
from sluice.stack import UpConfig
from sluice.supervise import Supervisor
from tests.patience import PATIENCE
from tests.service.reward_model.conftest import oracle_of, random_texts

GROUPS = 30


@contextlib.asynccontextmanager
async def kept(model: Path, run_dir: Path, **liveness: Any) -> AsyncIterator[Supervisor]:
    """A reward model that is started again when it ends."""
    service = {"kind": "reward_model", "config": {"model": str(model), "name": "rm", "threads": 1}}
    config = {
        "run_dir": str(run_dir),
        "services": {"scores": service},
        "start_timeout_seconds": PATIENCE,
        "liveness": liveness,
    }
    supervisor = Supervisor(parse_config(UpConfig, config))
    await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    try:
        yield supervisor
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await supervisor.stop()


def grader(supervisor: Supervisor, **values: Any) -> Any:
    settings = {
        "model": "rm",
        "url": f"{supervisor.services_file}#scores",
        "deadline_seconds": PATIENCE,
        "attempt_seconds": PATIENCE,
        "longest_backoff_seconds": 0.5,
    }
    return create_grader("reward_model", settings | values)


async def rewards(asking: Any, texts: list[str]) -> list[float]:
    found = await asking.grade(Task(prompt="1="), [Response(text=text) for text in texts])
    return [reward.reward for reward in found]


def pid_of(supervisor: Supervisor) -> int:
    return int(read_entries(supervisor.services_file)["scores"]["pid"])


async def test_groups_miss_no_reward_when_it_is_killed_or_stopped(
    qwen3: Path, tmp_path: Path
) -> None:
    """The supervisor ends the one that is stopped, which answers no health check."""
    oracle = oracle_of(qwen3)
    liveness = {"interval_seconds": 0.5, "timeout_seconds": 3.0, "failures": 2}
    async with kept(qwen3, tmp_path, **liveness) as supervisor:
        asking = grader(supervisor)
        pids = list[int]()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            groups = [random_texts(seed, 4, longest=50) for seed in range(GROUPS)]
            started = [asyncio.create_task(rewards(asking, texts)) for texts in groups]
            await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
            pids.append(pid_of(supervisor))
            os.kill(pids[-1], number)
            late = [asyncio.create_task(rewards(asking, texts)) for texts in groups]
            for texts, scored in zip(
                groups * 2, await asyncio.gather(*started, *late), strict=True
            ):
                alone = oracle.scores([f"1={text}" for text in texts])
                assert scored == pytest.approx(alone, abs=1e-5)
        assert (
            len({*pids, pid_of(supervisor)}) == 3
        )  # another process each time, at the same address


async def test_one_that_is_stopped_is_an_error_by_name_at_the_deadline(
    qwen3: Path, tmp_path: Path
) -> None:
    async with kept(qwen3, tmp_path, failures=0) as supervisor:
        os.kill(pid_of(supervisor), signal.SIGSTOP)
        try:
            short = grader(supervisor, deadline_seconds=0.5, attempt_seconds=0.2)
            with pytest.raises(RewardServiceTimeoutError, match=r"no rewards in 0\.5 s") as raised:
                await rewards(short, ["2"])
            assert raised.value.reason == "REWARD_SERVICE_TIMED_OUT"
        finally:
            os.kill(pid_of(supervisor), signal.SIGCONT)
        assert await rewards(grader(supervisor), ["2"]) == pytest.approx(
            oracle_of(qwen3).scores(["1=2"]), abs=1e-5
        )
        away = grader(supervisor, url=f"{supervisor.services_file}#nobody", deadline_seconds=0.3)
        with pytest.raises(RewardServiceTimeoutError, match="has no nobody with a classify_url"):
            await rewards(away, ["2"])


@pytest.mark.parametrize(
    "url",
    ["{}/other.json#scores", "{}/../x/services.json#scores", "services.json#scores", "a\0#b",
     "x" * 4000 + "#b"],
)  # fmt: skip
def test_services_are_those_of_the_workers_own_stack(tmp_path: Path, url: str) -> None:
    allowed = Allowed(services=tmp_path / "services.json")

    def check(url: str) -> None:
        settings = PromptsSettings(reward="reward_model", reward_settings={"url": url})
        allowed.check(PromptsEnvironment, settings)

    check(f"{tmp_path}/services.json#scores")
    with pytest.raises(SettingError, match=r"services\.json: /") as raised:
        check(url.format(tmp_path))
    assert raised.value.key == "reward_settings.url" and len(str(raised.value)) < 1000


@pytest.mark.parametrize("url", ["#a", "a#", "a", "ftp://a#b", "file:///etc/passwd#b", ""])
def test_an_address_is_http_or_a_service(url: str) -> None:
    for name in ("reward_model", "judge", "remote"):
        model = {} if name == "remote" else {"model": "m"}
        with pytest.raises(SettingError) as raised:
            create_grader(name, {**model, "url": url})
        assert raised.value.key == "reward_settings.url"


def test_a_service_for_rewards_of_another_kind_has_no_address_there() -> None:
    with pytest.raises(SettingError, match="give an address"):
        create_grader("remote", {"url": "services.json#scores"})


def test_tokenizers_are_below_what_the_worker_allows(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "models" / "out").symlink_to(tmp_path / "other")
    (tmp_path / "models" / "loop").symlink_to(tmp_path / "models" / "loop")

    def check(path: str, *roots: Path) -> None:
        settings = PromptsSettings(reward="reward_model", reward_settings={"tokenizer": path})
        Allowed(roots=roots).check(PromptsEnvironment, settings)

    models = tmp_path / "models"
    check(str(models / "mine"), tmp_path / "nothing", models)
    check("")
    for path in ("other", "models/../other", "models/out", "models/loop/x", "models\0", "m" * 5000):
        with pytest.raises(SettingError) as raised:
            check(str(tmp_path / path), models)
        assert raised.value.key == "reward_settings.tokenizer" and len(str(raised.value)) < 1000
    with pytest.raises(SettingError, match=r"\(episodes\.tokenizer_roots\): none"):
        check(str(models / "mine"))
