"""reward.png: what a run has learned, over its steps.

It is made of matplotlib's lines and texts alone. Of an axis of its own most are ticks, each of
five parts, and those were two thirds of the time that the picture takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice.imports import uncollected

LEFT, WIDTH = 0.19, 0.79  # of panels, in parts of the figure
BOTTOMS, HEIGHT = (0.685, 0.3775, 0.07), 0.29
MARK = 0.007  # how far ticks stand out
_POWERS = 250.0  # of 10: numbers beyond are drawn there
_LARGEST = 10**_POWERS


@dataclass(frozen=True)
class Curve:
    steps: Sequence[int]
    values: Sequence[float] | np.ndarray
    style: dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """From `low` to `high`, which are different; of a logarithmic one these are powers of 10."""

    low: float
    high: float
    is_log: bool = False

    def places(self, values: Iterable[float]) -> np.ndarray:
        """0 at `low`, 1 at `high`; what is beyond lies at the edge. NaN of what is no number."""
        found = np.fromiter(values, np.float64)
        found = np.where(np.isfinite(found), found, np.nan)
        if self.is_log:
            found = np.log10(np.maximum(found, 10.0**self.low))
        return np.clip((found - self.low) / (self.high - self.low), 0.0, 1.0)

    def ticks(self, most: int, least: float = 0.0) -> list[float]:
        """At most so many round values, not closer than `least`."""
        low, high = self.low, self.high
        if self.is_log and high - low < math.log10(20):
            low, high = 10.0**low, 10.0**high
        elif self.is_log:
            powers = range(math.floor(low), math.ceil(high) + 1)
            found = [part * 10.0**power for power in powers for part in (1, 2, 5)]
            found = [value for value in found if low <= math.log10(value) <= high]
            if len(found) <= most:
                return found
            return [10.0**power for power in Scale(low, high).ticks(most, 1.0)]
        step = _round_up(max((high - low) / most, least))
        return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_up(step: float) -> float:
    """To 1, 2 or 5 times a power of 10."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= step * (1 - 1e-9))


def scale_of_steps(steps: Iterable[int]) -> Scale:
    """Of all, with a little at both sides."""
    known = [float(min(step, _LARGEST)) for step in steps]
    first, last = min(known), max(known)
    margin = 0.05 * (last - first) or max(0.5, 1e-9 * last)
    return Scale(first - margin, last + margin)


def scale_of(values: Iterable[float]) -> Scale:
    """Of all numbers among them and 0, with a little above."""
    known = [min(max(value, -_LARGEST), _LARGEST) for value in values if math.isfinite(value)]
    low, high = min((0.0, *known)), max((0.0, *known))
    if high - low < 1 / _LARGEST:
        high = 1.0
    return Scale(low * 1.05, high * 1.05)


def log_scale_of(values: Iterable[float]) -> Scale | None:
    """Of those above 0; None where there is none."""
    found = [math.log10(value) for value in values if 0 < value < math.inf]
    known = [min(max(power, -_POWERS), _POWERS) for power in found]
    if not known:
        return None
    margin = max(0.05 * (max(known) - min(known)), 0.02)
    return Scale(min(known) - margin, max(known) + margin, is_log=True)


def smoothed(values: Sequence[float], width: float) -> np.ndarray:
    """Local linear regression under a Gaussian of `width` steps: a trend neither lags nor bends.

    Values of both sides weigh alike, and at the ends the line through those of one side counts.
    NaN and infinity weigh nothing; NaN comes out where nothing weighs. Fan and Gijbels, Local
    Polynomial Modelling (1996), eq. 3.5.
    """
    y = np.asarray(values, dtype=np.float64)
    if not width or not len(y):
        return y
    reach = max(1, math.ceil(4 * width))
    offsets = np.arange(-reach, reach + 1, dtype=np.float64)
    kernel = np.exp(-0.5 * (offsets / width) ** 2)
    here = np.isfinite(y)
    known = np.where(here, y, 0.0)

    def around(what: np.ndarray, power: int) -> np.ndarray:
        # convolution turns the kernel round, so that the sign of odd powers does too
        weights = kernel * (-offsets) ** power
        return np.convolve(what, weights)[reach : reach + len(y)]

    s0, s1, s2 = (around(here.astype(np.float64), power) for power in range(3))
    t0, t1 = (around(known, power) for power in range(2))
    spread = s0 * s2 - s1**2
    with np.errstate(divide="ignore", invalid="ignore"):
        line = np.where(spread > 1e-9 * s0 * s2, (s2 * t0 - s1 * t1) / spread, t0 / s0)
    return np.where(s0 > 1e-6, line, np.nan)


def draw(rows: list[dict[str, Any]], path: Path, scores: list[dict[str, Any]]) -> Path:
    """Three panels that share the step axis; scores on held-out tasks are in the first."""
    with uncollected():
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 7))
    steps = [row["step"] for row in rows]
    along = scale_of_steps([*steps, *(row["step"] for row in scores)])
    rewards = [float(row["reward_mean"]) for row in rows]
    curves = [
        Curve(steps, rewards, {"label": "step", "color": "0.75", "linewidth": 1}),
        Curve(steps, smoothed(rewards, 3), {"label": "trend", "color": "C0"}),
    ]
    for index, name in enumerate(dict.fromkeys(row["dataset"] for row in scores)):
        own = [row for row in scores if row["dataset"] == name]
        dashed = {"label": f"{name} (held out)", "marker": "o", "linestyle": "--", "markersize": 4}
        style = {**dashed, "color": f"C{3 + index}"}
        curves.append(Curve([row["step"] for row in own], [row["score"] for row in own], style))
    scale = scale_of([1.0, *(value for curve in curves for value in curve.values)])
    _panel(figure, 0, "mean reward", along, scale, curves)
    lengths = [row["response_length_mean"] for row in rows]
    curve = Curve(steps, lengths, {"color": "C1"})
    _panel(figure, 1, "response length\n(tokens)", along, scale_of(lengths), [curve])
    mismatch = [row.get("rollout_mismatch", math.nan) for row in rows]
    curve = Curve(steps, mismatch, {"color": "C2"})
    scale = log_scale_of(mismatch) or scale_of(mismatch)
    _panel(figure, 2, "|train - rollout|\nlog-prob", along, scale, [curve])
    for step in along.ticks(8, least=1):
        place = LEFT + WIDTH * along.places([step])[0]
        figure.text(place, BOTTOMS[-1] - 2 * MARK, f"{step:.0f}", ha="center", va="top")
    figure.text(LEFT + WIDTH / 2, 0.008, "step", ha="center", va="bottom")
    figure.savefig(path, dpi=120, pil_kwargs={"compress_level": 1})  # in half of the time
    return path


def _panel(
    figure: Any, index: int, title: str, along: Scale, scale: Scale, curves: list[Curve]
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    bottom, right = BOTTOMS[index], LEFT + WIDTH
    top = bottom + HEIGHT
    grid, frame = [], [[(LEFT, top), (LEFT, bottom), (right, bottom)]]
    for step in LEFT + WIDTH * along.places(along.ticks(8, least=1)):
        grid.append([(step, bottom), (step, top)])
        frame.append([(step, bottom - MARK), (step, bottom)])
    ticks = scale.ticks(7)
    for tick, place in zip(ticks, bottom + HEIGHT * scale.places(ticks), strict=True):
        grid.append([(LEFT, place), (right, place)])
        frame.append([(LEFT - MARK, place), (LEFT, place)])
        figure.text(LEFT - 2 * MARK, place, f"{tick:.6g}", ha="right", va="center_baseline")
    figure.text(
        0.07, bottom + HEIGHT / 2, title, ha="center", va="center", ma="center", rotation=90
    )
    shared = {"transform": figure.transFigure, "linewidths": 0.8, "snap": True}
    figure.add_artist(LineCollection(grid, colors="0.69", alpha=0.3, **shared))
    lines = []
    for curve in curves:
        x = LEFT + WIDTH * along.places(curve.steps)
        y = bottom + HEIGHT * scale.places(curve.values)
        alone = {"marker": "."} if len(x) == 1 else {}
        lines.append(figure.add_artist(Line2D(x, y, **{**alone, **curve.style})))
    figure.add_artist(LineCollection(frame, colors="black", **shared))
    if len(lines) > 1:
        figure.legend(
            handles=lines,
            loc="lower right",
            bbox_to_anchor=(right, bottom),
            frameon=False,
        )
