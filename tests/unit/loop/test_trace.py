"""What a run keeps of its trace, and what the page made of it says."""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import trace_pb2
from sluice.config import ConfigError
from sluice.loop import trace
from sluice.loop.config import TraceConfig
from sluice.loop.timeline.page import (
    NoTraceError,
    Span,
    Trace,
    load,
    pack,
    render,
    summarise,
    write_page,
)
from sluice.loop.trace import LOOP, STEP, TRAINER, RunTrace, read_trace, trace_files

ALL = -1


def group_of(name: str, start: int = 100, episodes: int = 2) -> pb.FinishedGroup:
    """Task 1 s; each sample 2 s of queue and 1 s per its number + 1 of decode; reward 1 s."""
    group = pb.FinishedGroup(
        group_id=name,
        rewards=[0.5] * episodes,
        response_lengths=[7] * episodes,
        details=[pb.SampleDetails(episode=index) for index in range(episodes)],
    )
    found = group.trace
    found.start_time.FromSeconds(start)
    found.place_names.extend(["maths", "engine"])
    kinds = trace_pb2.SpanKind.Value

    def add(kind: str, episode: int, place: int, begin: float, seconds: float) -> None:
        found.kinds.append(kinds(f"SPAN_KIND_{kind}"))
        found.episodes.append(episode)
        found.places.append(place)
        found.starts.append(begin)
        found.durations.append(seconds)

    add("TASK", ALL, 0, 0, 1)
    for episode in range(episodes):
        add("QUEUE", episode, 1, 1, 2)
        add("DECODE", episode, 1, 3, episode + 1)
        if episode + 1 < episodes:
            add("SIBLINGS", episode, 0, episode + 4, episodes - episode - 1)
    add("REWARD", ALL, 0, 3 + episodes, 1)
    return group


def written(root: Path, steps: int, config: TraceConfig | None = None) -> Path:
    """A run of steps of 10 s: 6 s of waiting for a group, 3 s of training."""
    run = RunTrace(root, config or TraceConfig())
    for step in range(1, steps + 1):
        begin = 100.0 + 10 * (step - 1)
        run.add_group(group_of(f"g{step}", int(begin)))
        run.add(LOOP, "wait for groups", begin, begin + 6)
        run.add(TRAINER, "forward_backward", begin + 6, begin + 9)
        run.add("engine", "prepare", begin + 8, begin + 9.5, "version 3")
        run.add(LOOP, STEP, begin, begin + 10, f"step {step}")
        run.flush(step)
    return root


def test_spans_come_back_as_they_were_measured(tmp_path: Path) -> None:
    found = load(written(tmp_path, 2))
    assert found.steps == (1, 2)
    decodes = [span for span in found.samples if span.name == "decode"]
    assert [(s.group, s.episode, s.start, s.duration) for s in decodes] == [
        ("g1", 0, 103, 1),
        ("g1", 1, 103, 2),
        ("g2", 0, 113, 1),
        ("g2", 1, 113, 2),
    ]
    assert decodes[0].lane == "engine"
    assert decodes[0].detail == "reward 0.5, 7 tokens"
    assert [s.detail for s in found.of("engine")] == ["version 3"] * 2


def test_only_the_latest_steps_stay(tmp_path: Path) -> None:
    written(tmp_path, 9, TraceConfig(steps=4))
    assert [path.stem for path in trace.trace_files(tmp_path / "traces")] == [
        f"{step:07}" for step in (6, 7, 8, 9)
    ]
    assert not (written(tmp_path / "off", 2, TraceConfig(steps=0)) / "traces").exists()


def test_groups_beyond_the_limit_of_a_step_are_counted(tmp_path: Path) -> None:
    run = RunTrace(tmp_path, TraceConfig(spans_per_step=15))
    for index in range(3):
        run.add_group(group_of(f"g{index}"))
    run.add(LOOP, STEP, 100, 110, "step 1")
    run.add(LOOP, "wait for groups", 100, 106)
    run.flush(1)
    found = load(tmp_path)
    assert {span.group for span in found.samples} == {"g0", "g1"}
    assert found.left_out == len(group_of("g").trace.kinds)


@pytest.mark.parametrize(
    "wrong", ["place below", "place beyond", "episodes missing", "kind below", "lengths missing"]
)
def test_what_is_no_whole_trace_is_counted_and_costs_the_others_nothing(
    tmp_path: Path, wrong: str
) -> None:
    run, broken = RunTrace(tmp_path, TraceConfig()), group_of("broken")
    if wrong == "episodes missing":
        del broken.trace.episodes[-1]
    elif wrong == "kind below":
        broken.trace.kinds[1] = -(2**31)
    elif wrong == "lengths missing":
        del broken.response_lengths[:]
    else:
        broken.trace.places[1] = -1 if wrong == "place below" else 2
    for group in (group_of("before"), broken, group_of("after", start=200)):
        run.add_group(group)
    run.add(LOOP, STEP, 100, 110, "step 1")
    run.flush(1)
    found = load(tmp_path)
    assert {span.group for span in found.samples} == {"before", "after"}
    assert found.left_out == len(broken.trace.kinds)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e38])
def test_spans_at_no_time_that_there_is_are_left_out_and_counted(
    tmp_path: Path, number: float
) -> None:
    run, broken = RunTrace(written(tmp_path, 1), TraceConfig()), group_of("broken", start=110)
    broken.trace.durations[1] = broken.trace.starts[2] = number
    run.add_group(broken)
    run.add(LOOP, "wait for groups", 110, 112)
    run.add(TRAINER, "upload", 112, 113)
    run.add(LOOP, STEP, 110, 120, "step 2")
    run.flush(2)
    found = load(tmp_path)
    assert found.left_out == 2
    assert sum(span.group == "broken" for span in found.samples) == len(broken.trace.kinds) - 2
    assert found.steps == (1, 2)
    write_page(tmp_path, None, None)


def test_one_huge_number_of_an_episode_takes_no_memory(tmp_path: Path) -> None:
    far, run = group_of("far"), RunTrace(tmp_path, TraceConfig())
    for episode, largest in ((0, -(2**31)), (1, 2**31 - 1)):
        far.details[episode].episode = largest
        far.trace.episodes[:] = [
            largest if each == episode else each for each in far.trace.episodes
        ]
    far.rewards[1] = 0.25
    for group in (far, group_of("near", start=200)):
        run.add_group(group)
    run.add(LOOP, STEP, 100, 110, "step 1")
    run.flush(1)
    told = {(span.group, span.episode): span.detail for span in load(tmp_path).samples}
    assert told["far", 2**31 - 1] == "reward 0.25, 7 tokens"
    assert told["near", 0] == told["near", 1] == "reward 0.5, 7 tokens"


def test_a_page_shows_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    written(tmp_path, 5)
    assert load(tmp_path, 2, 3).steps == (2, 3)
    with pytest.raises(NoTraceError, match="traces of steps 1-5"):
        load(tmp_path, 8, 9)
    with pytest.raises(NoTraceError, match="holds no traces"):
        load(tmp_path / "elsewhere")


def test_a_step_that_trained_nothing_is_no_step_to_be_shown(tmp_path: Path) -> None:
    """A run was ended while it waited for groups, and earlier releases kept that as a step."""
    written(tmp_path, 3)
    run = RunTrace(tmp_path, TraceConfig())
    run.add(LOOP, "wait for groups", 130, 131)
    run.add(LOOP, STEP, 130, 131, "step 4")
    run.add_group(group_of("g4", 130))
    run.flush(4)
    assert load(tmp_path).steps == load(tmp_path, 1, 9).steps == (1, 3)
    with pytest.raises(NoTraceError, match=r"has traces of steps 1-3$"):
        load(tmp_path, 4, 4)
    with pytest.raises(NoTraceError, match=r"has traces of steps 1-3$"):
        load(tmp_path, 7, 9)


def test_more_steps_than_a_page_takes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """All of 6,900 steps took 5 GB, for a page of 144 MB."""
    rows = pa.ipc.open_file(written(tmp_path, 1) / "traces/0000001.arrow").read_all().num_rows
    read: list[Path] = []

    def counted(path: Path) -> pa.Table:
        read.append(path)
        return read_trace(path)

    for steps in (10, 100):  # ten times the steps are no more work
        written(tmp_path, steps)
        read.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sluice.loop.timeline.page.read_trace", counted)
            with pytest.raises(ConfigError) as error:
                write_page(tmp_path, None, "all", str(5 * rows))
        assert len(read) == 6
        assert f"--steps {steps - 4}-{steps}; --spans N takes more" in str(error.value)
    assert (
        f"steps {steps - 4}-{steps}"
        in write_page(tmp_path, None, f"{steps - 4}-{steps}", str(5 * rows))[-1]
    )
    assert "steps 1-100" in write_page(tmp_path, None, "all", str(100 * rows))[-1]
    assert "steps 91-100" in write_page(tmp_path, None, None, str(10 * rows))[-1]
    for text in ("0", "-1", "x", "1.5", "9" * 5000, "²"):
        with pytest.raises(ConfigError, match=r"--spans: .* is no number of spans"):
            write_page(tmp_path, None, "all", text)


def test_the_latest_steps_are_shown_where_all_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 5)
    monkeypatch.setattr("sluice.loop.timeline.page.MOST_SPANS", 25)
    found = load(tmp_path)
    assert found.steps == (4, 5)
    assert found.is_shortened
    assert not load(tmp_path, 1, 5).is_shortened
    assert "--steps all" in write_page(tmp_path, tmp_path / "some.html", None)[-1]
    assert "--steps all" not in write_page(tmp_path, tmp_path / "all.html", "all")[-1]
    assert "steps 1-5" in write_page(tmp_path, tmp_path / "all.html", "all")[-1]


def test_a_step_that_cannot_be_read_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, 3)
    path = trace_files(tmp_path / "traces")[1]
    path.unlink()
    path.mkdir()
    assert "steps 1-3" in write_page(tmp_path, tmp_path / "all.html", "all")[-1]
    assert str(path) in caplog.text


def test_steps_forgotten_while_they_are_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 5)
    listed = trace_files(tmp_path / "traces")
    monkeypatch.setattr("sluice.loop.timeline.page.trace_files", lambda _: listed)
    for path in listed[:3]:
        path.unlink()
    assert load(tmp_path).steps == (4, 5)
    with pytest.raises(NoTraceError, match="no more"):
        load(tmp_path, 1, 3)


def test_the_summary_adds_up(tmp_path: Path) -> None:
    summary = summarise(load(written(tmp_path, 2)))
    assert summary.sample_count == 4
    # a span of a whole group is one of each of its samples
    assert summary.samples == {"queue": 8, "decode": 6, "task": 4, "reward": 4, "siblings": 2}
    # beside forward_backward, engines' time is no more of the step; other is what nothing covers
    assert summary.steps == {"wait for groups": 12, "forward_backward": 6, "prepare": 1, "other": 1}
    assert sum(summary.steps.values()) == 2 * 10
    (engine,) = summary.engines
    assert engine.busy == pytest.approx(4 / 20)  # 2 s of each step
    assert engine.running == pytest.approx(6 / 4)


def test_the_page_asks_the_network_for_nothing_and_is_whole(tmp_path: Path) -> None:
    page = render(load(written(tmp_path, 3)), "a run")
    assert not re.search(r"https?:|\bsrc\s*=|@import|url\(|<link|fetch\(|XMLHttp", page)
    assert "<!--" not in page
    assert page.count("<script") == page.count("</script>") == 2


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    run = RunTrace(tmp_path, TraceConfig())
    run.add_group(group_of("<!--<script></script><blink>&"))
    run.add(LOOP, "wait for groups", 100, 101)
    run.add(LOOP, STEP, 100, 110, "step 1")
    run.flush(1)
    page = render(load(tmp_path), "<i>title</i>")
    assert "<blink>" not in page and "<!--" not in page  # but as a string
    assert "<i>title</i>" not in page
    assert page.count("</script>") == 2


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path: Path) -> None:
    written(tmp_path, 2)
    write_page(tmp_path, None, None)
    before = (tmp_path / "trace.html").read_bytes()
    there = sorted(path.name for path in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(ConfigError, match=r"-o: .*/trace\.html: File too large"):
            write_page(tmp_path, None, "1-1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "trace.html").read_bytes() == before
    assert there == sorted(path.name for path in tmp_path.iterdir())
    write_page(tmp_path, Path("/dev/null"), None)  # which stays what it is
    assert not Path("/dev/null").is_file()


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file where the directory should be")
    written(tmp_path, 2)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
async def test_a_clock_that_is_set_meanwhile_makes_no_span_longer_or_negative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    run, now = RunTrace(tmp_path, TraceConfig()), time.time()
    trace.use(run)
    with trace.span(LOOP, STEP), trace.span(TRAINER, "upload"):
        monkeypatch.setattr(time, "time", lambda: now + jump)
    run.flush(1)
    (path,) = trace_files(tmp_path / "traces")
    assert all(0 <= each < 60 for each in trace.read_trace(path)["duration"].to_pylist())


async def test_spans_go_to_the_trace_in_use(tmp_path: Path) -> None:
    with trace.span(LOOP, "nobody listens"):
        pass
    run = RunTrace(tmp_path, TraceConfig())
    trace.use(run)
    with trace.span(LOOP, STEP, "step 1"), trace.span(LOOP, "wait for groups"):
        trace.add_group(group_of("g"))
        with trace.span(TRAINER, "upload"):
            pass
    run.flush(1)
    assert {span.name for span in load(tmp_path).of(LOOP)} == {"wait for groups", STEP}


intervals = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda pair: (pair[0], sum(pair))),
    max_size=30,
)


@settings(max_examples=50)
@given(intervals)
def test_bars_of_a_row_do_not_overlap_and_rows_are_few(made: list[tuple[float, float]]) -> None:
    rows = pack(made)
    for one, (start, end) in enumerate(made):
        for other, (begin, until) in enumerate(made[:one]):
            assert rows[one] != rows[other] or end <= begin or until <= start
    most = max((sum(a <= t < b for a, b in made) for t, _ in made), default=0)
    assert max(rows, default=-1) + 1 == most


@settings(max_examples=50)
@given(intervals)
def test_work_counts_as_far_as_it_lies_inside_steps(made: list[tuple[float, float]]) -> None:
    steps = [Span(LOOP, STEP, 6.0 * number, 4.0, detail=f"step {number}") for number in range(5)]
    work = [Span(TRAINER, "work", start, end - start) for start, end in made]
    covered = sum(
        any(start <= second < end for start, end in made)
        for step in steps
        for second in range(int(step.start), int(step.end))
    )
    shares = summarise(Trace((0, 4), [*steps, *work], 0, False)).steps
    assert shares == {"other": 20 - covered} | ({"work": covered} if made else {})


class _CountedSpan(Span):
    ends = 0

    @property
    def end(self) -> float:
        _CountedSpan.ends += 1
        return self.start + self.duration


def test_ten_times_the_steps_are_ten_times_the_work() -> None:
    def work(steps: int) -> int:
        spans = list[Span]()
        for step in range(steps):
            spans.append(_CountedSpan(LOOP, STEP, 10.0 * step, 9.0, detail=f"step {step}"))
            spans.append(_CountedSpan(TRAINER, "work", 10.0 * step, 5.0))
        before = _CountedSpan.ends
        summarise(Trace((0, steps - 1), spans, 0, False))
        return _CountedSpan.ends - before

    assert work(400) <= 10 * work(40)


class _CountedList(list[Span]):
    passes = 0

    def __iter__(self) -> Iterator[Span]:
        self.passes += 1
        return super().__iter__()


def test_a_page_of_many_engines_reads_the_spans_as_often_as_one_of_few() -> None:
    def passes(engines: int) -> int:
        spans = _CountedList([Span(LOOP, STEP, 0.0, 100.0, detail="step 0")])
        spans += [Span(f"e{number}", "decode", 1.0, 1.0, "g", 0) for number in range(engines)]
        spans += [Span(f"e{number}", "prepare", 3.0, 1.0) for number in range(engines)]
        render(Trace((0, 0), spans, 0, False), "run")
        return spans.passes

    assert passes(50) == passes(5)


def test_a_sample_that_comes_back_to_an_engine_is_two_bars() -> None:
    spans = [
        Span("engine", "decode", 0, 1, "g", 0),
        Span("tools", "tool", 1, 1, "g", 0),
        Span("engine", "decode", 2, 1, "g", 0),
        Span("engine", "decode", 1, 1, "g", 1),
        Span(LOOP, STEP, 0, 3, detail="step 1"),
    ]
    page = render(Trace((1, 1), spans, 0, False), "run")
    found = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    (engine,) = json.loads(found[1])["engines"]
    assert engine["rowCount"] == 1  # they take turns in one slot
    assert [(span[0], span[2]) for span in engine["spans"]] == [(0, 0), (0, 0), (0, 1)]


def test_a_damaged_trace_is_left_out(tmp_path: Path) -> None:
    """Wherever a bit flips, or the file ends: the page of the other steps can still be made."""
    trace = RunTrace(tmp_path, TraceConfig())
    for step in (1, 2):
        trace.add(LOOP, STEP, 10.0 * step, 10.0 * step + 5, f"step {step}")
        trace.add(TRAINER, "upload", 10.0 * step, 10.0 * step + 1)
        trace.flush(step)
    path = tmp_path / "traces" / "0000002.arrow"
    data = path.read_bytes()
    flipped = [
        data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
        for index in range(0, len(data), 37)
    ]
    for damaged in (*flipped, *(data[: len(data) * share // 8] for share in range(8))):
        path.write_bytes(damaged)
        assert load(tmp_path).spans
    path.write_bytes(b"")
    assert load(tmp_path).steps == (1, 1)
