"""Checks for tests of environments, rewards and generate functions: what each must keep to.

    from services.rollout.episodes.environment_contract import check_environment, check_reward

    def test_mine():
        check_environment("my_project.games:Chess", {"level": 2}, [TaskRequest(index=0)])

Each check raises ContractError, an AssertionError, that says what is wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from services.rollout.engine.interface import Delta, FinishReason, Sampling
from services.rollout.engine.wire import VersionBounds
from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    Step,
    Task,
    TaskRequest,
    TextTokenizer,
    Turn,
    answer_of,
)
from services.rollout.environments.graders.grader import create_grader
from services.rollout.environments.registry import create_environment, load, parse_settings
from services.rollout.environments.runner import has_steps
from services.rollout.episodes.episode import Episode
from services.rollout.episodes.sampler import SamplingPrompt
from sluice.samples.sample import validate_sample

ODD_ANSWERS = (
    "",
    " ",
    "0",
    "\n\n",
    "no",
    "ä漢😀",
    "\\boxed{",
    "<answer>",
    "<tool_call>{",
    "9" * 5000,
)
MAX_STEPS = 100


class ContractError(AssertionError):
    """Something does not keep to the contract."""


def check_environment(
    path: str,
    settings: Mapping[str, Any],
    requests: Sequence[TaskRequest],
    *,
    answers: Sequence[str] = (),
    tokenizer: TextTokenizer | None = None,
) -> None:
    """Checks that an environment makes the same JSON tasks again, ends, and rewards any answer.

    `answers` are tried besides ODD_ANSWERS.
    """
    found = load(path)
    _require(isinstance(found, type) and issubclass(found, Environment), f"{path}: no Environment")
    json.dumps(found.settings_type.model_json_schema())
    parsed = parse_settings(found, settings)
    if found.place(parsed) is Placement.PROCESS:
        tokenizer = None
    environment = create_environment(path, settings, tokenizer)
    for request in requests:
        found.check(parsed, request)
        task = answer_of(environment.make_task(request))
        _check_task(task)
        again = answer_of(create_environment(path, settings, tokenizer).make_task(request))
        _require(again == task, f"make_task({request}) gives another task the second time")
        texts = (*ODD_ANSWERS, *answers)
        responses = [_play(environment, task, text) for text in texts]
        _check_rewards(answer_of(environment.reward(task, responses)), len(responses))
        _check_rewards(answer_of(environment.reward(task, responses[:1])), 1)


def check_reward(
    path: str, settings: Mapping[str, Any], tasks: Sequence[Task], *, answers: Sequence[str] = ()
) -> None:
    """Checks that a reward function gives one number or `Reward` per response, for any text."""
    grader = create_grader(path, settings)
    for task in tasks:
        responses = [Response(text=text, finish_reason="stop") for text in (*ODD_ANSWERS, *answers)]
        for some in (responses, responses[:1]):
            _check_rewards(answer_of(grader.grade(task, some)), len(some))


def check_generate(
    path: str, task: Task, tokenizer: Any, *, max_new_tokens: int = 32, answer: str = "0"
) -> None:
    """Checks that a generate function gives trajectories that are valid rows within the budget.

    `tokenizer` is a TextTokenizer; every sampled answer is `answer`. Cancelling ends it at once.
    """
    function = load(path)
    _require(inspect.iscoroutinefunction(function), f"{path} is no coroutine function")
    asyncio.run(_generate(function, task, tokenizer, max_new_tokens, answer))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ContractError(message)


def _check_task(task: Any) -> None:
    _require(isinstance(task, Task), f"make_task gave {type(task).__name__}, no Task")
    _require(bool(task.prompt) != bool(task.messages), "a task has a prompt, or messages")
    _require_json(asdict(task), "the task")


def _require_json(values: Any, what: str) -> None:
    try:
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ContractError(f"{what} holds more than JSON values: {error}") from None
    plain = json.loads(json.dumps(values, default=list))
    _require(json.loads(text) == plain, f"{what} changes when it is written as JSON")


def _play(environment: Environment, task: Task, text: str) -> Response:
    """Plays the episode of a model that always answers the same."""
    response = Response(text=text, finish_reason="stop", state=task.state)
    if not has_steps(type(environment)):
        return response
    for _ in range(MAX_STEPS):
        step = answer_of(environment.step(task, response.state, response))
        _require(isinstance(step, Step), f"step gave {type(step).__name__}, no Step")
        _require_json(asdict(step), "the step")
        response = replace(response, state=step.state)
        if step.done:
            return response
        _require(
            bool(step.messages) == bool(task.messages) and bool(step.messages) != bool(step.text),
            "observations are messages for a chat, text for a plain prompt",
        )
        turns = (*response.turns, Turn(text=text, observation=step.text or "..."))
        response = replace(response, turns=turns)
    raise ContractError(f"an episode does not end in {MAX_STEPS} steps")


def _check_rewards(rewards: Any, count: int) -> None:
    _require(isinstance(rewards, Sequence), "rewards must be a list")
    _require(len(rewards) == count, f"{len(rewards)} rewards for {count} responses")
    for reward in rewards:
        _require(isinstance(reward, Reward), f"{reward!r} is no Reward")
        numbers = (reward.reward, reward.raw_reward or 0.0, *reward.scores.values())
        _require(all(map(math.isfinite, numbers)), f"{reward} holds what is no finite number")


async def _generate(
    function: Any, task: Task, tokenizer: Any, max_new_tokens: int, answer: str
) -> None:
    # Imported here: environments know nothing of episodes otherwise.

    ids = (
        tokenizer.encode_chat(task.messages, task.tools, task.template)
        if task.messages
        else tokenizer.encode(task.prompt, special=True)
    )
    prompt = SamplingPrompt(
        group_id="g",
        token_ids=tuple(ids),
        sample_count=1,
        sampling=Sampling(max_new_tokens=max_new_tokens, seeds=(1,)),
        bounds=VersionBounds(),
        pool="",
    )
    sampler = _ScriptedSampler(tuple(tokenizer.encode(answer, special=False)))
    trajectories = await function(Episode(0, task, prompt, sampler, tokenizer))  # type: ignore[arg-type]
    _require(bool(trajectories), "a generate function gives at least one trajectory")
    for index, trajectory in enumerate(trajectories):
        _require(bool(trajectory.answers), f"trajectory {index} was never sampled")
        _require(
            trajectory.sampled_count <= max_new_tokens, f"trajectory {index} is beyond its budget"
        )
        reward = trajectory.reward or Reward(reward=0.0)
        validate_sample(trajectory.to_sample("g", index, reward, 0))
    sampler.stalls = True
    running = asyncio.create_task(function(Episode(0, task, prompt, sampler, tokenizer)))  # type: ignore[arg-type]
    await asyncio.wait([running], timeout=0.1)
    running.cancel()
    _, pending = await asyncio.wait([running], timeout=1.0)
    _require(not pending, "it does not end when it is cancelled")


class _ScriptedSampler:
    """Always answers the same, or never."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids, self.stalls = token_ids, False

    async def sample(self, prompt: Any) -> list[Delta]:
        if self.stalls:
            await asyncio.Event().wait()
        ids = self._token_ids[: prompt.sampling.max_new_tokens]
        is_cut = len(ids) < len(self._token_ids)
        return [
            Delta(
                index=0,
                token_ids=ids,
                logprobs=(-1.0,) * len(ids),
                logprobs_t1=(-1.0,) * len(ids),
                spans=(),
                finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            )
        ]
