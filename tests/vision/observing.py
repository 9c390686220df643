"""An environment that answers the first turn with what its row holds, and a tool of pictures."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from services.rollout.environments.tools import ToolsEnvironment
from sluice.config import Config

PATH = "tests.vision.observing:ObservingEnvironment"


class ObservingSettings(Config):
    """None."""


class ObservingEnvironment(Environment):
    name = "observing"
    settings_type = ObservingSettings
    placement = Placement.INLINE

    def __init__(self, settings: ObservingSettings, tokenizer: TextTokenizer | None = None) -> None:
        pass

    @classmethod
    def check(cls, settings: Any, request: TaskRequest) -> None:
        pass

    def make_task(self, request: TaskRequest) -> Task:
        assert request.row is not None
        messages = ({"role": "user", "content": "LOOK"},)
        return Task(messages=messages, state={"shown": request.row["shown"]})

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        if response.turns:
            return Step(done=True)
        shown = task.state["shown"]
        if isinstance(shown, str):  # as a tool gives the bytes of a file
            shown = [{"type": "image", "image": {"bytes": shown}}]
        return Step(messages=({"role": "user", "content": shown},), state=state)

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        return [Reward(reward=float(len(response.turns))) for response in responses]


class CallingEnvironment(ToolsEnvironment):
    """Takes the first answer for the call that the row holds, which a random policy never makes."""

    name = "calling"

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        if not response.turns:
            response = replace(response, text=task.state["call"])
        return super().step(task, state, response)


CALLING_PATH = "tests.vision.observing:CallingEnvironment"


def picture(data: str) -> Any:
    """Give the bytes that a row holds, as base64."""
    return base64.b64decode(data)


def length(task: Task, responses: Sequence[Response]) -> list[float]:
    """Reward long answers and odd tokens, so that groups differ within."""
    return [float(sum(response.token_ids) % 7) for response in responses]
