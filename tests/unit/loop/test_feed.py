"""The feed over a real server whose episodes follow a script."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from contextlib import closing

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.router.v1 import router_service_pb2_grpc as router_grpc
from sluice.client import RemoteError, RouterClient
from sluice.loop import workers
from sluice.loop.dispatcher import DispatcherConfig, RolloutDispatcher
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.workers import EpisodeWorkers, RolloutCall, RolloutFailedError
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
INTERNAL = grpc.StatusCode.INTERNAL.value[0]


class Episodes(pb_grpc.RolloutServiceServicer, router_grpc.RouterServiceServicer):
    """Finishes a group when its gate opens; fails those named in `failing`."""

    def __init__(self) -> None:
        self.address, self.version = "", 1
        self.failing: dict[str, int] = {}  # group -> times it fails yet
        self.failure = INTERNAL
        self.requests: list[str] = []
        self.hold: set[str] = set()
        self.release = asyncio.Event()
        self.issued: list[str] = []
        self.breaks = 0  # streams that end in an error after their first group
        self.refuses = False
        self.refusal = ""  # of grpc's own
        self.worker_count = 1
        self.lists = 0  # of workers that were asked for
        self.pace: random.Random | None = None  # groups take their time, in any order

    async def ListEngines(self, request, context):
        self.lists += 1
        worker = router_pb.Engine(
            engine_id="e",
            address=self.address,
            role=router_pb.ROLE_EPISODES,
            state=router_pb.ENGINE_STATE_ACTIVE,
        )
        return router_pb.ListEnginesResponse(engines=[worker] * self.worker_count)

    async def Rollout(self, request, context):
        if self.refuses:
            raise InvalidFieldError("environment.name", "is unknown")
        self.requests.append(request.request_id)
        if self.refusal:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.refusal)
        version, groups = self.version, list(request.groups)
        if self.pace is not None:
            self.pace.shuffle(groups)
        for number, group in enumerate(groups):
            if self.pace is not None:
                await asyncio.sleep(0.03 * self.pace.random() ** 4)
            self.issued.append(group.group_id)
            if group.group_id in self.hold:
                await self.release.wait()
            if self.failing.get(group.group_id, 0):
                self.failing[group.group_id] -= 1
                failed = pb.FailedGroup(group_id=group.group_id)
                failed.error.code, failed.error.message = self.failure, "grader broke"
                yield pb.RolloutResponse(failed=failed)
                continue
            finished = pb.FinishedGroup(
                group_id=group.group_id,
                blob={"digest": f"{int(group.group_id[1:]):032x}", "size_bytes": 1},
                rewards=[1.0, 0.0],
                response_lengths=[3, 3],
                min_version=version,
                max_version=version,
            )
            yield pb.RolloutResponse(finished=finished)
            if number == 0 and self.breaks:
                self.breaks -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "worker dies")


class Heard:
    """What a call tells of its groups."""

    def __init__(self) -> None:
        self.groups: list[str] = []

    async def wait_for_version(self, version: int) -> None:
        """All are known."""

    def finished(self, group: LedgerGroup, finished: pb.FinishedGroup) -> None:
        self.groups.append(finished.group_id)

    def hopeless(self, group: LedgerGroup, why: str) -> None:
        raise AssertionError(why)

    def failed(self, group: LedgerGroup, why: str) -> LedgerGroup | None:
        raise AssertionError(why)


class World:
    def __init__(self, episodes: Episodes, ledger: Ledger, known: EpisodeWorkers) -> None:
        self.episodes, self.ledger, self.workers = episodes, ledger, known
        self.row = Struct()
        self.rows: dict[str, Struct] = {}  # of groups that have another
        self.built: list[list[str]] = []  # groups of each request that was made

    def feed(self, **settings) -> RolloutDispatcher:
        config = {"groups_per_step": 4, "max_staleness": 0, "attempts": 3, **settings}

        return RolloutDispatcher(
            DispatcherConfig(**config),
            self.ledger,
            self.workers,
            self.request,
            place=lambda group: f"rows.jsonl:{group.position + 1}",
        )

    def request(self, groups, trial) -> pb.RolloutRequest:
        self.built.append([group.group_id for group in groups])
        return pb.RolloutRequest(
            request_id="-".join(f"{g.group_id}.{trial}" for g in groups),
            groups=[
                pb.GroupRequest(group_id=g.group_id, row=self.rows.get(g.group_id, self.row))
                for g in groups
            ],
            environment={"name": "x"},
            sampling={"max_new_tokens": 1},
            sample_count=2,
        )

    def publish(self, step: int) -> None:
        self.episodes.version += 1
        self.ledger.record_version(self.episodes.version, "d", step)


@pytest.fixture
async def world(tmp_path):
    server = Server(ServerConfig(drain_seconds=0.1))
    episodes = Episodes()
    server.add(pb_grpc.add_RolloutServiceServicer_to_server, episodes, "rollout")
    server.add(router_grpc.add_RouterServiceServicer_to_server, episodes, "router")
    await server.start()
    episodes.address = server.address
    router = RouterClient(server.address)
    known = EpisodeWorkers(router, SecurityConfig(), 60)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.record_version(1, "d", 0)
    yield World(episodes, ledger, known)
    episodes.release.set()
    await known.close()
    await router.close()
    ledger.close()
    await server.stop()


async def step(world: World, feed: RolloutDispatcher, number: int) -> list[str]:
    async with asyncio.timeout(PATIENCE):
        await feed.fill(number)
        groups = await feed.take(number)
    world.ledger.consume((g.group_id for g in groups), number + 1)
    world.publish(number + 1)
    return [g.group_id for g in groups]


async def test_calls_that_begin_together_look_for_workers_once(world: World):
    world.episodes.worker_count = 32  # and a call for each
    await world.workers.refresh()
    feed = world.feed(groups_per_step=64)
    await step(world, feed, 0)
    assert len(world.episodes.requests) == 32
    assert world.episodes.lists <= 4
    await feed.close()


async def test_workers_are_looked_for_anew_once_one_is_lost_or_a_while_has_passed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LISTED_SECONDS", 3600.0)
    feed = world.feed()
    for number in range(3):
        await step(world, feed, number)
    assert world.episodes.lists == 1
    world.episodes.breaks = 1
    await step(world, feed, 3)
    assert world.episodes.lists == 2
    monkeypatch.setattr(workers, "LISTED_SECONDS", 0.0)
    await step(world, feed, 4)
    assert world.episodes.lists == 3
    await feed.close()


async def test_synchronous_steps_take_groups_in_order_and_issue_no_more(world):
    feed = world.feed()
    assert await step(world, feed, 0) == [f"g{i:07}" for i in range(4)]
    assert await step(world, feed, 1) == [f"g{i:07}" for i in range(4, 8)]
    assert len(world.episodes.issued) == 8
    await feed.close()


async def test_rows_too_large_for_one_call_go_in_several(world):
    world.row.update({"tests": "x" * 5_000_000})
    feed = world.feed(groups_per_step=8)
    assert await step(world, feed, 0) == [f"g{i:07}" for i in range(8)]
    assert len(world.episodes.requests) == 4, "halves of halves"
    await feed.close()


async def test_the_request_that_is_measured_is_the_one_that_is_sent(world):
    feed = world.feed()
    taken = [*await step(world, feed, 0), *await step(world, feed, 1)]
    assert world.built == [taken[:4], taken[4:]]
    await feed.close()


async def test_what_is_settled_before_a_call_begins_is_not_asked_for(world):
    groups = {
        name: LedgerGroup(position=position, group_id=name, state="issued", issue_step=0)
        for position, name in enumerate(["g0000000", "g0000001"])
    }
    first = world.request(list(groups.values()), 0)
    heard = Heard()
    call = RolloutCall(world.workers, world.request, heard, dict(groups), 60, first=first)
    assert call.release(["g0000000", "g7777777"]) == ["g0000000"]
    async with asyncio.timeout(PATIENCE):
        await call.see_through()
    assert world.episodes.issued == heard.groups == ["g0000001"]


async def test_a_slow_group_is_overtaken_until_it_would_be_too_old(world):
    feed = world.feed(max_staleness=2)
    slow = "g0000011"  # the last of the twelve that may be issued before the first step
    world.episodes.hold = {slow}
    taken = [*await step(world, feed, 0), *await step(world, feed, 1)]
    waiting = asyncio.create_task(step(world, feed, 2))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done  # enough groups are ready, but this one must not get older
    world.episodes.release.set()
    taken += [*await waiting, *await step(world, feed, 3)]
    assert slow in taken
    assert len(taken) == len(set(taken)) == 16
    for group in world.ledger.groups("consumed"):
        assert group.consumed_step - 1 - group.oldest_step <= 2
    await feed.close()


async def test_late_groups_are_overtaken_only_while_later_steps_have_room_for_them(world):
    feed = world.feed(max_staleness=2)
    world.episodes.hold = {"g0000004"}  # and what its call has behind it: eight of twelve
    assert await step(world, feed, 0) == [f"g{i:07}" for i in range(4)]
    await feed.fill(1)
    async with asyncio.timeout(PATIENCE):
        while feed.ready_count < 4:  # of the second call; the eight need the next two steps whole
            await asyncio.sleep(0.01)
    waiting = asyncio.create_task(step(world, feed, 1))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    world.episodes.release.set()
    assert await waiting == [f"g{i:07}" for i in range(4, 8)]
    assert await step(world, feed, 2) == [f"g{i:07}" for i in range(8, 12)]
    assert await step(world, feed, 3) == [f"g{i:07}" for i in range(12, 16)]
    assert world.ledger.dropped() == []
    await feed.close()


@pytest.mark.parametrize("seed", range(4))
async def test_in_whatever_order_groups_finish_none_grows_too_old(world, seed):
    world.episodes.pace = random.Random(seed)
    feed = world.feed(max_staleness=2, steps=12)
    taken = [group for number in range(12) for group in await step(world, feed, number)]
    assert sorted(taken) == [f"g{i:07}" for i in range(48)]
    assert world.ledger.dropped() == []
    for group in world.ledger.groups("consumed"):
        assert group.consumed_step - 1 - group.oldest_step <= 2
    await feed.close()


@pytest.mark.parametrize("size", [1, 3, 8])
async def test_a_run_resumed_with_other_step_sizes_has_groups_to_its_end(world, size):
    """The groups of steps that were larger are no part of what later ones may have."""
    before = world.feed(steps=2)
    for number in range(2):
        await step(world, before, number)
    await before.close()
    feed = world.feed(steps=6, groups_per_step=size)
    taken = [group for number in range(2, 6) for group in await step(world, feed, number)]
    assert taken == [f"g{i:07}" for i in range(8, 8 + 4 * size)]
    assert world.ledger.next_position() == 8 + 4 * size, "and no more are issued"
    await feed.close()


async def test_what_later_steps_dropped_makes_no_room_after_going_back(world):
    feed = world.feed(max_staleness=1)
    world.episodes.hold = {"g0000008"}  # and what its call has behind it
    for number in range(2):
        await step(world, feed, number)
    await feed.close()
    world.ledger.drop("g0000011", "filtered: by hand")
    world.ledger.roll_back(0)
    again = world.feed(max_staleness=1)
    await again.fill(0)
    assert again.ready_count == 8
    assert again.in_flight_count == 0  # g0000008 belongs to the step after the next
    await again.close()


async def test_no_group_is_issued_that_no_step_would_take(world):
    feed = world.feed(max_staleness=3, steps=5, attempts=1)
    world.episodes.failing = {"g0000017": 1}  # dropped, so that the run needs one more
    taken = [group for number in range(5) for group in await step(world, feed, number)]
    assert sorted(taken) == [f"g{i:07}" for i in range(21) if i != 17]
    assert world.ledger.next_position() == 21
    await feed.close()


async def test_groups_are_not_left_to_age_when_rollouts_are_fast(world):
    feed = world.feed(max_staleness=4)
    for number in range(12):
        await step(world, feed, number)
        async with asyncio.timeout(PATIENCE):
            while feed.in_flight_count:
                await asyncio.sleep(0.005)
    ages: dict[int, set[int]] = {}
    for group in world.ledger.groups("consumed"):
        age = group.consumed_step - 1 - group.oldest_step
        ages.setdefault(group.consumed_step, set()).add(age)
    assert max(max(found) for found in ages.values()) >= 3  # what was issued before the first step
    assert ages[12] | ages[11] <= {0, 1}  # one step ahead is enough
    await feed.close()


async def test_training_that_waits_gets_more_groups_in_flight(world):
    feed = world.feed(max_staleness=4)
    for number in range(12):
        await step(world, feed, number)
        async with asyncio.timeout(PATIENCE):
            while feed.in_flight_count:
                await asyncio.sleep(0.005)
    world.episodes.hold = {f"g{i:07}" for i in range(48, 200)}
    await step(world, feed, 12)  # the last that was ready
    waiting = asyncio.create_task(step(world, feed, 13))
    await asyncio.sleep(0.2)
    world.episodes.release.set()
    await waiting
    await feed.fill(14)
    assert feed.in_flight_count + feed.ready_count >= 3 * 4
    await feed.close()


async def test_a_failed_group_is_issued_again_then_dropped_and_replaced(world):
    feed = world.feed(attempts=2)
    world.episodes.failing = {"g0000001": 1, "g0000002": 5}
    taken = await step(world, feed, 0)
    assert taken == ["g0000000", "g0000001", "g0000003", "g0000004"]
    assert len(world.ledger.dropped()) == 1
    await feed.close()


async def test_a_lost_worker_loses_no_group_and_costs_no_attempt(world):
    feed = world.feed(attempts=1)
    world.episodes.breaks = 2
    assert await step(world, feed, 0) == [f"g{i:07}" for i in range(4)]
    assert world.ledger.dropped() == []
    assert len(set(world.episodes.requests)) == 1  # so that a worker goes on where the last was
    await feed.close()


async def test_lost_engines_cost_no_attempt_and_another_trial_is_asked_for(world):
    feed = world.feed(attempts=1)
    world.episodes.failure = UNAVAILABLE
    world.episodes.failing = {f"g{i:07}": 2 for i in range(4)}
    assert await step(world, feed, 0) == [f"g{i:07}" for i in range(4)]
    assert world.ledger.dropped() == []
    # a worker remembers how a request ended, so the same one would fail again at once
    assert len(set(world.episodes.requests)) == len(world.episodes.requests) == 3
    await feed.close()


async def test_engines_that_stay_away_end_the_run(world):
    feed = world.feed(outage_seconds=0.1)
    world.episodes.failure = UNAVAILABLE
    world.episodes.failing = {f"g{i:07}": 99 for i in range(4)}
    with pytest.raises(RolloutFailedError, match="nothing went on"):
        await step(world, feed, 0)
    await feed.close()


async def test_a_call_beyond_the_size_of_messages_ends_the_run_at_once(world):
    feed = world.feed(outage_seconds=PATIENCE)
    world.episodes.refusal = "Received message larger than max (5 vs. 4)"
    with pytest.raises(RolloutFailedError, match=r"MESSAGE_TOO_LARGE.*server\.max_message_bytes"):
        await step(world, feed, 0)
    assert len(world.episodes.requests) == 1
    await feed.close()


async def test_a_row_beyond_the_size_of_messages_is_dropped_by_its_place(world, caplog):
    world.rows["g0000002"] = Struct()
    world.rows["g0000002"].update({"tests": "x" * (1 << 26)})
    feed = world.feed()
    assert await step(world, feed, 0) == ["g0000000", "g0000001", "g0000003", "g0000004"]
    assert [group.position for group in world.ledger.groups("dropped")] == [2]
    assert "rows.jsonl:3: RESOURCE_EXHAUSTED/MESSAGE_TOO_LARGE" in caplog.text
    assert "server.max_message_bytes" in caplog.text
    await feed.close()


async def test_a_lost_blob_is_generated_again(world):
    feed = world.feed()
    await feed.fill(0)
    async with asyncio.timeout(PATIENCE):
        while feed.ready_count < 4:
            await asyncio.sleep(0.01)
    (lost,) = [g for g in world.ledger.groups("generated") if g.group_id == "g0000002"]
    assert feed.lose_blob(lost.blob.digest)
    assert not feed.lose_blob(lost.blob.digest)
    world.episodes.issued.clear()
    assert await step(world, feed, 0) == [f"g{i:07}" for i in range(4)]
    assert world.episodes.issued == ["g0000002"]
    await feed.close()


async def test_all_groups_failing_is_an_error_not_a_hang(world):
    feed = world.feed(attempts=1, dropped_in_a_row=8)
    world.episodes.failing = {f"g{i:07}": 9 for i in range(64)}
    with pytest.raises(RolloutFailedError, match="8 groups in a row"):
        await step(world, feed, 0)
    await feed.close()


async def test_of_calls_that_fail_together_the_first_is_told(world):
    world.episodes.worker_count = 2
    await world.workers.refresh()
    feed = world.feed(groups_per_step=8, attempts=1, dropped_in_a_row=2)
    world.episodes.failing = {f"g{i:07}": 9 for i in range(64)}
    with pytest.raises(RolloutFailedError, match=r"^2 groups in a row"):
        await step(world, feed, 0)
    await feed.close()


async def test_a_ledger_that_refuses_a_group_is_told_as_the_disk_not_as_a_rollout(world, tmp_path):
    """With its own type: by that the run knows which file to name."""
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as other:
        other.execute(
            "CREATE TRIGGER refusal BEFORE UPDATE OF state ON groups"
            " BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
    feed = world.feed()
    with pytest.raises(sqlite3.Error, match="disk is full"):
        await step(world, feed, 0)
    await feed.close()


async def test_a_refused_request_is_an_error_at_once(world):
    feed = world.feed()
    world.episodes.refuses = True
    with pytest.raises(RolloutFailedError, match=r"environment\.name") as caught:
        await step(world, feed, 0)
    assert isinstance(caught.value.__cause__, RemoteError)
    await feed.close()


async def test_a_new_feed_takes_what_was_generated_and_issues_what_was_in_flight(world):
    feed = world.feed()
    world.episodes.hold = {"g0000002"}
    await feed.fill(0)
    async with asyncio.timeout(PATIENCE):
        while feed.ready_count < 2:
            await asyncio.sleep(0.01)
    await feed.close()
    world.episodes.hold = set()
    issued_before = len(world.episodes.issued)
    again = world.feed()
    assert await step(world, again, 0) == [f"g{i:07}" for i in range(4)]
    assert world.episodes.issued[issued_before:] == ["g0000002", "g0000003"]
    await again.close()


async def test_groups_too_old_are_dropped_and_replaced(world):
    feed = world.feed(max_staleness=0)
    await feed.fill(0)
    async with asyncio.timeout(PATIENCE):
        while feed.ready_count < 4:
            await asyncio.sleep(0.01)
    world.publish(3)
    assert await step(world, feed, 3) == [f"g{i:07}" for i in range(4, 8)]
    assert len(world.ledger.dropped()) == 4
    await feed.close()


@pytest.mark.parametrize("fewer", [1, 2, 3])
async def test_a_run_can_go_on_with_smaller_steps(world, fewer):
    feed = world.feed(max_staleness=1)
    for number in range(3):
        await step(world, feed, number)
    await feed.close()
    again = world.feed(groups_per_step=fewer)
    taken = [*await step(world, again, 3), *await step(world, again, 4)]
    assert len(set(taken)) == 2 * fewer
    consumed = world.ledger.groups("consumed")
    assert len(consumed) == 12 + 2 * fewer
    await again.close()


async def test_a_version_that_serves_before_it_is_published_is_waited_for(world):
    feed = world.feed()
    world.episodes.version = 2  # engines that cannot hold two versions swap on receipt
    taking = asyncio.create_task(step(world, feed, 0))
    done, _ = await asyncio.wait([taking], timeout=0.3)
    assert not done
    assert not world.ledger.groups("generated")
    world.ledger.record_version(2, "d", 0)
    feed.version_recorded()
    assert await taking == [f"g{i:07}" for i in range(4)]
    await feed.close()


async def test_weights_of_another_run_end_this_one_with_the_reason(world):
    feed = world.feed(outage_seconds=0.2)
    world.episodes.version = 7
    with pytest.raises(RolloutFailedError, match=r"weight version 7.* is not of this run"):
        await step(world, feed, 0)
    await feed.close()
