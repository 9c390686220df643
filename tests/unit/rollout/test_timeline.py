"""Spans of an episode follow each other, whatever happens in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine.interface import Delta, FinishReason, Timing
from services.rollout.episodes.trajectory import ALL, Timeline
from sluice.api.rollout.v1 import trace_pb2 as pb

EPISODES = 3


def delta_of(timing: Timing | None) -> Delta:
    return Delta(
        index=0,
        token_ids=(1,),
        logprobs=(0.0,),
        logprobs_t1=(0.0,),
        spans=(),
        finish_reason=FinishReason.STOP,
        timing=timing,
    )


def ends_of(trace: pb.GroupTrace) -> list[float]:
    """The end of every episode, whose spans must leave no gap."""
    ends = [0.0] * EPISODES
    rows = zip(trace.episodes, trace.starts, trace.durations, strict=True)
    for episode, start, duration in rows:
        for each in range(EPISODES) if episode == ALL else [episode]:
            assert start == pytest.approx(ends[each], rel=1e-5)  # they are 32-bit numbers
            assert duration > 0
            ends[each] = start + duration
    return ends


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


seconds = st.floats(0.001, 5.0)
events = st.lists(
    st.tuples(
        seconds,
        st.one_of(
            st.none(),  # a mark of all
            st.integers(0, EPISODES - 1),  # a mark of one
            st.tuples(  # an answer to one, with what the engine says
                st.integers(0, EPISODES - 1),
                st.none() | st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0, 3)),
            ),
        ),
    ),
    max_size=20,
)


@settings(max_examples=50)
@given(events)
def test_spans_add_up_to_the_whole_time_of_an_episode(made: list) -> None:
    clock = Clock()
    timeline = Timeline(EPISODES, clock)
    for passed, event in made:
        clock.seconds += passed
        if event is None:
            timeline.mark(pb.SPAN_KIND_REWARD, "judge")
        elif isinstance(event, int):
            timeline.mark(pb.SPAN_KIND_TOOL, "tool", [event])
        else:
            episode, parts = event
            timing = None
            if parts is not None:
                timing = Timing(queue=parts[0], prefill=parts[1], decode=parts[2])
            timeline.sampled("engine", {episode: delta_of(timing)})
    clock.seconds += 1
    timeline.mark(pb.SPAN_KIND_STORE, "store")
    trace = timeline.to_proto()
    assert ends_of(trace) == pytest.approx([clock.seconds] * EPISODES, rel=1e-5)


def test_what_the_engine_says_is_cut_at_the_time_that_passed() -> None:
    clock = Clock()
    timeline = Timeline(1, clock)
    clock.seconds = 1.0
    timeline.sampled("engine", {0: delta_of(Timing(queue=0.5, prefill=0.25, decode=3.0))})
    trace = timeline.to_proto()
    assert list(trace.durations) == [0.5, 0.25, 0.25]
    assert list(trace.kinds) == [
        pb.SPAN_KIND_QUEUE,
        pb.SPAN_KIND_PREFILL,
        pb.SPAN_KIND_DECODE,
    ]


def test_what_all_do_together_is_one_span() -> None:
    clock = Clock()
    timeline = Timeline(EPISODES, clock)
    clock.seconds = 1.0
    timeline.mark(pb.SPAN_KIND_TASK, "prompts")
    clock.seconds = 2.0
    timeline.mark(pb.SPAN_KIND_TOOL, "tool", [1])
    clock.seconds = 3.0
    timeline.mark(pb.SPAN_KIND_SIBLINGS, "prompts")
    trace = timeline.to_proto()
    assert list(trace.episodes) == [ALL, 1, 0, 1, 2]
    assert list(trace.durations) == [1, 1, 2, 1, 2]


def test_siblings_that_an_engine_began_together_share_the_spans_before_they_decode() -> None:
    clock = Clock()
    timeline = Timeline(2, clock)
    clock.seconds = 4.0
    timings = [Timing(queue=1.0, prefill=0.5, decode=decode) for decode in (1.0, 2.5)]
    timeline.sampled("engine", {i: delta_of(timing) for i, timing in enumerate(timings)})
    trace = timeline.to_proto()
    assert list(trace.episodes) == [ALL, ALL, 0, 1]
    assert list(trace.starts) == [0, 1, 1.5, 1.5]
    assert list(trace.durations) == [1, 0.5, 1, 2.5]
