"""The soak finds what grows, and leaves out what steps are for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.soak import Processes, Series, count_files, judge, process_name, replaced, slope


def held(**growth: float) -> Series:
    """What a process holds that grows so much per 1,000 steps, with noise, after a start-up."""
    series, rng = Series(), random.Random(3)
    for step in range(0, 3001, 20):
        start = 50 * min(step, 900) / 900
        noise = rng.uniform(-0.2, 0.2) + growth.get("once", 0) * (step > 1900)
        noise += growth.get("stairs", 0) * (step // 500) / 2
        series.add(
            step,
            {
                "rss_mib": 100 + start + noise + growth.get("rss_mib", 0) * step / 1000,
                "descriptors": 20 + growth.get("descriptors", 0) * step / 1000,
                "threads": 8 + growth.get("threads", 0) * step / 1000,
            },
        )
    return series


def test_a_slope_is_that_of_least_squares() -> None:
    assert slope([0, 500, 1000], [1.0, 2.0, 3.0]) == pytest.approx(2.0)
    assert slope([5], [1.0]) == 0.0


@pytest.mark.parametrize(
    ("growth", "fits"),
    [
        ({}, True),
        ({"rss_mib": 0.7}, False),
        ({"stairs": 0.7}, False),
        ({"once": 4.0}, True),
        ({"descriptors": 1.0}, False),
        ({"threads": 1.0}, False),
        ({"rss_mib": -3.0, "descriptors": -1.0}, True),
    ],
)
def test_what_grows_is_found_in_the_worst_process(growth: dict[str, float], fits: bool) -> None:
    files = Series()
    for step in range(0, 3001, 20):
        files.add(step, {"files": 30.0, "results": float(step)})
    series = {(1, "even"): held(), (2, "odd"): held(**growth), (0, "files"): files}
    line, below = judge(series, 3000, 1000)
    assert below is fits
    assert line.startswith("soak: steps=3000 rss_slope_mib_per_1000=")
    assert line.endswith(" files_slope=0.00")


def test_files_of_steps_are_counted_apart(tmp_path: Path) -> None:
    for name in ("store/blobs/ab/1", "store/weights/versions/3/x", "store/blobs-2", "tmp/left"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = count_files(tmp_path)
    for name in ("store/weights/pins/00000003", "tmp/left-too"):  # empty folders are no less
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "store/weights/allocated").mkdir()
    assert count_files(tmp_path) - found == {"others": 4}
    assert found["results"] == 4


def test_a_process_that_was_replaced_is_named() -> None:
    lives = {(1, "a"): (0, 60), (2, "b"): (0, 40), (3, "b"): (40, 60), (4, "loop"): (0, 50)}
    series: Processes = {}
    for key, (first, last) in lives.items():
        series[key] = Series()
        for step in range(first, last + 1, 10):
            series[key].add(step, {"rss_mib": 1.0})
    assert replaced(series) == ["b"]


def test_processes_are_named_by_what_they_run() -> None:
    rank = ["python", "-m", "services.trainer.rank", "--config", "/x/config.json"]
    assert process_name(rank) == "services.trainer.rank config"
    assert process_name(["python", "-m", "sluice.cli", "up", "a.yaml"]) == "sluice.cli up a"
