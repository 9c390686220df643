"""Two turns, of which the second cannot be solved without the observation between them.

Every task has the same prompt. After the first answer, whatever it is, the environment shows
digits that depend on the task's index alone; the second answer is to repeat them.

    environment: {name: "examples.environments.hidden_digits:HiddenDigits"}

and `episodes: {user_modules: [examples]}` in the configuration of the rollout workers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    SettingError,
    Step,
    Task,
    TaskRequest,
    TextTokenizer,
    required_index,
)
from sluice.config import Config

PROMPT = "="


class HiddenDigitsSettings(Config):
    """`blank` shows zeros instead, for the comparison: what is hidden stays hidden."""

    digits: int = Field(2, ge=1)
    size: int = Field(100_000, ge=1)
    seed: int = 0
    blank: bool = False


class HiddenDigits(Environment):
    """The reward is the share of tokens, end of sequence included, that stand at their place."""

    name = "hidden_digits"
    settings_type = HiddenDigitsSettings
    placement = Placement.INLINE

    def __init__(
        self, settings: HiddenDigitsSettings, tokenizer: TextTokenizer | None = None
    ) -> None:
        if tokenizer is None or tokenizer.end_token_id is None:
            raise SettingError("", "needs a tokenizer with an end-of-sequence token")
        self._settings, self._tokenizer = settings, tokenizer
        self._end = tokenizer.end_token_id

    @classmethod
    def check(cls, settings: HiddenDigitsSettings, request: TaskRequest) -> None:
        required_index(request, settings.size)

    def make_task(self, request: TaskRequest) -> Task:
        index = required_index(request, self._settings.size)
        rng = random.Random(f"{self._settings.seed}/{index}")
        digits = "".join(rng.choice("0123456789") for _ in range(self._settings.digits))
        return Task(prompt=PROMPT, answer=digits)

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        if response.turns:
            return Step(done=True)
        shown = "0" * len(task.answer) if self._settings.blank else task.answer
        return Step(text=f"{shown}=")

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        target = [*self._tokenizer.encode(task.answer, special=False), self._end]
        return [self._reward(response, target) for response in responses]

    def _reward(self, response: Response, target: Sequence[int]) -> Reward:
        if not response.turns:  # it never let the environment speak
            return Reward(reward=0.0, raw_reward=0.0)
        right = sum(map(int.__eq__, response.token_ids, target))
        whole = right == len(target) == len(response.token_ids)
        return Reward(reward=right / len(target), raw_reward=float(whole))
