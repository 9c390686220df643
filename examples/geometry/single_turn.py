"""One picture, one question, one number.

    environment: {name: "examples.geometry.single_turn:Geometry", settings: {difficulty: 1}}

and `episodes: {user_modules: [examples]}` in the configuration of the rollout workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from examples.geometry.figures import KINDS, Kind, draw_figure, png
from examples.geometry.numbers import answered_number, is_right
from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    Task,
    TaskRequest,
    TextTokenizer,
    required_index,
)
from sluice.config import Config
from sluice.samples.messages import image_part

HOW = "The squares of the paper have a side of 1. End with <answer>number</answer>."


class GeometrySettings(Config):
    """`tolerance` is a share of the answer."""

    size: int = Field(100_000, ge=1)
    seed: int = Field(0, ge=0)
    difficulty: int = Field(1, ge=1, le=3)
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1)
    tolerance: float = Field(0.02, ge=0, lt=1)


class Geometry(Environment):
    """The reward is 1 for the right number, else 0; `score/answered`: there was one."""

    name = "geometry"
    settings_type = GeometrySettings
    placement = Placement.PROCESS

    def __init__(self, settings: GeometrySettings, tokenizer: TextTokenizer | None = None) -> None:
        self._settings = settings

    @classmethod
    def check(cls, settings: GeometrySettings, request: TaskRequest) -> None:
        required_index(request, settings.size)

    def make_task(self, request: TaskRequest) -> Task:
        settings = self._settings
        index = required_index(request, settings.size)
        figure = draw_figure(settings.seed, index, settings.difficulty, settings.kinds)
        text = {"type": "text", "text": f"{figure.question} {HOW}"}
        content = [image_part(png(figure.picture)), text]
        return Task(messages=({"role": "user", "content": content},), answer=repr(figure.answer))

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        answer = float(task.answer)
        numbers = [answered_number(response.text) for response in responses]
        return [
            Reward(
                reward=float(is_right(number, answer, self._settings.tolerance)),
                scores={"answered": float(number is not None)},
            )
            for number in numbers
        ]
