"""Reads the traces of a run, as far as a page can show them."""

from __future__ import annotations

from collections.abc import Sequence
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
