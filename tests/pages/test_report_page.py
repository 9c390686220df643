"""The report in a browser: quick with 10,000 samples, by keyboard alone, harmless if hostile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page

from sluice.durable import encode_row
from sluice.loop.journal import RunJournal
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.plot import smoothed
from sluice.loop.run_page.page import write_run_page
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from tests.unit.loop.test_run_page import HOSTILE, a_sample, make_run

READY = "document.documentElement.dataset.ready === 'true'"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 samples and 2,000 steps."""
    run_dir = tmp_path_factory.mktemp("large") / "run"
    make_run(run_dir, groups=0, steps=2000)
    store, ledger = BlobStore(run_dir / "store", sync=False), Ledger(run_dir / "ledger.sqlite")
    groups = []
    for position in range(10):
        name = f"g{position:04}"
        advantages = {"advantages": np.array([1.0, -1.0, 0.5], dtype=np.float32)}
        blob = store.put(
            encode_group([a_sample(name, i, i / 1000, **advantages) for i in range(1000)])
        )
        groups.append(
            LedgerGroup(
                position=position,
                group_id=name,
                state="generated",
                issue_step=0,
                blob=blob,
                sample_count=1000,
            )
        )
    ledger.issue([(group.position, group.group_id) for group in groups], 0)
    for group in groups:
        ledger.generated(group)
    ledger.consume([group.group_id for group in groups], 1)
    ledger.close()
    write_run_page([run_dir], run_dir / "report.html", tokenizer=None, samples=10_000)
    return run_dir / "report.html"


def test_ten_thousand_samples_are_there_in_two_seconds(
    large: Path, opened: Callable[[Path], Page]
) -> None:
    begun = time.monotonic()
    page = opened(large)
    page.wait_for_function(READY)
    assert time.monotonic() - begun < 2
    assert page.inner_text("#count") == "10000 of 10000 samples"
    assert page.locator("#charts svg").count() >= 4
    begun = time.monotonic()
    page.fill("#find", "g0003/99")
    page.wait_for_function("document.getElementById('count').textContent.startsWith('11 of')")
    assert time.monotonic() - begun < 2


def test_a_reader_without_a_mouse_finds_a_sample(
    large: Path, opened: Callable[[Path], Page]
) -> None:
    page = opened(large)
    page.wait_for_function(READY)
    page.keyboard.press("/")
    page.keyboard.type("g0003")
    assert page.inner_text("#count") == "1000 of 10000 samples"
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    assert page.inner_text("#detail").startswith("g0003/2,")
    page.keyboard.press("k")
    assert page.inner_text("#detail").startswith("g0003/1,")
    page.keyboard.press("End")
    assert page.inner_text("#detail").startswith("g0003/999,")
    assert page.get_attribute("#list", "aria-activedescendant") == "sample-999"
    colours = page.locator("#detail .text span").evaluate_all(
        "(all) => all.map((each) => each.style.background)"
    )
    assert len(set(colours)) == 3  # by advantage


def test_hostile_texts_do_nothing(tmp_path: Path, opened: Callable[[Path], Page]) -> None:
    run_dir = tmp_path / "<img src=x onerror=alert(1)>"
    make_run(run_dir, note=HOSTILE.replace("\ud800", ""))
    RunJournal(run_dir).write("note", step=1, text=HOSTILE)
    write_run_page([run_dir], tmp_path / "report.html", tokenizer=None, samples=10)
    page = opened(tmp_path / "report.html")
    page.wait_for_function(READY)
    assert "U+202E" in page.inner_text("#journal")
    assert "alert(1)" in page.inner_text("#journal")
    assert "\u202e" not in page.inner_text("body")
    assert page.locator("img").count() == 0


def test_metrics_may_have_any_name(tmp_path: Path, opened: Callable[[Path], Page]) -> None:
    names = ("constructor", "toString", "__proto__", "\u202e", "<img src=x onerror=alert(1)>")
    for run, more in (("one", dict.fromkeys(names, 1.0)), ("other", {})):
        make_run(tmp_path / run)
        with (tmp_path / run / "metrics.jsonl").open("ab") as rows:
            rows.write(encode_row({"step": 4, "reward_mean": 1.0, **more}) + b"\n")
    runs = [tmp_path / "one", tmp_path / "other"]
    write_run_page(runs, tmp_path / "report.html", tokenizer=None, samples=10)
    page = opened(tmp_path / "report.html")
    page.wait_for_function(READY)
    assert page.locator("figure[data-metric]").count() >= len(names)
    assert page.locator("img").count() == 0


def test_a_run_without_a_step_has_a_page(tmp_path: Path, opened: Callable[[Path], Page]) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    RunJournal(run_dir).start("train", 5, {"seed": 1})
    write_run_page([run_dir], tmp_path / "report.html", tokenizer=None, samples=10)
    page = opened(tmp_path / "report.html")
    page.wait_for_function(READY)
    assert "There are no samples" in page.inner_text("#detail")


def test_the_trend_is_that_of_the_plot(large: Path, opened: Callable[[Path], Page]) -> None:
    page = opened(large)
    page.wait_for_function(READY)
    values = [0.1, 3.0, None, -2.0, 5.0, 5.5, None, 1.0]
    found = page.evaluate(f"smoothed({json.dumps(values)}, 1.5)")
    expected = smoothed([float("nan") if v is None else v for v in values], 1.5)
    assert found == pytest.approx(expected.tolist())
