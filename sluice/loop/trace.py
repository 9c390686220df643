"""Where the time of a run went: spans of the loop, the trainer, the engines and every sample.

<run_dir>/traces/<step>.arrow holds the spans that ended up to that step; the oldest files go.
Times are of the clock of whoever measured: the loop's for its calls, the episode worker's for
samples.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import trace_pb2
from sluice.durable import replace_file
from sluice.loop.config import TraceConfig
from sluice.runtime.wire import seconds_of

logger = logging.getLogger(__name__)

LOOP, TRAINER, CRITIC = "loop", "trainer", "critic"
STORE = "store"  # what is written there beside the steps
STEP = "step"
KINDS = {
    number: name.removeprefix("SPAN_KIND_").lower() for name, number in trace_pb2.SpanKind.items()
}
_NAMES = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        pa.field("lane", _NAMES),  # loop, trainer, critic, an engine or an environment
        pa.field("name", _NAMES),  # what was done there
        pa.field("start", pa.float64()),  # seconds since 1970
        pa.field("duration", pa.float32()),  # seconds
        pa.field("group", _NAMES),  # null: no group's
        pa.field("episode", pa.int32()),  # null: no single one's
        pa.field("detail", _NAMES),  # for people
    ]
)
_current: ContextVar[RunTrace | None] = ContextVar("trace", default=None)
_EPISODES = 1 << 32  # more than a group has, for they are int32


Row = tuple[str, str, float, float, str]  # lane, name, start, duration, detail; of no sample


class RunTrace:
    """Gathers spans and writes them, step by step; what it cannot write is left out."""

    def __init__(self, run_dir: Path, config: TraceConfig) -> None:
        self._root, self._config = run_dir / "traces", config
        self._rows, self._groups = list[Row](), list[pb.FinishedGroup]()
        self._sample_spans = self._left_out = 0

    def add(self, lane: str, name: str, start: float, end: float, detail: str = "") -> None:
        """A span in seconds since 1970."""
        self._rows.append((lane, name, start, end - start, detail))

    def add_group(self, group: pb.FinishedGroup) -> None:
        """The spans of a group's samples; of groups beyond the limit of a step, and of what is
        no whole trace, they are only counted."""
        trace = group.trace
        count = len(trace.kinds)
        if not count:
            return
        if not _is_whole(group) or self._sample_spans + count > self._config.spans_per_step:
            self._left_out += count
            return
        self._sample_spans += count
        self._groups.append(group)

    def flush(self, step: int) -> None:
        """Write what was gathered as the spans of a step."""
        rows, groups, left_out = self._rows, self._groups, self._left_out
        self._rows, self._groups = [], []
        self._sample_spans = self._left_out = 0
        if not self._config.steps or not (rows or groups):
            return
        metadata = {b"step": str(step).encode(), b"left_out": str(left_out).encode()}
        table = _table(rows, groups).replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            path = self._root / f"{step:07}.arrow"
            replace_file(path, sink.getvalue(), temporary=self._root, sync=False)
            for old in trace_files(self._root)[: -self._config.steps]:
                old.unlink(missing_ok=True)
        except OSError as error:  # a run goes on without its trace
            logger.warning("trace of step %d: %s", step, error)


def use(trace: RunTrace) -> None:
    """Spans of this task, and of tasks it starts, go to `trace`."""
    _current.set(trace)


@contextlib.contextmanager
def span(lane: str, name: str, detail: str = "") -> Iterator[None]:
    """The block as a span of the trace in use, if there is one."""
    began = now()
    try:
        yield
    finally:
        add_since(began, lane, name, detail)


def now() -> tuple[float, float]:
    """The time, for `add_since`: seconds since 1970, and by a clock that nobody sets."""
    return time.time(), time.monotonic()


def add_since(began: tuple[float, float], lane: str, name: str, detail: str = "") -> None:
    """A span that ends now, to the trace in use."""
    if (trace := _current.get()) is not None:
        start, clock = began
        trace.add(lane, name, start, start + (time.monotonic() - clock), detail)


def add_group(group: pb.FinishedGroup) -> None:
    """The spans of a group, to the trace in use."""
    if (trace := _current.get()) is not None:
        trace.add_group(group)


def trace_files(root: Path) -> list[Path]:
    """By step; later ones last. Raises OSError where they cannot be listed."""
    if not root.is_dir():
        return []
    return [root / name for name in sorted(os.listdir(root)) if name.endswith(".arrow")]


class TraceDamagedError(Exception):
    """A trace is not what was written."""


def read_trace(path: Path) -> pa.Table:
    """The spans of a step. Raises FileNotFoundError and TraceDamagedError."""
    data = pa.py_buffer(path.read_bytes())
    try:
        table = pa.ipc.open_file(data).read_all()
        table.validate(full=True)
        int(table.schema.metadata[b"left_out"])
        if not table.schema.equals(SCHEMA):
            raise ValueError("other columns")
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise TraceDamagedError(f"{path} is damaged: {error}") from None
    return table


class _Names:
    """Texts by number, in the order in which they came."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def numbers(self, texts: Iterable[str]) -> np.ndarray:
        return np.array([self.number(text) for text in texts], dtype=np.int32)

    def column(self, numbers: np.ndarray, mask: np.ndarray | None = None) -> pa.DictionaryArray:
        indices = pa.array(numbers, mask=mask)
        return pa.DictionaryArray.from_arrays(indices, pa.array(self._numbers, pa.string()))


def _table(rows: Sequence[Row], groups: Sequence[pb.FinishedGroup]) -> pa.Table:
    """All spans; those of no group come first."""
    lanes, names, ids, details = _Names(), _Names(), _Names(), _Names()
    kinds = names.numbers(KINDS.get(number, "other") for number in range(max(KINDS) + 2))
    own: list[np.ndarray] = [
        lanes.numbers(row[0] for row in rows),
        names.numbers(row[1] for row in rows),
        np.array([row[2] for row in rows], dtype=np.float64),
        np.array([row[3] for row in rows], dtype=np.float32),
        np.full(len(rows), -1, dtype=np.int32),
        np.full(len(rows), -1, dtype=np.int32),
        details.numbers(row[4] for row in rows),
    ]
    traces = [group.trace for group in groups]
    counts = [len(trace.kinds) for trace in traces]

    def of_spans(name: str, dtype: type) -> np.ndarray:
        values = chain.from_iterable(getattr(trace, name) for trace in traces)
        return np.fromiter(values, dtype, sum(counts))

    def of_groups(values: Iterable[float], dtype: type) -> np.ndarray:
        return np.repeat(np.fromiter(values, dtype, len(groups)), counts)

    firsts = list(accumulate((len(trace.place_names) for trace in traces), initial=0))[:-1]
    places = lanes.numbers(chain.from_iterable(trace.place_names for trace in traces))
    episodes, no_text = of_spans("episodes", np.int32), details.number("")
    texts = {
        _EPISODES * index + episode: details.number(text)
        for index, group in enumerate(groups)
        for episode, text in sorted(_details(group).items())
    }
    keys = np.fromiter(texts, np.int64, len(texts))
    sought = _EPISODES * of_groups(range(len(groups)), np.int64) + episodes
    at = np.searchsorted(keys, sought)
    has_text = np.append(keys, -_EPISODES)[at] == sought
    found = [
        places[of_groups(firsts, np.int64) + of_spans("places", np.int32)],
        kinds[np.minimum(of_spans("kinds", np.int32), len(kinds) - 1)],
        of_groups((seconds_of(trace.start_time) for trace in traces), np.float64)
        + of_spans("starts", np.float64),
        of_spans("durations", np.float32),
        of_groups(map(ids.number, (group.group_id for group in groups)), np.int32),
        episodes,
        np.where(has_text, np.array([*texts.values(), no_text], dtype=np.int32)[at], no_text),
    ]
    lane, name, start, duration, of, episode, detail = map(
        np.concatenate, zip(own, found, strict=True)
    )
    return pa.table(
        [
            lanes.column(lane),
            names.column(name),
            pa.array(start),
            pa.array(duration),
            ids.column(np.maximum(of, 0), mask=of < 0),
            pa.array(episode, mask=episode < 0),
            details.column(detail),
        ],
        schema=SCHEMA,
    )


def _is_whole(group: pb.FinishedGroup) -> bool:
    """Whether every span has all that is said of one, a kind, and a place that has a name."""
    trace = group.trace
    columns = (trace.kinds, trace.episodes, trace.places, trace.starts, trace.durations)
    if len({len(column) for column in columns}) > 1:
        return False
    if min(trace.kinds) < 0 or len(group.rewards) != len(group.response_lengths):
        return False
    return min(trace.places) >= 0 and max(trace.places) < len(trace.place_names)


def _details(group: pb.FinishedGroup) -> dict[int, str]:
    """By episode: what came of it. Of several samples of an episode the last one counts."""
    episodes = [each.episode for each in group.details]
    episodes += range(len(episodes), len(group.rewards))
    return {
        episode: f"reward {reward:g}, {length} tokens"
        for episode, reward, length in zip(
            episodes, group.rewards, group.response_lengths, strict=False
        )
    }
