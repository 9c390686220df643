"""Reads the traces of a run, as far as a page can show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from sluice.loop.trace import LOOP, STEP, trace_files

MOST_SPANS = 60_000  # that a browser draws without effort


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
        return [span for span in self.spans if span.lane == lane and not span.group]

    @property
    def samples(self) -> list[Span]:
        """Spans of groups and their episodes."""
        return [span for span in self.spans if span.group]


def load(run_dir: Path, first: int | None = None, last: int | None = None) -> Trace:
    """The traces of steps first..last; without `first` as many of the latest as fit on a page.

    Raises NoTraceError.
    """
    files = trace_files(run_dir / "traces")
    if not files:
        raise NoTraceError(f"{run_dir} holds no traces; `trace.steps` of the run may be 0")
    wanted = [f for f in files if (last is None or int(f.stem) <= last)]
    if first is not None:
        wanted = [f for f in wanted if int(f.stem) >= first]
    if not wanted:
        raise NoTraceError(
            f"{run_dir} has traces of steps {int(files[0].stem)}-{int(files[-1].stem)}"
        )
    tables: list[pa.Table] = []
    for path in reversed(wanted):
        try:
            table = pa.ipc.open_file(path).read_all()
        except FileNotFoundError:  # a run that goes on forgets its oldest steps
            break
        fits = sum(other.num_rows for other in tables) + table.num_rows <= MOST_SPANS
        if tables and first is None and not fits:
            break
        tables.append(table)
    if not tables:
        raise NoTraceError(f"{run_dir} holds these traces no more")
    spans = _whole_steps([span for table in tables for span in _spans(table)])
    steps = [int(s.detail.split()[-1]) for s in spans if (s.lane, s.name) == (LOOP, STEP)]
    return Trace(
        steps=(min(steps, default=0), max(steps, default=0)),
        spans=sorted(spans, key=lambda span: span.start),
        left_out=sum(int(table.schema.metadata[b"left_out"]) for table in tables),
        is_shortened=len(tables) < len(wanted),
    )


def _spans(table: pa.Table) -> list[Span]:
    columns = [table.column(name).to_pylist() for name in table.schema.names]
    return [
        Span(lane, name, start, duration, group or "", -1 if episode is None else episode, detail)
        for lane, name, start, duration, group, episode, detail in zip(*columns, strict=True)
    ]


def _whole_steps(spans: Sequence[Span]) -> list[Span]:
    """Without a step that only saved the end of the run."""
    steps = [s for s in spans if (s.lane, s.name) == (LOOP, STEP)]
    waits = [s for s in spans if (s.lane, s.name) == (LOOP, "wait for groups")]
    empty = {id(s) for s in steps if not any(s.start <= w.start <= s.end for w in waits)}
    return [span for span in spans if id(span) not in empty]


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
    """Phases of a step follow each other, but engines take weights at once: the union counts."""
    seconds = defaultdict[str, float](float)
    phases: dict[str, list[Span]] = defaultdict(list)
    for span in trace.spans:
        if not span.group and span.name != STEP:
            phases[span.name].append(span)
    covered: list[tuple[float, float]] = []
    for name, spans in phases.items():
        merged = _union((s.start, s.end) for s in spans)
        seconds[name] = _overlap(merged, steps)
        covered += merged
    whole = sum(step.duration for step in steps)
    seconds["other"] = max(0.0, whole - _overlap(_union(covered), steps))
    return _sorted(seconds)


def _use(trace: Trace, engine: str, wall: float) -> EngineUse:
    spans = [s for s in trace.samples if s.lane == engine and s.name in SAMPLING]
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
    """Seconds of disjoint intervals that lie inside steps."""
    return sum(
        max(0.0, min(end, step.end) - max(start, step.start))
        for step in steps
        for start, end in intervals
    )


def _sorted(seconds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
