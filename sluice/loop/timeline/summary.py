"""Where the time went, in numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice.loop.timeline.spans import Span, Trace
from sluice.loop.trace import LOOP, STEP

ON_ENGINE = ("queue", "prefill", "decode", "generate")
SAMPLING = ("prefill", "decode", "generate")


@dataclass(frozen=True)
class EngineUse:
    """busy: share of the time with a sample in prefill or decode; running: how many, while busy."""

    name: str
    busy: float
    running: float


@dataclass(frozen=True)
class Summary:
    """Seconds by what they were spent on, most first."""

    wall_seconds: float
    sample_count: int
    samples: dict[str, float]  # summed over samples
    steps: dict[str, float]  # of the loop; they add up to its steps
    engines: Sequence[EngineUse]


def summarise(trace: Trace) -> Summary:
    samples = trace.samples
    steps = [span for span in trace.of(LOOP) if span.name == STEP]
    wall = max(s.end for s in trace.spans) - min(s.start for s in trace.spans)
    return Summary(
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
