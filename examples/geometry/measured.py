"""Two or more turns: the picture is not to scale, and what it leaves out must be asked for.

An answer may ask for the length of a line (`AB`), for an angle in degrees (`ABC`, at B) or for a
calculation (`0.5*3*4`). What was measured comes back as a picture of a ruler or a protractor, what
was calculated as text. A number that nothing was measured for is a guess, and gets nothing.

    environment: {name: "examples.geometry.measured:MeasuredGeometry", settings: {difficulty: 2}}

and `episodes: {user_modules: [examples]}` in the configuration of the rollout workers. Difficulty 0
is for models of a few words: one side of a quadrilateral is red, an answer is `AB`, `BC`, `CD`,
`DA` or a digit and nothing else, and the ruler's picture comes without a text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field

from examples.geometry.figures import (
    INK,
    PAPER,
    SIDE,
    Point,
    angle,
    area,
    draw_points,
    length,
    outline,
    png,
)
from examples.geometry.numbers import (
    CalculationError,
    answered_number,
    calculate,
    is_right,
    read_number,
)
from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    Step,
    Task,
    TaskRequest,
    TextTokenizer,
    required_index,
)
from sluice.config import Config
from sluice.samples.messages import image_part

SIDES = ("AB", "BC", "CD", "DA")
TINY, LONGEST_SIDE = 32, 4  # pixels of a picture of difficulty 0, and units of its sides
MARK, DESK = (220, 40, 40), (128, 128, 128)  # what tells nothing is in the middle of the range
HOW = (
    "The drawing is not to scale. You may ask one thing at a time: <ask>AB</ask> for the length of "
    "AB, <ask>ABC</ask> for the angle at B in degrees, <ask>sqrt(2)*sin(30)</ask> for a "
    "calculation. End with <answer>number</answer>."
)
_ASK = re.compile(r"<ask>([^<]{0,200})</ask>")


@dataclass(frozen=True)
class Puzzle:
    """A drawing that is not to scale, and what can be measured of what it stands for."""

    picture: Image.Image
    question: str
    answer: float
    points: Mapping[str, Point]
    lengths: Mapping[str, float]  # of lines that are known by themselves, where there are no points

    def measure(self, names: str) -> float | None:
        """Return a length, or an angle in degrees; None for what is no line or angle of it."""
        if names in self.lengths:
            return self.lengths[names]
        if len(set(names)) != len(names) or not set(names) <= self.points.keys():
            return None
        places = [self.points[name] for name in names]
        if len(places) == 2:
            return length(places[0], places[1])
        return angle(places[0], places[1], places[2]) if len(places) == 3 else None


def make_puzzle(seed: int, index: int, difficulty: int) -> Puzzle:
    """Return the puzzle of an index.

    `difficulty` 0: the red side of a quadrilateral; 1: the way around a triangle, 2: its area;
    3: the area of a quadrilateral.
    """
    rng = np.random.default_rng((seed, index, difficulty))
    if difficulty == 0:
        return _red_side(rng)
    points = outline(rng, 3 if difficulty == 3 else 2)
    names, corners = "".join(points), list(points.values())
    if difficulty == 1:
        question = f"How long is the way around {names}?"
        answer = sum(length(a, b) for a, b in zip(corners, [*corners[1:], corners[0]], strict=True))
    else:
        question, answer = f"What is the area of {names}?", area(corners)
    squeezed = float(rng.choice([0.5, 0.6, 0.7]))  # of one of the axes
    across = bool(rng.integers(2))
    drawn = {
        name: (x * squeezed, y) if across else (x, y * squeezed) for name, (x, y) in points.items()
    }
    picture = draw_points(drawn, closed=True, squared=False)
    return Puzzle(picture, question, answer, points, {})


def draw_measure(names: str, value: float, *, blank: bool = False) -> Image.Image:
    """Return a ruler beside a line, or a protractor's opening; `blank`: paper alone."""
    picture = Image.new("RGB", (SIDE, SIDE // 2), PAPER)
    draw = ImageDraw.Draw(picture)
    if blank:
        return picture
    if len(names) == 2:
        left, unit = 12, (SIDE - 24) / 16
        draw.line((left, 40, left + value * unit, 40), fill=MARK, width=5)
        for mark in range(17):
            x = left + mark * unit
            draw.line((x, 50, x, 58 if mark % 5 else 64), fill=INK)
            if mark % 5 == 0:
                draw.text((x, 72), str(mark), fill=INK, anchor="mm")
    else:
        x, y, reach = SIDE // 2, SIDE // 2 - 24, 70
        draw.line((x, y, x + reach, y), fill=MARK, width=3)
        way = math.radians(value)
        draw.line((x, y, x + reach * math.cos(way), y - reach * math.sin(way)), fill=MARK, width=3)
    text = f"{names} = {value:.2f}" + ("" if len(names) == 2 else " degrees")
    draw.text((SIDE // 2, SIDE // 2 - 10), text, fill=INK, anchor="mm")
    return picture


class MeasuredGeometrySettings(Config):
    """`blank` hides what was measured, for the comparison. `tolerance` is a share of the answer."""

    size: int = Field(100_000, ge=1)
    seed: int = Field(0, ge=0)
    difficulty: int = Field(1, ge=0, le=3)
    max_turns: int = Field(6, ge=2, description="Answers; the last one may ask for nothing.")
    tolerance: float = Field(0.02, ge=0, lt=1)
    partial: float = Field(0.0, ge=0, lt=1, description="For a measured number, if it is wrong.")
    blank: bool = False


class MeasuredGeometry(Environment):
    """The reward is 1 for the right number after at least one measurement, else 0.

    With `partial` a wrong number that was measured gets that much, so that reading is learned
    before it is known what to measure; `raw_reward` is without. Scores: `turns`, `measured` (of
    what there is) and `refused` (asked for in vain).
    """

    name = "measured_geometry"
    settings_type = MeasuredGeometrySettings
    placement = Placement.PROCESS

    def __init__(
        self, settings: MeasuredGeometrySettings, tokenizer: TextTokenizer | None = None
    ) -> None:
        self._settings = settings

    @classmethod
    def place(cls, settings: MeasuredGeometrySettings) -> Placement:
        # a small picture is drawn in a fraction of a millisecond
        return Placement.INLINE if settings.difficulty == 0 else Placement.PROCESS

    @classmethod
    def check(cls, settings: MeasuredGeometrySettings, request: TaskRequest) -> None:
        required_index(request, settings.size)

    def make_task(self, request: TaskRequest) -> Task:
        index = required_index(request, self._settings.size)
        puzzle = make_puzzle(self._settings.seed, index, self._settings.difficulty)
        text = puzzle.question if self._is_tiny else f"{puzzle.question} {HOW}"
        content = [image_part(png(puzzle.picture)), {"type": "text", "text": text}]
        state = {"index": index, "measured": [], "refused": 0}
        return Task(
            messages=({"role": "user", "content": content},),
            answer=repr(puzzle.answer),
            state=state,
        )

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        asked = self._asked(response.text)
        if asked is None or len(response.turns) + 1 >= self._settings.max_turns:
            return Step(state=state, done=True)
        puzzle = make_puzzle(self._settings.seed, state["index"], self._settings.difficulty)
        value = puzzle.measure(asked)
        if value is not None:
            content = self._shown(asked, value)
            state = {**state, "measured": [*state["measured"], value]}
        else:
            text, refused = self._calculated(asked)
            content = [{"type": "text", "text": text}]
            state = {**state, "refused": state["refused"] + refused}
        return Step(messages=({"role": "user", "content": content},), state=state)

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        return [self._reward(float(task.answer), response) for response in responses]

    @property
    def _is_tiny(self) -> bool:
        return self._settings.difficulty == 0

    def _asked(self, text: str) -> str | None:
        """What an answer asks for; None if it is to be the last one."""
        if self._is_tiny:
            return text if text in SIDES else None
        asked = _ASK.findall(text)
        return asked[-1].strip() if asked and not text.rstrip().endswith("</answer>") else None

    def _shown(self, asked: str, value: float) -> list[dict[str, Any]]:
        blank = self._settings.blank
        if self._is_tiny:
            picture = _draw_bar(0 if blank else value)
            return [image_part(png(picture)), {"type": "text", "text": "="}]
        text = f"{asked} is hidden." if blank else f"{asked} = {value:.2f}"
        picture = draw_measure(asked, value, blank=blank)
        return [image_part(png(picture)), {"type": "text", "text": text}]

    def _calculated(self, asked: str) -> tuple[str, int]:
        """What is answered to what is no line or angle, and whether that is a refusal."""
        try:
            return f"{asked} = {calculate(asked):.6g}", 0
        except CalculationError as error:
            return f"error: {asked[:40]!r} is no line, no angle and no calculation: {error}", 1

    def _reward(self, answer: float, response: Response) -> Reward:
        read = read_number if self._is_tiny else answered_number
        measured, tolerance = response.state.get("measured", ()), self._settings.tolerance
        number = read(response.text)
        right = bool(measured) and is_right(number, answer, tolerance)
        near = any(is_right(number, value, tolerance) for value in measured)
        return Reward(
            reward=1.0 if right else self._settings.partial * near,
            raw_reward=float(right),
            scores={
                "turns": len(response.turns) + 1,
                "measured": len(measured),
                "refused": response.state.get("refused", 0),
            },
        )


def _red_side(rng: np.random.Generator) -> Puzzle:
    """A quadrilateral whose sides might be of any length, one of them red."""
    while True:
        sides = [int(side) for side in rng.integers(1, LONGEST_SIDE + 1, 4)]
        if 2 * max(sides) < sum(sides):  # it can be closed
            break
    red = int(rng.integers(4))
    picture = Image.new("RGB", (TINY, TINY), DESK)
    draw = ImageDraw.Draw(picture)
    near, far = 6, TINY - 7
    corners = [
        (x + int(rng.integers(-2, 3)), y + int(rng.integers(-2, 3)))
        for x, y in ((near, near), (far, near), (far, far), (near, far))
    ]
    lines = list(zip(corners, [*corners[1:], corners[0]], strict=True))
    for number, line in enumerate(lines):
        if number != red:
            draw.line(line, fill=INK, width=2)
    draw.line(lines[red], fill=MARK, width=5)
    lengths = {name: float(side) for name, side in zip(SIDES, sides, strict=True)}
    return Puzzle(picture, "?", float(sides[red]), {}, lengths)


def _draw_bar(value: float) -> Image.Image:
    """A red bar of 7 pixels a unit; none for 0."""
    picture = Image.new("RGB", (TINY, TINY), DESK)
    if value:
        ImageDraw.Draw(picture).rectangle((2, 4, 1 + 7 * int(value), 27), fill=MARK)
    return picture
