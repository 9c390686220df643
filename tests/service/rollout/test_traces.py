"""Finished groups say where the time of their samples went, as it was."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.rollout.episodes.episode import Episode
from services.rollout.episodes.trajectory import Trajectory
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import trace_pb2
from tests.patience import PATIENCE
from tests.service.rollout import talk
from tests.service.rollout.harness import (
    Episodes,
    Models,
    Store,
    copy_rows,
    rollout_request,
    running_episodes,
)

ALL = -1
PAUSE_SECONDS = 0.2


def spans_of(group: pb.FinishedGroup, episode: int) -> dict[str, float]:
    """Seconds by kind; the spans follow each other."""
    trace, end = group.trace, 0.0
    seconds: dict[str, float] = {}
    for index, of in enumerate(trace.episodes):
        if of in (ALL, episode):
            assert trace.starts[index] == pytest.approx(end, abs=1e-3)
            end = trace.starts[index] + trace.durations[index]
            kind = trace_pb2.SpanKind.Name(trace.kinds[index]).removeprefix("SPAN_KIND_").lower()
            seconds[kind] = seconds.get(kind, 0.0) + trace.durations[index]
    return seconds


async def wait_in_engine(episodes: Episodes, count: int) -> None:
    """Until so many samples wait in the engine."""
    async with asyncio.timeout(PATIENCE):
        while (await episodes.engine.get()).rank_loads[0].waiting_count < count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("split", [False, True], ids=["one process", "two processes"])
async def test_spans_add_up_to_the_time_of_a_group(
    store: Store, models: Models, split: bool
) -> None:
    async with running_episodes(store, models.first, split=split) as episodes:
        await episodes.finished(rollout_request(copy_rows(1)))  # what is slow the first time
        await episodes.engine.stub.Pause(engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_IN_PLACE))
        began, start = time.time(), time.monotonic()
        request = rollout_request(copy_rows(2), max_new_tokens=30)
        call = asyncio.create_task(episodes.finished(request))
        await wait_in_engine(episodes, 8)
        arrived = time.monotonic()
        await asyncio.sleep(PAUSE_SECONDS)
        paused = time.monotonic() - arrived
        await episodes.engine.stub.Resume(engine_pb.ResumeRequest())
        groups = await call
        wall = time.monotonic() - start
    for group in groups.values():
        assert began - 0.01 <= group.trace.start_time.ToNanoseconds() / 1e9 <= began + wall
        whole = [sum(spans_of(group, episode).values()) for episode in range(4)]
        assert whole == pytest.approx([whole[0]] * 4, rel=1e-3)
        assert paused <= whole[0] <= wall
        for episode in range(4):
            assert spans_of(group, episode)["queue"] >= paused
        lengths = dict(enumerate(group.response_lengths))
        longest, shortest = max(lengths, key=lengths.get), min(lengths, key=lengths.get)
        if lengths[longest] > lengths[shortest]:
            decode = [spans_of(group, episode)["decode"] for episode in (shortest, longest)]
            assert decode[0] < decode[1]
        for kind in ("lease", "prefill", "decode", "store"):
            assert spans_of(group, longest)[kind] > 0


async def test_steps_of_an_environment_are_spans_of_their_own(store: Store, models: Models) -> None:
    environments = {"talk": talk.PATH}
    async with running_episodes(store, models.first, environments=environments) as episodes:
        rows = {f"g{index}": row for index, row in enumerate(copy_rows(4))}
        request = rollout_request(rows, environment="talk", max_new_tokens=12)
        groups = await episodes.finished(request)
    turns = {
        (name, detail.episode): detail.turn_count
        for name, group in groups.items()
        for detail in group.details
    }
    assert max(turns.values()) > 1, "the test needs an episode of several turns"
    for (name, episode), count in turns.items():
        trace = groups[name].trace
        kinds = [
            kind
            for kind, of in zip(trace.kinds, trace.episodes, strict=True)
            if of in (episode, ALL)
        ]
        assert kinds.count(trace_pb2.SPAN_KIND_PREFILL) >= count
        if count > 1:
            assert kinds.count(trace_pb2.SPAN_KIND_TOOL) >= count - 1


AGENT_SECONDS = 0.2


async def agent(episode: Episode) -> list[Trajectory]:
    """Works for a while before and after its answer."""
    trajectory = episode.begin()
    await asyncio.sleep(AGENT_SECONDS)
    await episode.sample(trajectory)
    await asyncio.sleep(AGENT_SECONDS)
    return [trajectory]


async def test_the_work_of_a_generate_function_is_no_wait_for_an_engine(
    store: Store, models: Models
) -> None:
    async with running_episodes(store, models.first, user_modules=("tests.service",)) as episodes:
        settings = {"generate": "tests.service.rollout.test_traces:agent"}
        groups = await episodes.finished(rollout_request(copy_rows(1), settings=settings))
    trace = groups["g0"].trace
    for episode in range(4):
        kinds = [
            (kind, duration)
            for kind, of, duration in zip(trace.kinds, trace.episodes, trace.durations, strict=True)
            if of in (ALL, episode)
        ]
        tools = [duration for kind, duration in kinds if kind == trace_pb2.SPAN_KIND_TOOL]
        assert len(tools) == 2 and min(tools) >= AGENT_SECONDS
        order = [kind for kind, _ in kinds if kind != trace_pb2.SPAN_KIND_QUEUE]
        assert order[:3] == [
            trace_pb2.SPAN_KIND_TASK,
            trace_pb2.SPAN_KIND_TOOL,
            trace_pb2.SPAN_KIND_LEASE,
        ]


async def test_a_trace_is_told_once(store: Store, models: Models) -> None:
    """A worker remembers what it announced, but not for how long every sample took."""
    async with running_episodes(store, models.first) as episodes:
        request = rollout_request(copy_rows(2))
        first = await episodes.finished(request)
        again = await episodes.finished(request)
    assert all(group.trace.kinds for group in first.values())
    assert not any(group.trace.kinds for group in again.values())
    assert {name: group.blob for name, group in first.items()} == {
        name: group.blob for name, group in again.items()
    }
