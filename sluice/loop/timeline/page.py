"""One HTML file that shows a trace; it asks the network for nothing."""

from __future__ import annotations

import heapq
import html
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from sluice.config import ConfigError
from sluice.loop.timeline.summary import (
    ON_ENGINE,
    NoTraceError,
    Span,
    Trace,
    engine_names,
    load,
    summarise,
)
from sluice.loop.trace import CRITIC, LOOP, STEP, TRAINER

MICRO = 1e6  # the page counts in whole microseconds from the first span


def render(trace: Trace, title: str) -> str:
    """The page."""
    assets = resources.files("sluice.loop.timeline")
    page = assets.joinpath("page.html").read_text()
    data = json.dumps(_page_data(trace, title), separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "title": html.escape(title),
        "style": assets.joinpath("page.css").read_text(),
        "draw": assets.joinpath("draw.js").read_text(),
        "script": assets.joinpath("page.js").read_text(),
        "data": data,
    }
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def _page_data(trace: Trace, title: str) -> dict[str, Any]:
    zero = min(span.start for span in trace.spans)
    groups = sorted({span.group for span in trace.samples})
    places = {name: place for place, name in enumerate(groups)}
    begun = datetime.fromtimestamp(zero, timezone.utc)  # noqa: UP017 - mypy knows no datetime.UTC
    steps = [span for span in trace.of(LOOP) if span.name == STEP]
    return {
        "title": title,
        "begun": begun.strftime("%Y-%m-%d %H:%M:%S UTC"),
        "steps": [[*_times(span, zero), span.detail] for span in steps],
        "firstStep": trace.steps[0],
        "lastStep": trace.steps[1],
        "leftOut": trace.left_out,
        "isShortened": trace.is_shortened,
        "groups": groups,
        "lanes": _phase_lanes(trace, zero),
        "engines": [_engine(trace, name, places, zero) for name in engine_names(trace)],
        "groupBars": _group_bars(trace, places, zero),
        "details": _details(trace, places),
        "summary": asdict(summarise(trace)),
    }


def _times(span: Span, zero: float) -> tuple[int, int]:
    return round((span.start - zero) * MICRO), max(1, round(span.duration * MICRO))


def _phase_lanes(trace: Trace, zero: float) -> list[dict[str, Any]]:
    """Loop, trainers, and the weight updates of every engine."""
    found = []
    others = sorted({s.lane for s in trace.spans if not s.group} - {LOOP, TRAINER, CRITIC})
    labels = {LOOP: "loop", TRAINER: "trainer", CRITIC: "critic"}
    labels |= {name: f"weights of {name}" for name in others}
    for lane, label in labels.items():
        spans = [span for span in trace.of(lane) if span.name != STEP]
        if spans:
            rows = [[*_times(span, zero), span.name, span.detail] for span in spans]
            found.append({"label": label, "spans": rows})
    return found


def _engine(trace: Trace, name: str, places: dict[str, int], zero: float) -> dict[str, Any]:
    """Bars of one engine: a row is a slot, that samples take one after the other."""
    visits: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in trace.samples:
        if span.lane == name and span.name in ON_ENGINE:
            visits[span.group, span.episode].append(span)
    bars = [bar for spans in visits.values() for bar in _contiguous(spans)]
    rows = pack([(bar[0].start, bar[-1].end) for bar in bars])
    spans = [
        [row, places[span.group], span.episode, *_times(span, zero), span.name]
        for row, bar in zip(rows, bars, strict=True)
        for span in bar
    ]
    return {"name": name, "rowCount": max(rows, default=-1) + 1, "spans": spans}


def _contiguous(spans: Sequence[Span]) -> list[list[Span]]:
    """Visits: the spans of one follow each other without a gap."""
    visits: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if visits and span.start - visits[-1][-1].end < 1e-4:
            visits[-1].append(span)
        else:
            visits.append([span])
    return visits


def pack(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """The lowest row for each interval in which none overlaps it; as few rows as can be."""
    rows = [0] * len(intervals)
    busy: list[tuple[float, int]] = []  # until when, and the row
    free: list[int] = []
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index]):
        start, end = intervals[index]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        rows[index] = row
        heapq.heappush(busy, (end, row))
    return rows


def _group_bars(trace: Trace, places: dict[str, int], zero: float) -> dict[str, Any]:
    """A bar per group, from its begin until it is stored, cut where the group as a whole moves."""
    by_group: dict[str, list[Span]] = defaultdict(list)
    for span in trace.samples:
        by_group[span.group].append(span)
    names = list(by_group)
    bounds = [_bounds(by_group[name]) for name in names]
    rows = pack(bounds)
    bars = []
    for name, row, (start, end) in zip(names, rows, bounds, strict=True):
        sections = _sections(by_group[name], start, end)
        bars.append(
            [row, places[name], [[*_times(section, zero), section.name] for section in sections]]
        )
    return {"rowCount": max(rows, default=-1) + 1, "bars": bars}


def _bounds(spans: Iterable[Span]) -> tuple[float, float]:
    spans = list(spans)
    return min(span.start for span in spans), max(span.end for span in spans)


def _sections(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """Lease until the first sample has an engine, sampling until the reward, and what is shared."""
    shared = {span.name: span for span in spans if span.episode < 0}
    sampling = [span for span in spans if span.name in ON_ENGINE]
    begin = shared["task"].end if "task" in shared else start
    first = min((span.start for span in sampling), default=begin)
    last = shared["reward"].start if "reward" in shared else end
    found = [shared[name] for name in ("task", "reward", "store") if name in shared]
    found.append(Span("", "lease", begin, max(0.0, first - begin)))
    found.append(Span("", "sampling", first, max(0.0, last - first)))
    return sorted(found, key=lambda section: section.start)


def _details(trace: Trace, places: dict[str, int]) -> dict[str, str]:
    """By "group/episode": what came of a sample."""
    return {
        f"{places[span.group]}/{span.episode}": span.detail
        for span in trace.samples
        if span.detail and span.name in ON_ENGINE
    }


NAMED_SHARES = 5


def write_page(run_dir: Path, output: Path | None, steps: str | None) -> list[str]:
    """Write the page, by default run_dir/trace.html; what to say about it.

    Raises ConfigError for steps that are not FIRST-LAST, or where there is no trace.
    """
    first, last = _range(steps)
    try:
        trace = load(run_dir, first, last)
    except NoTraceError as error:
        raise ConfigError(str(error)) from None
    path = output or run_dir / "trace.html"
    try:
        path.write_text(render(trace, f"Run {run_dir.resolve().name}"))
    except OSError as error:
        raise ConfigError(f"-o: {error}") from None
    summary = summarise(trace)
    return [
        f"samples: {_shares(summary.samples)}",
        f"steps: {_shares(summary.steps)}",
        f"{path}: steps {trace.steps[0]}-{trace.steps[1]}, {summary.sample_count} samples",
    ]


def _range(steps: str | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    first, dash, last = steps.partition("-")
    try:
        return int(first), int(last) if dash else int(first)
    except ValueError:
        raise ConfigError(f"--steps: {steps!r} is not FIRST-LAST") from None


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values()) or 1.0
    named = list(seconds.items())[:NAMED_SHARES]
    return ", ".join(f"{name} {value / total:.0%}" for name, value in named)
