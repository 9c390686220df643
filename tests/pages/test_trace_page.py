"""The timeline in a browser: it draws, and keys move through it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from sluice.loop.config import TraceConfig
from sluice.loop.timeline.page import write_page
from sluice.loop.trace import LOOP, STEP, RunTrace
from tests.unit.loop.test_trace import group_of


def test_steps_are_drawn_and_keys_go_through_them(
    tmp_path: Path, opened: Callable[[Path], Page]
) -> None:
    trace = RunTrace(tmp_path, TraceConfig())
    for step in range(1, 6):
        begin = 100.0 + 10 * step
        trace.add(LOOP, STEP, begin, begin + 9, f"step {step}")
        trace.add(LOOP, "wait for groups", begin, begin + 5, "</script><b>")
        trace.flush(step)
    write_page(tmp_path, None, None)
    page = opened(tmp_path / "trace.html")
    assert "5" in page.inner_text("#facts")
    whole = page.inner_text("#where")
    page.keyboard.press("ArrowRight")
    first = page.inner_text("#where")
    page.keyboard.press("ArrowRight")
    assert len({whole, first, page.inner_text("#where")}) == 3
    page.keyboard.press("0")
    assert page.inner_text("#where") == whole
    assert lightness(page, "#rows") == lightness(page, "body")  # both bright, or both dark
    page.click("#theme")
    assert lightness(page, "#rows") == lightness(page, "body")


@pytest.mark.parametrize("name", ["constructor", "<!--<script>", "</script><script>alert(1)"])
def test_engines_may_have_any_name(
    tmp_path: Path, opened: Callable[[Path], Page], name: str
) -> None:
    trace, group = RunTrace(tmp_path, TraceConfig()), group_of(name)
    group.trace.place_names[1] = name
    trace.add_group(group)
    trace.add(LOOP, STEP, 100, 110, "step 1")
    trace.add(LOOP, "wait for groups", 100, 105, name)
    trace.flush(1)
    write_page(tmp_path, None, None)
    page = opened(tmp_path / "trace.html")
    assert "step 1" in page.inner_text("#where")
    assert name in page.inner_text("#engines")


def lightness(page: Page, selector: str) -> bool:
    """Whether the ground of an element, or of the corner of a canvas, is bright."""
    red = page.evaluate(
        """(selector) => {
          const node = document.querySelector(selector);
          if (node.getContext) {
            const often = { willReadFrequently: true };
            const spot = document.createElement("canvas").getContext("2d", often);
            spot.drawImage(node, 2, 2, 1, 1, 0, 0, 1, 1);
            return spot.getImageData(0, 0, 1, 1).data[0];
          }
          return Number(getComputedStyle(node).backgroundColor.match(/\\d+/)[0]);
        }""",
        selector,
    )
    return bool(red > 127)
