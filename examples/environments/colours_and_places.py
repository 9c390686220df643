"""A square of some colour somewhere in a noisy picture: which colour, or where?

The prompt is the picture and `c=` or `p=`; the answer is a digit, the number of the colour or of
the quarter. Every 32 tasks hold all there are, so who cannot see is right once in four.

    environment: {name: "examples.environments.colours_and_places:ColoursAndPlaces"}

and `episodes: {user_modules: [examples]}` in the configuration of the rollout workers.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from pydantic import Field

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

SIDE = 32  # pixels
COLOURS = np.array([(220, 40, 40), (40, 200, 60), (50, 80, 230), (230, 210, 50)], np.uint8)
GREY = 110  # the mean of the noise


class ColoursAndPlacesSettings(Config):
    """`blank` shows an empty picture instead, for the comparison."""

    size: int = Field(100_000, ge=1)
    seed: int = Field(0, ge=0)
    blank: bool = False


class ColoursAndPlaces(Environment):
    """The reward is 1 for the right digit and nothing else, else 0."""

    name = "colours_and_places"
    settings_type = ColoursAndPlacesSettings
    placement = Placement.INLINE

    def __init__(
        self, settings: ColoursAndPlacesSettings, tokenizer: TextTokenizer | None = None
    ) -> None:
        self._settings = settings

    @classmethod
    def check(cls, settings: ColoursAndPlacesSettings, request: TaskRequest) -> None:
        required_index(request, settings.size)

    def make_task(self, request: TaskRequest) -> Task:
        index = required_index(request, self._settings.size)
        rng = np.random.default_rng((self._settings.seed, index))
        place, colour = index % 4, index // 4 % 4
        asked, answer = [("c", colour), ("p", place)][index // 16 % 2]
        pixels = draw(rng, place, colour)
        if self._settings.blank:
            pixels = np.full_like(pixels, GREY)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        parts = [image_part(file.getvalue()), {"type": "text", "text": f"{asked}="}]
        return Task(messages=({"role": "user", "content": parts},), answer=str(answer))

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        return [Reward(reward=float(response.text == task.answer)) for response in responses]


def draw(rng: np.random.Generator, place: int, colour: int) -> np.ndarray:
    """A square of 8 to 12 pixels within a quarter of the picture: uint8[SIDE, SIDE, 3]."""
    pixels = rng.integers(GREY - 20, GREY + 20, (SIDE, SIDE, 3), dtype=np.uint8)
    half, side = SIDE // 2, int(rng.integers(8, 13))
    top, left = (int(rng.integers(1, half - side)) for _ in range(2))
    top, left = top + place // 2 * half, left + place % 2 * half
    pixels[top : top + side, left : left + side] = COLOURS[colour]
    return pixels
