"""Traces of a run as OpenTelemetry spans, for a collector that speaks OTLP over HTTP.

A step is a trace: what the loop, trainers and engines did lies below its span, and so does each
group with its samples. Ids come from the run's id and the contents, so that spans that are sent
twice are the same ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from pydantic import ValidationError

from sluice.config import ConfigError, describe
from sluice.durable import replace_file
from sluice.loop.journal import START, read_journal
from sluice.loop.timeline.page import range_of
from sluice.loop.trace import LOOP, STEP, TraceDamagedError, read_trace, trace_files
from sluice.loop.tracker_settings import SENT_SPANS, OtelConfig

SPANS_PER_REQUEST = 2_000  # half a megabyte before it is compressed
_SCOPE = InstrumentationScope("sluice.loop.trace")


class NotTakenError(Exception):
    """A collector has not taken spans; its log says why."""


def spans_of(
    table: pa.Table, step: int, run_id: str, resource: Resource, *, samples: bool = True
) -> list[ReadableSpan]:
    """Spans of a step, its own first; without `samples` those of no group.

    Attributes are `sluice.lane`, `.step`, and where they apply `.group`, `.episode`, `.detail`.
    """
    rows = [row for row in table.to_pylist() if samples or row["group"] is None]
    if not rows:
        return []
    first = min(row["start"] for row in rows)
    trace_id = xxhash.xxh3_128_intdigest(f"{run_id}\0{step}\0{first}".encode())

    def context(*words: object) -> SpanContext:
        text = "\0".join(map(str, (trace_id, *words)))
        number = xxhash.xxh3_64_intdigest(text.encode()) or 1
        return SpanContext(trace_id or 1, number, is_remote=False, trace_flags=TraceFlags(1))

    def span(
        name: str,
        at: SpanContext,
        parent: SpanContext | None,
        bounds: tuple[float, float],
        **more: Any,
    ) -> ReadableSpan:
        attributes = {f"sluice.{key}": value for key, value in more.items() if value is not None}
        return ReadableSpan(
            name,
            at,
            parent,
            resource,
            {"sluice.step": step, **attributes},
            start_time=round(bounds[0] * 1e9),
            end_time=round(bounds[1] * 1e9),
            instrumentation_scope=_SCOPE,
        )

    root, groups = context(STEP), dict[str, list[Mapping[str, Any]]]()
    is_root = next((r for r in rows if (r["lane"], r["name"]) == (LOOP, STEP)), None)
    whole = _bounds([is_root] if is_root is not None else rows)
    found = [span(STEP, root, None, whole, lane=LOOP)]
    for index, row in enumerate(rows):
        if row is is_root:
            continue
        parent, group = root, row["group"]
        if group is not None:
            groups.setdefault(group, []).append(row)
            parent = context("group", group)
        found.append(
            span(
                row["name"],
                context(index),
                parent,
                _bounds([row]),
                lane=row["lane"],
                group=group,
                episode=row["episode"],
                detail=row["detail"] or None,
            )
        )
    found += [
        span("group", context("group", group), root, _bounds(members), group=group)
        for group, members in groups.items()
    ]
    return found


def _bounds(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    return min(r["start"] for r in rows), max(r["start"] + r["duration"] for r in rows)


class SpanSender:
    """Sends the traces of a run directory, each step once; which it has is in `state`."""

    def __init__(
        self, run_dir: Path, run_id: str, state: Path, settings: Mapping[str, Any], name: str
    ) -> None:
        """`settings` are those of `trackers.otel`; headers and certificates come from the
        variables of OpenTelemetry."""
        self._traces, self._run_id, self._state = run_dir / "traces", run_id, state
        self._samples = settings["samples"]
        self._resource = Resource.create(
            {"service.name": settings["service_name"], "sluice.run": name, "sluice.run_id": run_id}
        )
        self._exporter = OTLPSpanExporter(
            settings["endpoint"],
            timeout=settings["timeout_seconds"],
            compression=Compression.Gzip,
        )
        self._sent: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            sent = json.loads(state.read_text())["sent"].items()
            self._sent = {str(file): int(written) for file, written in sent}

    def send(self) -> None:
        """Send the steps that are there and were not sent. Raises NotTakenError.

        A damaged step is left out; one that was made again is another trace.
        """
        there = {path: written for path in trace_files(self._traces) if (written := _time(path))}
        for path, written in there.items():
            if self._sent.get(path.name) == written:
                continue
            with contextlib.suppress(FileNotFoundError, TraceDamagedError):
                self._send(read_trace(path), int(path.stem))
            known = {each.name for each in there}
            self._sent = {k: t for k, t in self._sent.items() if k in known} | {path.name: written}
            state = json.dumps({"sent": self._sent}).encode()
            replace_file(self._state, state, temporary=self._state.parent, sync=False)

    def send_again(self, first: int, last: float) -> tuple[int, list[int]]:
        """Send steps whether they were sent or not; how many, and which are damaged.

        Raises NotTakenError.
        """
        count, damaged = 0, list[int]()
        for path in trace_files(self._traces):
            step = int(path.stem)
            if not first <= step <= last:
                continue
            try:
                self._send(read_trace(path), step)
                count += 1
            except FileNotFoundError:
                continue  # a run at work keeps its latest ones
            except TraceDamagedError:
                damaged.append(step)
        return count, damaged

    def _send(self, table: pa.Table, step: int) -> None:
        spans = spans_of(table, step, self._run_id, self._resource, samples=self._samples)
        for part in _parts(spans):
            if self._exporter.export(part) is not SpanExportResult.SUCCESS:
                raise NotTakenError(f"the spans of step {step} were not taken")

    def close(self) -> None:
        self._exporter.shutdown()


def export_trace(run_dir: Path, endpoint: str, steps: str | None) -> list[str]:
    """Send the trace that a run left, or has left so far; what to say about it.

    Spans that a tracker of the run has sent are sent as the same ones. Raises ConfigError, and
    NotTakenError.
    """
    first, last = range_of(steps)
    if not os.path.isdir(run_dir):
        raise ConfigError(f"trace: {str(run_dir)[:200]!r} is no run directory")
    try:
        settings = OtelConfig(endpoint=endpoint)
    except ValidationError as error:
        raise ConfigError(f"trace: --otlp: {describe(error, OtelConfig)}") from None
    state, name = run_dir / "trackers" / SENT_SPANS, run_dir.resolve().name
    sender = SpanSender(run_dir, _run_id(run_dir), state, settings.model_dump(), name)
    try:
        count, damaged = sender.send_again(first or 0, math.inf if last is None else last)
    finally:
        sender.close()
    if not count and not damaged:
        raise ConfigError(f"trace: {run_dir} holds no traces, or none of these steps")
    told = [f"damaged and left out: steps {', '.join(map(str, damaged))}"] if damaged else []
    return [*told, f"{settings.endpoint}: {count} steps"]


def _run_id(run_dir: Path) -> str:
    """The id that a tracker of the run has; else one that is made of how the run began."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads((run_dir / "trackers" / "otel.json").read_text())
        if run_id := str(state["run_id"]):  # else a copy's, which has not begun
            return run_id
    began = next((e for e in read_journal(run_dir) if e.get("event") == START), None)
    words = str(run_dir.resolve()) if began is None else json.dumps(began, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(words.encode())


def _time(path: Path) -> int:
    """When it was written, in nanoseconds; 0 where it is no longer there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _parts(spans: Sequence[ReadableSpan]) -> Iterator[Sequence[ReadableSpan]]:
    for first in range(0, len(spans), SPANS_PER_REQUEST):
        yield spans[first : first + SPANS_PER_REQUEST]
