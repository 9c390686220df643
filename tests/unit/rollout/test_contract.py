"""The contract holds for what ships, and catches what breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
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
from services.rollout.environments.registry import ENVIRONMENTS
from services.rollout.episodes.environment_contract import (
    ContractError,
    check_environment,
    check_generate,
    check_reward,
)
from services.rollout.episodes.episode import Episode
from services.rollout.episodes.trajectory import Trajectory
from sluice.config import Config
from sluice.loop.filters import GeneratedGroup, check_filter
from sluice.samples import tokenizer as samples_tokenizer

HERE = "tests.unit.rollout.test_contract"
ROW = TaskRequest(row={"prompt": "1+1=", "answer": "2"})


class Digits:
    end_token_id: int | None = 11

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(digit) for digit in text]


def test_what_ships_keeps_to_it() -> None:
    hidden = "examples.environments.hidden_digits:HiddenDigits"
    check_environment(hidden, {}, [TaskRequest(index=3)], tokenizer=Digits())
    tools = {"tools": {"add": "tests.unit.rollout.test_tools:add"}}
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    check_environment(ENVIRONMENTS["tools"], tools, [ROW], answers=[call])
    letter = TaskRequest(row={"prompt": "1+1=", "answer": "B"})
    for reward, row in (("exact_match", ROW), ("f1", ROW), ("choice", letter), ("math", ROW)):
        check_environment(ENVIRONMENTS["prompts"], {"reward": reward}, [row])
    check_reward("tests.unit.rollout.test_graders:longest", {"bonus": 2.0}, [Task(prompt="x")])


class Fickle(Environment):
    """Breaks what its settings say."""

    class Settings(Config):
        flaw: str = ""

    name = "fickle"
    settings_type = Settings
    placement = Placement.INLINE
    made = 0

    def __init__(self, settings: Any, tokenizer: TextTokenizer | None = None) -> None:
        self._flaw = settings.flaw

    @classmethod
    def check(cls, settings: Any, request: TaskRequest) -> None:
        pass

    def make_task(self, request: TaskRequest) -> Task:
        Fickle.made += self._flaw == "another task"
        state = {"set": {1}} if self._flaw == "no json" else {}
        prompt = "" if self._flaw == "no prompt" else f"{Fickle.made}="
        return Task(prompt=prompt, state=state)

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        if self._flaw == "endless":
            return Step(text="go on")
        if self._flaw == "silent":
            return Step()
        if self._flaw == "chatty":
            return Step(messages=({"role": "user", "content": "x"},))
        return Step(done=True)

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        value = float("nan") if self._flaw == "no number" else 1.0
        if self._flaw == "impatient":
            value = float(responses[0].text)
        rewards = [Reward(reward=value) for _ in responses]
        return rewards[:3] if self._flaw == "too few" else rewards


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("another task", "another task the second time"),
        ("no json", "the task holds more than JSON"),
        ("no prompt", "a prompt, or messages"),
        ("endless", "does not end"),
        ("silent", "observations are"),
        ("chatty", "observations are"),
        ("no number", "no finite number"),
        ("too few", "3 rewards for"),
    ],
)
def test_a_broken_environment_is_caught(flaw: str, message: str) -> None:
    check_environment(f"{HERE}:Fickle", {}, [TaskRequest(index=0)])
    with pytest.raises(ContractError, match=message):
        check_environment(f"{HERE}:Fickle", {"flaw": flaw}, [TaskRequest(index=0)])


def test_a_reward_that_cannot_read_every_answer_is_caught() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        check_environment(f"{HERE}:Fickle", {"flaw": "impatient"}, [TaskRequest(index=0)])


async def twice(episode: Episode) -> list[Trajectory]:
    trajectory = episode.begin()
    await episode.sample(trajectory)
    trajectory.add_observation([1, 2])
    await episode.sample(trajectory)
    return [trajectory]


async def lazy(episode: Episode) -> list[Trajectory]:
    return [episode.begin()]


async def stubborn(episode: Episode) -> list[Trajectory]:
    try:
        return await twice(episode)
    except asyncio.CancelledError:
        await asyncio.sleep(5)
        raise


def test_generate_functions(tmp_path: Path) -> None:
    made = samples_tokenizer.TextTokenizer(build_tiny_qwen3(tmp_path, 0))
    check_generate(f"{HERE}:twice", Task(prompt="1="), made)
    check_generate(f"{HERE}:twice", Task(prompt="1="), made, max_new_tokens=1)
    with pytest.raises(ContractError, match="never sampled"):
        check_generate(f"{HERE}:lazy", Task(prompt="1="), made)
    with pytest.raises(ContractError, match="does not end when it is cancelled"):
        check_generate(f"{HERE}:stubborn", Task(prompt="1="), made)
    with pytest.raises(ContractError, match="no coroutine"):
        check_generate(f"{HERE}:check_filter", Task(prompt="1="), made)


def good(group: GeneratedGroup, *, limit: float = 0.5) -> bool:
    return max(group.rewards) > limit


def sloppy(group: GeneratedGroup) -> Any:
    return max(group.rewards) > 0.5 or None


def test_filters() -> None:
    check_filter(f"{HERE}:good", {"limit": 0.1})
    check_filter("reward_std", {})
    with pytest.raises(AssertionError, match="sloppy answered None"):
        check_filter(f"{HERE}:sloppy", {})
    with pytest.raises(AssertionError, match="limt"):
        check_filter(f"{HERE}:good", {"limt": 0.1})
