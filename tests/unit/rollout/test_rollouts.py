"""Rollouts of a worker whose listeners leave, or which stops, at awkward moments."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.config import EpisodesConfig, GraderPoolConfig
from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    Task,
    TaskRequest,
    TextTokenizer,
)
from services.rollout.environments.runner import Environments
from services.rollout.episodes.group import (
    GroupResult,
    GroupRunner,
    GroupSettings,
    GroupSpec,
    GroupTools,
)
from services.rollout.episodes.rollouts import (
    MESSAGE_BYTES,
    Rollout,
    WorkerDrainingError,
    put_together,
)
from services.rollout.episodes.spool import DirectoryJournals, Spool
from services.rollout.episodes.worker import Rollouts
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import trace_pb2
from sluice.config import Config
from sluice.runtime.waits import Waits
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample
from tests.patience import PATIENCE

TURNS = 100  # of the loop: more than any answer takes that waits for nothing
HERE = "tests.unit.rollout.test_rollouts"

_making, _made = threading.Event(), threading.Event()


class DoorSettings(Config):
    pass


class Door(Environment):
    """Made once `_made` is set."""

    name = "door"
    settings_type = DoorSettings
    placement = Placement.INLINE

    def __init__(self, settings: DoorSettings, tokenizer: TextTokenizer | None = None) -> None:
        _making.set()
        assert _made.wait(2 * PATIENCE)

    @classmethod
    def check(cls, settings: Any, request: TaskRequest) -> None:
        pass

    def make_task(self, request: TaskRequest) -> Task:
        raise NotImplementedError

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        raise NotImplementedError


class HeldJournals(DirectoryJournals):
    """Groups become known once `go` is set."""

    begun, go = threading.Event(), threading.Event()

    def record(self, request_id: str, groups: Mapping[str, BlobReference]) -> None:
        self.begun.set()
        assert self.go.wait(2 * PATIENCE)
        super().record(request_id, groups)


@dataclass
class Worker:
    """Rollouts whose groups sample nothing and are stored at once."""

    rollouts: Rollouts
    journals: HeldJournals
    runs: list[str] = field(default_factory=list)

    async def events(self, request: pb.RolloutRequest) -> list[pb.RolloutResponse]:
        async with asyncio.timeout(PATIENCE):
            return [each async for events in self.rollouts.follow(request) for each in events]

    async def leave_while_storing(self, request: pb.RolloutRequest) -> None:
        """Listen until the group of a rollout is being stored."""
        listener = asyncio.create_task(self.events(request))
        await begun(self.journals.begun)
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)


async def begun(event: threading.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        while not event.is_set():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(
    root: Path, monkeypatch: pytest.MonkeyPatch, **config: Any
) -> AsyncIterator[Worker]:
    blobs = BlobStore(root, sync=False)
    journals = HeldJournals(root, blobs, sync=False)
    journals.begun, journals.go = threading.Event(), threading.Event()
    _making.clear()
    _made.set()
    absent: Any = None
    environments = Environments({"door": f"{HERE}:Door"}, GraderPoolConfig(), absent)
    tools = GroupTools(absent, absent, Spool(blobs, journals), Waits())
    worker = Worker(Rollouts(EpisodesConfig(**config), environments, tools), journals)

    async def run(_: GroupRunner, group: GroupSpec, settings: GroupSettings) -> GroupResult:
        worker.runs.append(group.group_id)
        samples = [sample(group.group_id, tag=len(worker.runs))]
        blob = await tools.spool.put(settings.request_id, samples, {})
        return GroupResult(samples, blob, trace_pb2.GroupTrace())

    monkeypatch.setattr(GroupRunner, "run", run)
    try:
        yield worker
    finally:
        journals.go.set()
        _made.set()
        await worker.rollouts.close()
        await tools.spool.close()
        await environments.close()


def sample(group_id: str, tag: int) -> Sample:
    return Sample(
        sample_id=f"{group_id}/0",
        group_id=group_id,
        token_ids=np.full(4, tag, np.int32),
        prompt_length=2,
        finish_reason="stop",
        columns={"reward": 1.0},
    )


def rollout_request(name: str) -> pb.RolloutRequest:
    request = pb.RolloutRequest(
        request_id=name, environment=pb.EnvironmentSpec(name="door"), sample_count=1
    )
    request.sampling.max_new_tokens = 1
    request.groups.add(group_id="g", index=0)
    return request


async def test_callers_of_a_rollout_that_is_opening_are_told_that_the_worker_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch) as worker:
        _made.clear()
        listener = asyncio.create_task(worker.events(rollout_request("r")))
        await begun(_making)
        canceller = asyncio.create_task(worker.rollouts.cancel("r", []))
        await asyncio.sleep(0)  # which waits for the rollout from here on
        await worker.rollouts.close()
        for caller in (listener, canceller):
            with pytest.raises(WorkerDrainingError):
                await caller


async def test_an_environment_that_is_made_slowly_holds_none_of_the_loops_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All disk access waits for them."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with running(tmp_path, monkeypatch) as worker:
        worker.journals.go.set()
        _made.clear()
        listener = asyncio.create_task(worker.events(rollout_request("r")))
        await begun(_making)
        async with asyncio.timeout(PATIENCE):
            await asyncio.to_thread(_made.set)
            assert [event.finished.group_id for event in await listener] == ["g"]


async def test_a_listener_is_sent_away_once_what_was_being_stored_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch) as worker:
        listener = asyncio.create_task(worker.events(rollout_request("r")))
        await begun(worker.journals.begun)
        closing = []
        for _ in range(2):  # once drained, a worker is closed
            closing.append(asyncio.create_task(worker.rollouts.close()))
            for _ in range(TURNS):
                await asyncio.sleep(0)
        assert not listener.done(), "another worker would find nothing, and run the group again"
        worker.journals.go.set()
        with pytest.raises(WorkerDrainingError):
            await listener
        assert worker.journals.open("r", "another").finished.keys() == {"g"}
        await asyncio.gather(*closing)


def test_messages_of_several_events_keep_order_and_end_where_they_are_full() -> None:
    def event(name: str, size: int = 0) -> pb.RolloutResponse:
        return pb.RolloutResponse(
            finished=pb.FinishedGroup(group_id=name, prompt_digest="d" * size)
        )

    events = [event("a"), event("b", MESSAGE_BYTES), event("c"), event("d")]
    messages = list(put_together(events))
    assert [len(message.more) for message in messages] == [1, 1]
    assert [e for m in messages for e in (m, *m.more)][1] == events[1]
    names = [e.finished.group_id for m in messages for e in (m, *m.more)]
    assert names == ["a", "b", "c", "d"]
    assert not any(event.more for event in events), "the events stay as they are"
    assert list(put_together([])) == []


async def test_a_rollout_stopped_twice_does_not_end_as_if_it_were_settled() -> None:
    rollout = Rollout("r", lambda _: None)
    never: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()

    async def run() -> GroupResult:
        return await never

    rollout.start([("g", run())])
    await rollout.stop()
    await rollout.stop()
    with pytest.raises(WorkerDrainingError):
        _ = [events async for events in rollout.follow()]


async def test_a_caller_who_comes_while_an_orphan_is_stopped_begins_no_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch, orphan_seconds=0.001) as worker:
        request = rollout_request("r")
        await worker.leave_while_storing(request)
        async with asyncio.timeout(PATIENCE):
            while any(rollout.open_count for rollout in worker.rollouts._begun()):
                await asyncio.sleep(0.005)
        caller = asyncio.create_task(worker.events(request))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        worker.journals.go.set()
        with pytest.raises(WorkerDrainingError):
            await caller
        (event,) = await worker.events(request)
        assert event.finished.group_id == "g"
        assert worker.runs == ["g"]


async def test_a_rollout_that_settles_unheard_leaves_no_timer_for_the_next_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch, orphan_seconds=3600) as worker:
        await worker.leave_while_storing(rollout_request("r"))
        assert worker.rollouts._orphans.keys() == {"r"}
        (rollout,) = worker.rollouts._begun()
        worker.journals.go.set()
        async with asyncio.timeout(PATIENCE):
            await rollout.settled.wait()
        assert not worker.rollouts._orphans
