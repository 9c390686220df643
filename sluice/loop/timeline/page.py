"""The traces of a run as one HTML file; it asks the network for nothing."""

from __future__ import annotations

import heapq
import html
import json
import logging
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from sluice.config import ConfigError
from sluice.durable import write_output
from sluice.loop.journal import LAST_TIME
from sluice.loop.trace import (
    CRITIC,
    LOOP,
    STEP,
    STORE,
    TRAINER,
    TraceDamagedError,
    read_trace,
    trace_files,
)

MOST_SPANS = 60_000  # that a browser draws without effort
MOST_ASKED = 500_000  # unless --spans says more: each million takes up to 1.5 GB, 40 MB of page

logger = logging.getLogger(__name__)


class NoTraceError(Exception):
    """A directory holds no trace, or none of the steps that are asked for."""


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since 1970 and seconds. `group` "" is no group's, episode -1 is all of the group."""

    lane: str
    name: str
    start: float
    duration: float
    group: str = ""
    episode: int = -1
    detail: str = ""

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Trace:
    """Spans by start, of the files of `steps`; left_out counts those that were never written."""

    steps: tuple[int, int]
    spans: Sequence[Span]
    left_out: int
    is_shortened: bool  # earlier steps are there, but would be too much for a page

    def of(self, lane: str) -> list[Span]:
        """Spans of a lane that belong to no group."""
        return [span for span in self._lanes.get(lane, ()) if not span.group]

    def samples_of(self, lane: str) -> list[Span]:
        """Spans of groups and their episodes on a lane."""
        return [span for span in self._lanes.get(lane, ()) if span.group]

    @cached_property
    def samples(self) -> list[Span]:
        """Spans of groups and their episodes."""
        return [span for span in self.spans if span.group]

    @cached_property
    def _lanes(self) -> dict[str, list[Span]]:
        """All spans by lane."""
        lanes: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            lanes[span.lane].append(span)
        return lanes


class TooManySpansError(Exception):
    """The steps that are asked for are more than a page takes."""


def load(
    run_dir: Path, first: int | None = None, last: int | None = None, most: int | None = None
) -> Trace:
    """The traces of steps first..last; without `first` as many of the latest as fit on a page.

    most: spans of those that are asked for. Raises NoTraceError and TooManySpansError.
    """
    try:
        files = trace_files(run_dir / "traces")
    except OSError as error:
        raise NoTraceError(f"{run_dir / 'traces'}: {error.strerror}") from None
    if not files:
        raise NoTraceError(f"{run_dir} holds no traces; `trace.steps` of the run may be 0")
    wanted = [f for f in files if (last is None or int(f.stem) <= last)]
    if first is not None:
        wanted = [f for f in wanted if int(f.stem) >= first]
    if not wanted:
        raise NoTraceError(f"{run_dir} has traces of {_known_steps(files)}")
    limit = (most or MOST_SPANS) if first is None else (most or MOST_ASKED)
    tables: list[pa.Table] = []
    row_count = 0
    for path in reversed(wanted):
        try:
            table = read_trace(path)
        except FileNotFoundError:  # a run that goes on forgets its oldest steps
            break
        except (OSError, TraceDamagedError) as error:
            logger.warning("%s; it is left out", error)
            continue
        row_count += table.num_rows
        if tables and row_count > limit:
            if first is None:
                break
            fit = f"{int(path.stem) + 1}-{int(wanted[-1].stem)}"
            raise TooManySpansError(
                f"these {len(wanted):,} steps have more than {limit:,} spans, which is much for a "
                f"page: the latest that fit are --steps {fit}; --spans N takes more, with "
                "up to 1.5 GB of memory and 40 MB of page for each million"
            )
        tables.append(table)
    if not tables:
        raise NoTraceError(f"{run_dir} holds these traces no more")
    read = [span for table in tables for span in _spans(table)]
    spans = _whole_steps(read)
    steps = [int(s.detail.split()[-1]) for s in spans if (s.lane, s.name) == (LOOP, STEP)]
    if not steps and first is not None:
        raise NoTraceError(f"{run_dir} has traces of {_known_steps(files)}")
    if not spans:
        raise NoTraceError(f"{run_dir} has traces of no step that was whole")
    return Trace(
        steps=(min(steps, default=0), max(steps, default=0)),
        spans=sorted(spans, key=lambda span: span.start),
        left_out=sum(int(table.schema.metadata[b"left_out"]) + table.num_rows for table in tables)
        - len(read),
        is_shortened=len(tables) < len(wanted),
    )


def _known_steps(files: Sequence[Path]) -> str:
    """Those that were made: the last file may hold what came after them."""
    last = int(files[-1].stem)
    with suppress(OSError, TraceDamagedError):
        spans = _whole_steps(_spans(read_trace(files[-1])))
        last -= not any((span.lane, span.name) == (LOOP, STEP) for span in spans)
    first = int(files[0].stem)
    return f"steps {first}-{last}" if first <= last else "no step that was made"


def _spans(table: pa.Table) -> list[Span]:
    """Those at a time that there is, which workers may have told wrongly."""
    columns = [table.column(name).to_pylist() for name in table.schema.names]
    return [
        Span(lane, name, start, duration, group or "", -1 if episode is None else episode, detail)
        for lane, name, start, duration, group, episode, detail in zip(*columns, strict=True)
        if 0 <= start < LAST_TIME and abs(duration) < LAST_TIME
    ]


def _whole_steps(spans: Sequence[Span]) -> list[Span]:
    """Without steps that trained nothing, of earlier releases: a run ended in them, or only saved
    its end."""
    steps = [s for s in spans if (s.lane, s.name) == (LOOP, STEP)]
    learnt = sorted(s.start for s in spans if s.lane in (TRAINER, CRITIC) and s.name in LEARNING)
    empty = {id(s) for s in steps if bisect_left(learnt, s.start) >= bisect_right(learnt, s.end)}
    return [span for span in spans if id(span) not in empty]


LEARNING = ("upload", "forward_backward", "optimizer")  # one of these every step has
OWN_LANES = frozenset((LOOP, TRAINER, CRITIC))  # of what happens one after the other
ON_ENGINE = ("queue", "prefill", "decode", "generate")
SAMPLING = ("prefill", "decode", "generate")


@dataclass(frozen=True)
class EngineUse:
    """busy: share of the time with a sample in prefill or decode; running: how many, while busy."""

    name: str
    busy: float
    running: float


@dataclass(frozen=True)
class TimelineSummary:
    """Seconds by what they were spent on, most first."""

    wall_seconds: float
    sample_count: int
    samples: dict[str, float]  # summed over samples
    steps: dict[str, float]  # of the loop; they add up to its steps
    engines: Sequence[EngineUse]


def summarise(trace: Trace) -> TimelineSummary:
    samples = trace.samples
    steps = [span for span in trace.of(LOOP) if span.name == STEP]
    wall = max(s.end for s in trace.spans) - min(s.start for s in trace.spans)
    return TimelineSummary(
        wall_seconds=wall,
        sample_count=sum(_episode_counts(samples).values()),
        samples=_by_kind(samples),
        steps=_by_phase(trace, steps),
        engines=[_use(trace, name, wall) for name in engine_names(trace)],
    )


def engine_names(trace: Trace) -> list[str]:
    """Engines, by name."""
    return sorted({span.lane for span in trace.samples if span.name in ON_ENGINE})


def _episode_counts(samples: Iterable[Span]) -> dict[str, int]:
    """By group."""
    counts: dict[str, int] = {}
    for span in samples:
        counts[span.group] = max(counts.get(span.group, 0), span.episode + 1)
    return counts


def _by_kind(samples: Sequence[Span]) -> dict[str, float]:
    """A span of a whole group counts for each of its samples."""
    counts, seconds = _episode_counts(samples), defaultdict[str, float](float)
    for span in samples:
        times = counts[span.group] if span.episode < 0 else 1
        seconds[span.name] += span.duration * times
    return _sorted(seconds)


def _by_phase(trace: Trace, steps: Sequence[Span]) -> dict[str, float]:
    """Seconds of the steps by phase; of what engines do, those in which nothing else goes on.

    Engines take weights at once, and beside the trainer: they stage a version that it still
    writes, and prepare it while it learns.
    """
    phases: dict[str, list[Span]] = defaultdict(list)
    for span in trace.spans:
        if not span.group and span.name != STEP:
            phases[span.name].append(span)
    seconds, covered = dict[str, float](), list[tuple[float, float]]()
    by_engines = {name for name, spans in phases.items() if spans[0].lane not in OWN_LANES}
    for name in sorted(phases, key=lambda name: name in by_engines):
        before = _overlap(covered, steps)
        covered = _union([*covered, *((s.start, s.end) for s in phases[name])])
        seconds[name] = _overlap(covered, steps) - before
    whole = sum(step.duration for step in steps)
    seconds["other"] = max(0.0, whole - _overlap(covered, steps))
    return _sorted(seconds)


def _use(trace: Trace, engine: str, wall: float) -> EngineUse:
    spans = [s for s in trace.samples_of(engine) if s.name in SAMPLING]
    busy = sum(end - start for start, end in _union((s.start, s.end) for s in spans))
    total = sum(span.duration for span in spans)
    return EngineUse(engine, busy / wall if wall else 0.0, total / busy if busy else 0.0)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _overlap(intervals: Sequence[tuple[float, float]], steps: Sequence[Span]) -> float:
    """Seconds of disjoint intervals, in their order, that lie inside steps."""
    whole = [(start, end) for start, end in intervals if start < end]
    starts = [start for start, _ in whole]
    before = list(accumulate((end - start for start, end in whole), initial=0.0))

    def until(time: float) -> float:
        count = bisect_right(starts, time)
        return before[count] - max(0.0, whole[count - 1][1] - time) if count else 0.0

    return sum(max(0.0, until(step.end) - until(step.start)) for step in steps)


def _sorted(seconds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


MICRO = 1e6  # the page counts in whole microseconds from the first span


def render(trace: Trace, title: str) -> str:
    """The page."""
    assets = resources.files("sluice.loop.timeline")
    page = assets.joinpath("page.html").read_text()
    # no text of a run can end the script that holds it
    text = json.dumps(_page_data(trace, title), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "style": assets.joinpath("page.css").read_text(),
        "draw": assets.joinpath("draw.js").read_text(),
        "script": assets.joinpath("page.js").read_text(),
        "data": text,
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
    """Loop, trainers, the store, and the weight updates of every engine."""
    found = []
    others = sorted({s.lane for s in trace.spans if not s.group} - OWN_LANES)
    labels = {LOOP: "loop", TRAINER: "trainer", CRITIC: "critic", STORE: "store"}
    labels |= {name: f"weights of {name}" for name in others if name != STORE}
    for lane, label in labels.items():
        spans = [span for span in trace.of(lane) if span.name != STEP]
        if spans:
            rows = [[*_times(span, zero), span.name, span.detail] for span in spans]
            found.append({"label": label, "spans": rows})
    return found


def _engine(trace: Trace, name: str, places: dict[str, int], zero: float) -> dict[str, Any]:
    """Bars of one engine: a row is a slot, that samples take one after the other."""
    visits: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in trace.samples_of(name):
        if span.name in ON_ENGINE:
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


def write_page(
    run_dir: Path, output: Path | None, steps: str | None, most: str | None = None
) -> list[str]:
    """Write the page, by default run_dir/trace.html; what to say about it. `most`: of spans.

    Raises ConfigError for steps that are neither FIRST-LAST nor all, or where there is no trace.
    """
    first, last = range_of(steps)
    limit = _number_of_spans(most)
    if not os.path.isdir(run_dir):
        raise ConfigError(f"trace: {str(run_dir)[:200]!r} is no run directory")
    try:
        trace = load(run_dir, first, last, limit)
    except NoTraceError as error:
        raise ConfigError(str(error)) from None
    except TooManySpansError as error:
        raise ConfigError(f"--steps: {error}") from None
    path = output or run_dir / "trace.html"
    try:
        page = render(trace, f"Run {run_dir.resolve().name}")
        write_output(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"-o: {str(path)[:200]}: {error.strerror}") from None
    summary = summarise(trace)
    shown = f"{path}: steps {trace.steps[0]}-{trace.steps[1]}, {summary.sample_count} samples"
    if trace.is_shortened:
        shown += "; earlier steps are there too: --steps FIRST-LAST, or --steps all"
    return [
        f"samples: {_shares(summary.samples)}",
        f"steps: {_shares(summary.steps)}",
        shown,
    ]


def _number_of_spans(text: str | None) -> int | None:
    """Raises ConfigError."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text)):
        raise ConfigError(f"--spans: {text[:100]!r} is no number of spans")
    return int(text)


def range_of(steps: str | None) -> tuple[int | None, int | None]:
    """First and last step of `--steps`; None is open. Raises ConfigError."""
    if steps is None:
        return None, None
    if steps == "all":
        return 0, None
    first, dash, last = steps.partition("-")
    try:
        found = int(first), int(last if dash else first)
    except ValueError:
        raise ConfigError(f"--steps: {steps[:100]!r} is neither FIRST-LAST nor all") from None
    if found[0] > found[1]:
        raise ConfigError(f"--steps: {steps!r} ends before it begins")
    return found


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values()) or 1.0
    named = list(seconds.items())[:NAMED_SHARES]
    return ", ".join(f"{name} {value / total:.0%}" for name, value in named)
