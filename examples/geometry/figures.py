"""Draws figures of plane geometry with a question that one number answers.

The same for a seed and an index. Points are drawn as dots in colours of their own (`POINTS`), on
squared paper whose squares have a side of 1, so that a picture says all that its answer needs.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

Kind = Literal["length", "angle", "count", "area"]
KINDS: tuple[Kind, ...] = ("length", "angle", "count", "area")
Point = tuple[float, float]  # in squares, x to the right and y downwards
Colour = tuple[int, int, int]

SQUARES, SQUARE, MARGIN = 12, 18, 20  # of the paper; pixels of a square; pixels around it
SIDE = SQUARES * SQUARE + 2 * MARGIN  # pixels of a picture
POINTS: dict[str, Colour] = {
    "A": (200, 30, 30),
    "B": (30, 140, 40),
    "C": (40, 70, 210),
    "D": (200, 120, 0),
}
PAPER, LINES, INK, FILL = (255, 255, 255), (214, 222, 230), (40, 40, 40), (250, 225, 150)
SHAPES = ("squares", "circles", "triangles")


@dataclass(frozen=True)
class Figure:
    """A picture, what is asked about it and the answer; `points` by name, in squares."""

    kind: Kind
    picture: Image.Image
    question: str
    answer: float
    points: dict[str, Point]


def draw_figure(seed: int, index: int, difficulty: int, kinds: Sequence[Kind] = KINDS) -> Figure:
    """Return the figure of an index. `difficulty` is 1 (along the lines), 2 or 3."""
    rng = np.random.default_rng((seed, index, difficulty))
    kind = kinds[index % len(kinds)]
    if kind == "count":
        return _count(rng, difficulty)
    points = {"length": _path, "angle": _corner, "area": outline}[kind](rng, difficulty)
    names = "".join(points)
    if kind == "length":
        question = f"How long is {names[0]}{names[1]}?"
        if len(names) > 2:
            question = f"How long is the way from A to {names[-1]} along the line?"
        answer = sum(length(points[a], points[b]) for a, b in itertools.pairwise(names))
    elif kind == "angle":
        at = names.index("B")
        question = f"How many degrees has the angle {names[at - 1]}B{names[at + 1]}?"
        answer = angle(points[names[at - 1]], points["B"], points[names[at + 1]])
    else:
        question = f"How many squares of the paper does {names} cover?"
        answer = area(list(points.values()))
    closed = kind == "area" or (len(names) == 4 and kind == "angle")
    picture = draw_points(points, closed=closed, filled=kind == "area")
    return Figure(kind, picture, question, answer, points)


def length(a: Point, b: Point) -> float:
    """Return the distance of two points."""
    return math.hypot(b[0] - a[0], b[1] - a[1])


def angle(a: Point, b: Point, c: Point) -> float:
    """Return the angle at b between the directions to a and c, in degrees within 0..180."""
    one, two = (math.atan2(p[1] - b[1], p[0] - b[0]) for p in (a, c))
    turn = abs(math.degrees(one - two)) % 360
    return min(turn, 360 - turn)


def area(corners: Sequence[Point]) -> float:
    """Return the area of a polygon by the shoelace formula."""
    pairs = zip(corners, [*corners[1:], corners[0]], strict=True)
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in pairs)) / 2


def draw_points(
    points: dict[str, Point], *, closed: bool, filled: bool = False, squared: bool = True
) -> Image.Image:
    """Return the line through the points in their order, on squared paper or on plain."""
    picture, draw = _sheet(squared)
    places = [_pixel(point) for point in points.values()]
    if filled:
        draw.polygon(places, fill=FILL)
    draw.line([*places, *places[:1]] if closed else places, fill=INK, width=2)
    centre = [sum(axis) / len(places) for axis in zip(*places, strict=True)]
    for name, (x, y) in zip(points, places, strict=True):
        draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=POINTS[name])
        away = math.hypot(x - centre[0], y - centre[1]) or 1.0
        at = (x + 12 * (x - centre[0]) / away, y + 12 * (y - centre[1]) / away)
        draw.text(at, name, fill=INK, anchor="mm")
    return picture


def png(picture: Image.Image) -> bytes:
    """Return the file of a picture, the same for the same pixels."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _sheet(squared: bool) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (SIDE, SIDE), PAPER)
    draw = ImageDraw.Draw(picture)
    for line in range(SQUARES + 1) if squared else ():
        at = MARGIN + line * SQUARE
        draw.line((at, MARGIN, at, SIDE - MARGIN), fill=LINES)
        draw.line((MARGIN, at, SIDE - MARGIN, at), fill=LINES)
    return picture, draw


def _pixel(point: Point) -> Point:
    return (MARGIN + point[0] * SQUARE, MARGIN + point[1] * SQUARE)


def _crossing(rng: np.random.Generator) -> Point:
    """A crossing of lines, a square away from the rim."""
    x, y = (int(value) for value in rng.integers(1, SQUARES, 2))
    return (x, y)


def _path(rng: np.random.Generator, difficulty: int) -> dict[str, Point]:
    count = 2 if difficulty < 3 else 4
    while True:
        places = [_crossing(rng) for _ in range(count)]
        steps = list(itertools.pairwise(places))
        if difficulty == 1:
            (x, y), other = places[0], places[1]
            places[1] = (x, other[1]) if rng.integers(2) else (other[0], y)
            steps = [(places[0], places[1])]
        apart = all(length(a, b) >= 2 for a in places for b in places if a is not b)
        if apart and all(length(a, b) >= 2 for a, b in steps):
            return dict(zip("ABCD", places, strict=False))


def _corner(rng: np.random.Generator, difficulty: int) -> dict[str, Point]:
    if difficulty == 3:
        return outline(rng, 3)
    while True:
        a, b, c = (_crossing(rng) for _ in range(3))
        if min(length(a, b), length(b, c), length(a, c)) < 3 or angle(a, b, c) < 15:
            continue
        if difficulty == 1 and angle(a, b, c) % 45 > 1e-9:
            continue
        return {"A": a, "B": b, "C": c}


def outline(rng: np.random.Generator, difficulty: int) -> dict[str, Point]:
    """Return corners: a rectangle along the lines, a triangle, or a quadrilateral.

    By `difficulty`; no two sides cross, and no corner is flat.
    """
    while True:
        if difficulty == 1:
            (left, top), (right, bottom) = _crossing(rng), _crossing(rng)
            if right - left < 2 or bottom - top < 2:
                continue
            places = [(left, top), (right, top), (right, bottom), (left, bottom)]
            return dict(zip("ABCD", places, strict=True))
        places = [_crossing(rng) for _ in range(difficulty + 1)]
        middle = [sum(axis) / len(places) for axis in zip(*places, strict=True)]
        places.sort(key=lambda p: math.atan2(p[1] - middle[1], p[0] - middle[0]))
        ways = [math.atan2(p[1] - middle[1], p[0] - middle[0]) for p in places]
        turns = [b - a for a, b in zip(ways, [*ways[1:], ways[0] + 2 * math.pi], strict=True)]
        apart = min(length(a, b) for i, a in enumerate(places) for b in places[:i])
        if apart >= 3 and min(turns) > 0.3 and max(turns) < 2.8 and area(places) >= 6:
            return dict(zip("ABCD", places, strict=False))


def _count(rng: np.random.Generator, difficulty: int) -> Figure:
    """Shapes of one to three kinds, each in a place of its own, and how many one kind has."""
    kinds = [str(kind) for kind in rng.permutation(list(SHAPES))[:difficulty]]
    places = rng.permutation(16)[: int(rng.integers(difficulty, 4 * difficulty + 1))]
    picture, draw = _sheet(squared=False)
    drawn = [*kinds, *(kinds[int(i)] for i in rng.integers(0, len(kinds), 16))][: len(places)]
    cell = (SIDE - 2 * MARGIN) // 4
    for kind, place in zip(drawn, places, strict=True):
        half = int(rng.integers(12, 21)) if difficulty > 1 else 18
        x, y = (MARGIN + int(way) * cell + cell // 2 for way in (place % 4, place // 4))
        box = (x - half, y - half, x + half, y + half)
        if kind == "squares":
            draw.rectangle(box, fill=INK)
        elif kind == "circles":
            draw.ellipse(box, fill=INK)
        else:
            draw.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill=INK)
    asked = kinds[0]
    return Figure("count", picture, f"How many {asked} are there?", float(drawn.count(asked)), {})
