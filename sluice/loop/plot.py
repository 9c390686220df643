"""reward.png: what a run has learned, over its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sluice.imports import uncollected

_LARGEST = 1e250  # what is beyond is drawn there: matplotlib reckons with squares


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
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    steps = _numbers(row["step"] for row in rows)
    alone = {"marker": "."} if len(rows) == 1 else {}
    figure = Figure(figsize=(7, 7))
    # a layout of matplotlib's own would draw it twice
    margins = {"left": 0.19, "right": 0.98, "bottom": 0.07, "top": 0.98, "hspace": 0.08}
    axes = figure.subplots(3, 1, sharex=True, gridspec_kw=margins)
    rewards = _numbers(row["reward_mean"] for row in rows)
    axes[0].plot(steps, rewards, color="0.75", linewidth=1, label="step", **alone)
    axes[0].plot(steps, smoothed(rewards, 3), color="C0", label="trend", **alone)
    for index, name in enumerate(dict.fromkeys(row["dataset"] for row in scores)):
        own = [row for row in scores if row["dataset"] == name]
        places, values = (_numbers(row[key] for row in own) for key in ("step", "score"))
        style = {"marker": "o", "linestyle": "--", "markersize": 4, "color": f"C{3 + index}"}
        axes[0].plot(places, values, label=f"{name} (held out)", **style)
    axes[0].set(ylabel="mean reward", ylim=_limits([0.0, 1.0, *rewards]))
    axes[0].legend(loc="lower right", frameon=False)
    lengths = _numbers(row["response_length_mean"] for row in rows)
    axes[1].plot(steps, lengths, color="C1", **alone)
    axes[1].set(ylabel="response length\n(tokens)", ylim=_limits([0.0, *lengths]))
    mismatch = _numbers(row.get("rollout_mismatch", math.nan) for row in rows)
    axes[2].plot(steps, mismatch, color="C2", **alone)
    axes[2].set(ylabel="|train - rollout|\nlog-prob", xlabel="step")
    axes[2].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if any(value > 0 for value in mismatch):
        axes[2].set(yscale="log")
        low, high = axes[2].get_ylim()
        few = MaxNLocator(5) if high < 20 * low else LogLocator(subs=(1, 2, 5), numticks=8)
        axes[2].yaxis.set_major_locator(few)
    axes[2].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes[2].yaxis.set_minor_locator(NullLocator())
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, pil_kwargs={"compress_level": 1})  # in half of the time
    return path


def _numbers(values: Iterable[float]) -> list[float]:
    """What is beyond the largest is drawn there; what is no number is a gap."""
    found = np.fromiter(map(float, values), np.float64)
    return np.where(np.isfinite(found), found.clip(-_LARGEST, _LARGEST), np.nan).tolist()


def _limits(values: Iterable[float]) -> tuple[float, float]:
    """Of all numbers among them, with a little room."""
    known = [value for value in values if math.isfinite(value)]
    return 1.05 * min(known), 1.05 * max(known) or 1.0
