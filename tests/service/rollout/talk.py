"""An environment that answers every turn with another digit, until the tokens run out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    Step,
    Task,
    TaskError,
    TaskRequest,
    TextTokenizer,
)
from sluice.config import Config

PATH = "tests.service.rollout.talk:TalkEnvironment"
HEARING = "tests.service.rollout.talk:HearingEnvironment"
STALLING = "tests.service.rollout.talk:StallingEnvironment"
STRICT = "tests.service.rollout.talk:StrictEnvironment"


class TalkSettings(Config):
    """None."""


class TalkEnvironment(Environment):
    name = "talk"
    settings_type = TalkSettings
    placement = Placement.INLINE

    def __init__(self, settings: TalkSettings, tokenizer: TextTokenizer | None = None) -> None:
        pass

    @classmethod
    def check(cls, settings: Any, request: TaskRequest) -> None:
        pass

    def make_task(self, request: TaskRequest) -> Task:
        assert request.row is not None
        return Task(prompt=str(request.row["prompt"]))

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        return Step(text="7=", state=state)

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        return [Reward(reward=float(len(response.turns))) for response in responses]


class HearingEnvironment(TalkEnvironment):
    """Counts the turns that a stop string of its own ended."""

    name = "hearing"
    stops = ("7", "34", "=5")

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        heard = []
        for response in responses:
            texts = [turn.text for turn in response.turns]
            heard.append(sum(text.endswith(self.stops) for text in (*texts, response.text)))
        return [Reward(reward=float(n), scores={"heard": float(n)}) for n in heard]


class StallingEnvironment(TalkEnvironment):
    """In a process of its own, whose first step does not end."""

    name = "stalling"
    placement = Placement.PROCESS

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        threading.Event().wait(600)
        return Step(done=True)


class StrictEnvironment(TalkEnvironment):
    """Refuses every task, and prints as much as its row says."""

    @classmethod
    def check(cls, settings: Any, request: TaskRequest) -> None:
        print("x" * int((request.row or {}).get("print", 0)))
        raise TaskError("row.prompt", "is refused by now")
