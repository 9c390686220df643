"""Code of users that raises, blocks, or answers nonsense: typed errors, and nobody else waits."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    Step,
    Task,
    TaskRequest,
    TextTokenizer,
)
from services.rollout.episodes.episode import Episode
from services.rollout.episodes.trajectory import Trajectory
from sluice.client import RemoteError, error_from_status
from sluice.config import Config
from tests.patience import PATIENCE
from tests.service.rollout import import_gate
from tests.service.rollout.harness import (
    Episodes,
    Models,
    Store,
    copy_rows,
    rollout_request,
    running_episodes,
)

HERE = "tests.service.rollout.test_user_code"
ALLOWED = {"user_modules": ("tests.service",)}
LONGEST_BLOCK = 2 * PATIENCE  # what would wait for a blocked function is found out by PATIENCE
BROKEN = "module_with_a_syntax_error"

_unblocked = threading.Event()


@pytest.fixture
def unblocked() -> Iterator[threading.Event]:
    """Lets what blocks go on."""
    _unblocked.clear()
    yield _unblocked
    _unblocked.set()


async def one(episode: Episode) -> list[Trajectory]:
    trajectory = episode.begin()
    await episode.sample(trajectory)
    return [trajectory]


async def blocking(episode: Episode) -> list[Trajectory]:
    _unblocked.wait(LONGEST_BLOCK)
    return await one(episode)


async def stubborn(episode: Episode) -> list[Trajectory]:
    """Does not let itself be cancelled."""
    while not _unblocked.is_set():
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue
    return []


async def nothing(episode: Episode) -> list[Trajectory]:
    return []


async def unsampled(episode: Episode) -> list[Trajectory]:
    return [episode.begin()]


async def bare(episode: Episode) -> Any:
    return (await one(episode))[0]


async def several(episode: Episode) -> list[Trajectory]:
    """Would have several answers to one prompt, and has them one behind the other."""
    trajectory = episode.begin()
    await asyncio.gather(*(episode.sample(trajectory, 2) for _ in range(3)))
    return [trajectory]


async def broken(episode: Episode) -> list[Trajectory]:
    raise ZeroDivisionError("no mercy")


async def impatient(episode: Episode) -> list[Trajectory]:
    raise TimeoutError("a tool of its own")


async def leaving(episode: Episode) -> list[Trajectory]:
    sys.exit(3)


async def interrupting(episode: Episode) -> list[Trajectory]:
    raise KeyboardInterrupt("of a library")


async def wordy(episode: Episode) -> list[Trajectory]:
    (trajectory,) = await one(episode)
    trajectory.reward = Reward(reward="a lot")  # type: ignore[arg-type]
    return [trajectory]


class OddSettings(Config):
    flaw: str


class Odd(Environment):
    """In the worker itself, with one flaw."""

    name = "odd"
    settings_type = OddSettings
    placement = Placement.INLINE

    def __init__(self, settings: OddSettings, tokenizer: TextTokenizer | None = None) -> None:
        self._flaw = settings.flaw
        if self._flaw == "settings":
            raise ValueError("two of them")

    @classmethod
    def check(cls, settings: Any, request: TaskRequest) -> None:
        if settings.flaw == "check":
            raise KeyError("row")

    def make_task(self, request: TaskRequest) -> Task:
        if self._flaw == "task":
            raise KeyError("prompt")
        if self._flaw == "two prompts":
            return Task(prompt="1=", messages=({"role": "user", "content": "2="},))
        return Task(prompt="1=") if self._flaw != "no task" else {"prompt": "1="}  # type: ignore

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        if self._flaw == "step":
            raise TimeoutError("its game server")
        if self._flaw == "no step":
            return "7="  # type: ignore[return-value]
        return Step() if self._flaw == "silent" else Step(done=True)

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        rewards: dict[str, Any] = {
            "text": [Reward(reward="1")] * len(responses),  # type: ignore[arg-type]
            "none": None,
            "short": [Reward(reward=1.0)],
            "nan": [float("nan")] * len(responses),
            "name": [Reward(reward=1.0, scores={"/" * 5000: 1.0})] * len(responses),
        }
        if self._flaw == "exit":
            sys.exit(3)
        return rewards[self._flaw]


class Counting(Odd):
    """Counts turns in the very task and state that it is given: two of them, or fewer."""

    def make_task(self, request: TaskRequest) -> Task:
        return Task(prompt="1=", state={"turns": 0})

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        for counts in (task.state, state):
            counts["turns"] += 1  # type: ignore[index]
        return Step(text="7=", state=state, done=state["turns"] == 2)

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        return [Reward(reward=float(r.state["turns"]) + task.state["turns"]) for r in responses]


async def counting(episode: Episode) -> list[Trajectory]:
    (trajectory,) = await one(episode)
    episode.task.state["asked"] = episode.task.state.get("asked", 0) + 1  # type: ignore[index]
    trajectory.reward = Reward(reward=float(episode.task.state["asked"]))
    return [trajectory]


async def failures(episodes: Episodes, request: Any) -> dict[str, tuple[str, str]]:
    """Reason and message by group; all must fail."""
    async with asyncio.timeout(PATIENCE):
        failed = await episodes.failed(request)
    errors = {name: error_from_status(group.error) for name, group in failed.items()}
    return {name: (error.reason, str(error)) for name, error in errors.items()}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "sampled nothing"),
        ("unsampled", "sampled nothing"),
        ("bare", "no list of trajectories"),
        ("several", "added to while it was sampled from"),
        ("broken", "ZeroDivisionError: no mercy"),
        ("impatient", "TimeoutError: a tool of its own"),
        ("leaving", "SystemExit: 3"),
        ("interrupting", "KeyboardInterrupt: of a library"),
        ("wordy", "rewards[0].reward is 'a lot' (str), not a number"),
    ],
)
async def test_a_generate_function_that_fails_fails_its_groups(
    store: Store, models: Models, function: str, message: str
) -> None:
    """All of them: the rollout ends with errors, it does not hang."""
    async with running_episodes(store, models.first, **ALLOWED) as episodes:
        request = rollout_request(copy_rows(3), settings={"generate": f"{HERE}:{function}"})
        failed = await failures(episodes, request)
    assert failed.keys() == {"g0", "g1", "g2"}
    for reason, text in failed.values():
        assert reason == "ENVIRONMENT_FAILED" and message in text


@pytest.mark.parametrize(
    ("flaw", "reason", "message"),
    [
        ("task", "ENVIRONMENT_FAILED", "KeyError: 'prompt'"),
        ("no task", "ENVIRONMENT_FAILED", "gave dict, no Task"),
        ("two prompts", "INVALID_FIELD", "prompt: stands beside messages"),
        ("step", "ENVIRONMENT_FAILED", "TimeoutError: its game server"),
        ("no step", "ENVIRONMENT_FAILED", "gave str, no Step"),
        ("silent", "INVALID_FIELD", "never empty"),
        ("text", "ENVIRONMENT_FAILED", "rewards[0].reward is '1' (str), not a number"),
        ("none", "ENVIRONMENT_FAILED", "gave NoneType"),
        ("short", "ENVIRONMENT_FAILED", "1 rewards for 4 responses"),
        ("nan", "ENVIRONMENT_FAILED", "rewards[0] is nan (float), not a finite number"),
        ("name", "ENVIRONMENT_FAILED", "///' (str): names have 1 to 64 ASCII letters"),
        ("exit", "ENVIRONMENT_FAILED", "SystemExit: 3"),
    ],
)
async def test_an_environment_in_the_worker_fails_its_groups_by_name(
    store: Store, models: Models, flaw: str, reason: str, message: str
) -> None:
    async with running_episodes(store, models.first, **ALLOWED) as episodes:
        request = rollout_request(
            [{"prompt": "1="}] * 2,
            environment=f"{HERE}:Odd",
            settings={"flaw": flaw},
            max_new_tokens=50,
        )
        failed = await failures(episodes, request)
        assert len(await episodes.finished(rollout_request(copy_rows(1)))) == 1
    for found, text in failed.values():
        assert found == reason and message in text


async def test_what_an_episode_changes_in_place_is_no_other_episode_s(
    store: Store, models: Models
) -> None:
    """In the worker itself all episodes of a group begin with one task."""
    async with running_episodes(store, models.first, **ALLOWED) as episodes:
        counted = await episodes.finished(
            rollout_request(
                copy_rows(1),
                environment=f"{HERE}:Counting",
                settings={"flaw": ""},
                sample_count=16,
                max_new_tokens=50,
            )
        )
        settings = {"generate": f"{HERE}:counting"}
        asked = await episodes.finished(rollout_request(copy_rows(1), settings=settings))
    turns = [sample.columns["reward"] for sample in store.samples(counted["g0"])]
    assert max(turns) == 2 and turns.count(2.0) > 1
    assert [sample.columns["reward"] for sample in store.samples(asked["g0"])] == [1.0] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"generate": f"{BROKEN}:one"}}, "SyntaxError: "),
        ({"environment": f"{BROKEN}:Odd"}, "SyntaxError: "),
        ({"environment": f"{HERE}:Odd", "settings": {"flaw": "settings"}}, "ValueError: two of"),
        ({"environment": f"{HERE}:Odd", "settings": {"flaw": "check"}}, "KeyError: 'row'"),
    ],
)
async def test_code_that_breaks_before_anything_runs_is_named(
    store: Store,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / f"{BROKEN}.py").write_text("def one(episode:\n    pass pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with running_episodes(
        store, models.first, user_modules=("tests.service", BROKEN)
    ) as episodes:
        with pytest.raises(RemoteError, match=message) as caught:
            await episodes.finished(rollout_request(copy_rows(1), **changes))
    assert caught.value.reason == "ENVIRONMENT_FAILED"


async def test_a_generate_function_that_blocks_holds_up_itself_alone(
    store: Store,
    models: Models,
    unblocked: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with running_episodes(store, models.first, **ALLOWED) as episodes:
        request = rollout_request(copy_rows(2), settings={"generate": f"{HERE}:blocking"})
        stream = episodes.client.stub.Rollout(request)
        async with asyncio.timeout(PATIENCE):
            while not [w for w in await episodes.client.list_waits() if "generate" in w.what]:
                await asyncio.sleep(0.02)
            other = {"generate": f"{HERE}:one"}
            assert len(await episodes.finished(rollout_request(copy_rows(2), settings=other))) == 2
            assert len(await episodes.finished(rollout_request(copy_rows(2)))) == 2
            while not any(is_of_blocking(record.getMessage()) for record in caplog.records):
                await asyncio.sleep(0.05)
            assert await episodes.client.cancel(request.request_id) == ["g0", "g1"]
            assert (await stream.read()).failed.group_id == "g0"
        unblocked.set()
        assert len(await episodes.finished(rollout_request(copy_rows(1), settings=other))) == 1


def is_of_blocking(message: str) -> bool:
    return f"{HERE}:blocking blocks" in message and "in wait" in message


async def test_a_module_that_imports_slowly_holds_up_nobody_else(
    store: Store, models: Models
) -> None:
    async with running_episodes(store, models.first, **ALLOWED) as episodes:
        settings = {"generate": "tests.service.rollout.slow_import:one"}
        request = rollout_request(copy_rows(1), settings=settings)
        call = asyncio.create_task(episodes.finished(request))
        async with asyncio.timeout(PATIENCE):
            while not import_gate.begun.is_set():
                await asyncio.sleep(0.01)
            await episodes.client.list_waits()
            assert not call.done()
            import_gate.may_end.set()
            assert len(await call) == 1


async def test_a_function_that_will_not_be_cancelled_keeps_no_worker_from_stopping(
    store: Store, models: Models, unblocked: threading.Event
) -> None:
    """It goes on until the test has ended; the worker stops before."""
    async with (
        asyncio.timeout(PATIENCE),
        running_episodes(store, models.first, **ALLOWED) as episodes,
    ):
        request = rollout_request(copy_rows(1), settings={"generate": f"{HERE}:stubborn"})
        stream = episodes.client.stub.Rollout(request)
        while not [w for w in await episodes.client.list_waits() if "generate" in w.what]:
            await asyncio.sleep(0.02)
        stream.cancel()
