"""The picture of a run: its curves at their places, whatever numbers it is given."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sluice.loop.plot import draw, log_scale_of, scale_of, scale_of_steps, smoothed

ANY = st.floats(allow_subnormal=True)


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


@given(st.lists(ANY, max_size=5), st.integers(1, 9))
def test_ticks_are_few_and_round(values: list[float], most: int) -> None:
    for scale in (scale_of(values), log_scale_of(values)):
        if scale is not None:
            ticks = scale.ticks(most)
            assert len(ticks) <= most + 1
            places = scale.places(ticks)
            assert (np.diff(places) > 0).all()
            assert all(math.isfinite(tick) for tick in ticks)
            assert all(0 <= place <= 1 for place in scale.places(filter(math.isfinite, values)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([-3, 1], [-3, -2, -1, 0, 1]),
        ([320], [0, 50, 100, 150, 200, 250, 300]),
    ],
)
def test_ticks_are_those_one_would_choose(values: list[float], expected: list[float]) -> None:
    assert scale_of(values).ticks(7) == pytest.approx(expected)


def test_ticks_of_powers_and_of_steps() -> None:
    for values, expected in (
        ([1e-7, 5e-7], [1e-7, 2e-7, 3e-7, 4e-7, 5e-7]),
        ([1e-4, 1e-2], [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2]),
        ([1e-9, 1], [1e-8, 1e-6, 1e-4, 1e-2, 1]),
    ):
        scale = log_scale_of(values)
        assert scale is not None and scale.ticks(7) == pytest.approx(expected, rel=1e-9)
    assert scale_of_steps([1, 3]).ticks(8, least=1) == [1, 2, 3]
    assert scale_of_steps([7]).ticks(8, least=1) == [7]
    assert scale_of_steps([10**200]).places([10**200]) == pytest.approx([0.5])
    scale = log_scale_of([0.1, 10])
    assert scale is not None and scale.ticks(4) == pytest.approx([0.1, 1, 10])


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
