"""The picture of a run: its curves at their places, whatever numbers it is given."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sluice.loop.plot import draw, smoothed


def pixels(path: Path, colour: tuple[int, int, int]) -> np.ndarray:
    """Row and column of each that has it, [:, 2]."""
    with Image.open(path) as image:
        return np.argwhere((np.asarray(image.convert("RGB")) == colour).all(-1))


def test_curves_are_where_their_numbers_say(tmp_path: Path) -> None:
    """Lengths go up from 100 to 400 and down to 200: a bend at a quarter of the steps."""
    lengths = [100 + 300 * i / 25 if i < 25 else 400 - 200 * (i - 25) / 75 for i in range(101)]
    rows = [{"step": i, "reward_mean": 0.0, "response_length_mean": lengths[i]} for i in range(101)]
    draw(rows, tmp_path / "reward.png", [])
    orange = pixels(tmp_path / "reward.png", (255, 127, 14))
    left, right = orange[:, 1].min(), orange[:, 1].max()

    def height(share: float) -> float:
        column = round(left + share * (right - left))
        return float(orange[abs(orange[:, 1] - column) <= 1, 0].mean())

    bottom, top = height(0.01), height(0.25)
    for share in (0.13, 0.5, 0.75, 0.99):
        expected = np.interp(share, [0.01, 0.25, 0.99], [112, 400, 202.7])
        found = 112 + (400 - 112) * (height(share) - bottom) / (top - bottom)
        assert found == pytest.approx(expected, abs=6), share


def test_rewards_below_0_and_a_lone_step_are_seen(tmp_path: Path) -> None:
    row = {"step": 7, "reward_mean": -3.0, "response_length_mean": 4.0}
    for rows in ([row, {**row, "step": 8}], [row]):
        draw(rows, tmp_path / "reward.png", [])
        trend = pixels(tmp_path / "reward.png", (31, 119, 180))
        assert (trend[:, 1] < 600).any()  # beside the legend


@pytest.mark.parametrize("number", [0, -1.0, 5e-324, 1e-200, math.nan, math.inf, 1.7e308, 10**308])
def test_no_number_is_too_much(tmp_path: Path, number: float) -> None:
    keys = ("reward_mean", "response_length_mean", "rollout_mismatch")
    rows = [{"step": i, **dict.fromkeys(keys, value)} for i, value in enumerate((0.5, number))]
    scores = [{"step": 0, "score": number, "dataset": "held_out"}]
    draw(rows, tmp_path / "reward.png", scores)
    if isinstance(number, int):
        draw([{**rows[0], "step": number}], tmp_path / "reward.png", scores)
    with Image.open(tmp_path / "reward.png") as image:
        assert image.size == (840, 840)


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60),
    st.floats(0.5, 8),
    st.sets(st.integers(0, 59), max_size=10),
)
def test_smoothing_is_the_weighted_fit_of_a_line(values, width, missing) -> None:
    """The oracle solves the least squares of every place by itself, in numpy."""
    data = np.array(values)
    data[[m for m in missing if m < len(data)]] = np.nan
    found = smoothed(data, width)
    for place in range(len(data)):
        offsets = np.arange(len(data)) - place
        near = np.isfinite(data) & (abs(offsets) <= math.ceil(4 * width))
        if np.exp(-0.5 * (offsets[near] / width) ** 2).sum() < 0.01:
            continue
        weights = np.sqrt(np.exp(-0.5 * (offsets[near] / width) ** 2))
        if near.sum() == 1:
            expected = data[near][0]
        else:
            lines = np.stack([np.ones(near.sum()), offsets[near]], 1) * weights[:, None]
            if np.linalg.cond(lines) > 1e4:
                continue
            expected = np.linalg.lstsq(lines, data[near] * weights, rcond=None)[0][0]
        assert found[place] == pytest.approx(expected, abs=1e-4)


def test_smoothing_does_not_lag() -> None:
    rising = 0.5 * np.arange(100.0) - 7
    assert smoothed(rising, 5) == pytest.approx(rising)
    bump = np.exp(-0.5 * ((np.arange(101) - 50) / 10) ** 2)
    assert int(np.argmax(smoothed(bump, 5))) == 50
