"""More groups in flight than a step wants; filters that replace groups. The server is scripted."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing

import grpc
import pytest

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.router.v1 import router_service_pb2_grpc as router_grpc
from sluice.client import RouterClient
from sluice.loop.config import FilterConfig
from sluice.loop.dispatcher import DispatcherConfig, GroupCounts, RolloutDispatcher
from sluice.loop.filters import GroupFilters
from sluice.loop.ledger import Ledger
from sluice.loop.workers import EpisodeWorkers, RolloutFailedError
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE

CANCELLED = grpc.StatusCode.CANCELLED.value[0]
STD = GroupFilters([FilterConfig(name="reward_std")])


def name(*numbers: int) -> list[str]:
    return [f"g{number:07}" for number in numbers]


class Episodes(pb_grpc.RolloutServiceServicer, router_grpc.RouterServiceServicer):
    """All groups run at once: those in `slow` until they are cancelled or `release`d."""

    def __init__(self) -> None:
        self.address, self.version = "", 1
        self.slow: set[str] = set()
        self.dull: set[str] = set()  # all their rewards are equal
        self.release = asyncio.Event()
        self.issued: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self.events: dict[str, asyncio.Queue] = {}
        self.deaf = False  # to CancelRollout

    async def ListEngines(self, request, context):
        worker = router_pb.Engine(
            engine_id="e",
            address=self.address,
            role=router_pb.ROLE_EPISODES,
            state=router_pb.ENGINE_STATE_ACTIVE,
        )
        return router_pb.ListEnginesResponse(engines=[worker])

    async def CancelRollout(self, request, context):
        if self.deaf:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        self.cancelled.update(request.group_ids)
        for group_id in request.group_ids:
            await self.events[request.rollout_request_id].put(group_id)
        return pb.CancelRolloutResponse(cancelled_group_ids=request.group_ids)

    async def Rollout(self, request, context):
        self.issued.update(group.group_id for group in request.groups)
        version = self.version
        ended: asyncio.Queue[str] = asyncio.Queue()
        self.events[request.request_id] = ended
        waiting = [g.group_id for g in request.groups if g.group_id in self.slow]
        for group in request.groups:
            if group.group_id not in waiting:
                yield self.finished(group.group_id, version)
        opened = asyncio.create_task(self.release.wait())
        while waiting:
            told = asyncio.create_task(ended.get())
            await asyncio.wait([opened, told], return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                if told.result() not in waiting:
                    continue  # it has finished; the feed had not heard of it yet
                failed = pb.FailedGroup(group_id=told.result())
                failed.error.code, failed.error.message = CANCELLED, "cancelled"
                waiting.remove(told.result())
                yield pb.RolloutResponse(failed=failed)
                continue
            told.cancel()
            while waiting:
                yield self.finished(waiting.pop(), version)
        opened.cancel()

    def finished(self, group_id: str, version: int) -> pb.RolloutResponse:
        rewards = [0.25] * 4 if group_id in self.dull else [1.0, 0.0]
        return pb.RolloutResponse(
            finished=pb.FinishedGroup(
                group_id=group_id,
                blob={"digest": f"{int(group_id[1:]) + 1000 * version:032x}", "size_bytes": 1},
                rewards=rewards,
                raw_rewards=rewards,
                response_lengths=[3] * len(rewards),
                min_version=version,
                max_version=version,
            )
        )


class World:
    def __init__(self, path, episodes: Episodes, ledger: Ledger, workers: EpisodeWorkers) -> None:
        self.path, self.episodes, self.ledger, self.workers = path, episodes, ledger, workers

    def feed(self, filters: GroupFilters | None = None, **settings) -> RolloutDispatcher:
        config = {"groups_per_step": 4, "max_staleness": 0, "attempts": 3, **settings}

        def request(groups, trial):
            names = "-".join(f"{g.group_id}.{trial}" for g in groups)
            return pb.RolloutRequest(
                request_id=f"{self.episodes.version}:{names}",
                groups=[pb.GroupRequest(group_id=g.group_id) for g in groups],
                environment={"name": "x"},
                sampling={"max_new_tokens": 1},
                sample_count=2,
            )

        return RolloutDispatcher(
            DispatcherConfig(**config), self.ledger, self.workers, request, filters=filters
        )

    async def step(self, feed: RolloutDispatcher, number: int) -> list[str]:
        async with asyncio.timeout(PATIENCE):
            await feed.fill(number)
            groups = await feed.take(number)
        self.ledger.consume((g.group_id for g in groups), number + 1)
        self.episodes.version += 1
        self.ledger.record_version(self.episodes.version, "d", number + 1)
        return [g.group_id for g in groups]

    async def until_cancelled(self, *group_ids: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while not set(group_ids) <= set(self.episodes.cancelled):
                await asyncio.sleep(0.01)


def drop_counts(world) -> Counter[str]:
    query = "SELECT reason FROM groups WHERE state = 'dropped'"
    with closing(sqlite3.connect(world.path)) as ledger:
        return Counter(reason for (reason,) in ledger.execute(query))


@pytest.fixture
async def world(tmp_path):
    server = Server(ServerConfig(drain_seconds=0.1))
    episodes = Episodes()
    server.add(pb_grpc.add_RolloutServiceServicer_to_server, episodes, "rollout")
    server.add(router_grpc.add_RouterServiceServicer_to_server, episodes, "router")
    await server.start()
    episodes.address = server.address
    router = RouterClient(server.address)
    workers = EpisodeWorkers(router, SecurityConfig(), 60)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.record_version(1, "d", 0)
    yield World(tmp_path / "ledger.sqlite", episodes, ledger, workers)
    episodes.release.set()
    await workers.close()
    await router.close()
    ledger.close()
    await server.stop()


async def test_a_step_takes_the_first_and_cancels_the_rest_at_most_once(world) -> None:
    feed = world.feed(over_sampling=1.5)
    world.episodes.slow = set(name(1, 4))
    assert await world.step(feed, 0) == name(0, 2, 3, 5)
    await world.until_cancelled(*name(1, 4))
    assert not world.ledger.groups("dropped"), "they are asked for again"
    assert [g.group_id for g in world.ledger.groups("issued")] == name(1, 4)

    waiting = asyncio.create_task(world.step(feed, 1))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done, "the step waits for those that were cancelled once"
    world.episodes.release.set()
    taken = await waiting
    assert taken[:2] == name(1, 4)
    assert world.episodes.cancelled.keys() == set(name(1, 4))
    assert max(world.episodes.cancelled.values()) == 1
    counts = feed.take_counts()
    assert counts.surplus >= 2 and counts.filtered == 0
    await feed.close()


async def test_no_prompt_is_lost_over_many_steps(world) -> None:
    """Whatever is slow or left over, every position up to the last is trained on, once."""
    feed = world.feed(over_sampling=1.5)
    taken = []
    for number in range(8):
        world.episodes.slow = {f"g{i:07}" for i in range(100) if i % 5 == number % 3}
        task = asyncio.create_task(world.step(feed, number))
        await asyncio.wait([task], timeout=0.1)
        world.episodes.release.set()
        taken += await task
        world.episodes.release = asyncio.Event()
    assert len(taken) == len(set(taken)) == 32
    left = {g.group_id for s in ("issued", "generated") for g in world.ledger.groups(s)}
    assert set(taken) | left == {f"g{i:07}" for i in range(world.ledger.next_position())}
    assert set(name(*range(24))) <= set(taken), "none is put off for ever"
    assert world.ledger.next_position() <= 32 + 2 + 2, "no more than is wanted and spare"
    for group in world.ledger.groups("consumed"):
        assert group.consumed_step - 1 == group.oldest_step, "by the weights of their step"
    await feed.close()


async def test_a_replacement_that_is_not_needed_any_more_is_asked_for_once(world) -> None:
    feed = world.feed(STD, over_sampling=1.5)
    world.episodes.dull = set(name(0))
    await feed.fill(0)
    async with asyncio.timeout(PATIENCE):
        while feed.in_flight_count:
            await asyncio.sleep(0.01)
    await feed.fill(0)  # one for the group that was filtered, and before anybody asks for it
    assert await world.step(feed, 0) == name(1, 2, 3, 4)  # the step has enough
    assert await world.step(feed, 1) == name(5, 6, 7, 8)
    assert world.episodes.issued[name(6)[0]] == 1
    await feed.close()


async def test_surplus_can_be_dropped_with_its_reason(world) -> None:
    feed = world.feed(over_sampling=1.5, drops_surplus=True)
    world.episodes.slow = set(name(1, 4))
    assert await world.step(feed, 0) == name(0, 2, 3, 5)
    assert await world.step(feed, 1) == name(6, 7, 8, 9)
    assert drop_counts(world)["surplus"] >= 2
    assert set(name(1, 4)) <= {g.group_id for g in world.ledger.groups("dropped")}
    await world.until_cancelled(*name(1, 4))
    await feed.close()


async def test_asynchronous_runs_keep_what_the_next_step_can_use(world) -> None:
    feed = world.feed(over_sampling=1.5, max_staleness=1)
    world.episodes.slow = set(name(1))
    assert await world.step(feed, 0) == name(0, 2, 3, 4)
    assert not world.episodes.cancelled, "it goes on under newer weights"
    assert name(1)[0] not in await world.step(feed, 1)
    await world.until_cancelled(*name(1))
    world.episodes.release.set()
    taken = await world.step(feed, 2)
    assert name(1)[0] in taken or name(1)[0] in await world.step(feed, 3)
    for group in world.ledger.groups("consumed"):
        assert group.consumed_step - 1 - group.oldest_step <= 1
    await feed.close()


async def test_a_worker_that_cannot_be_told_costs_nothing_else(world) -> None:
    feed = world.feed(over_sampling=1.5)
    world.episodes.deaf = True
    world.episodes.slow = set(name(1, 4))
    assert await world.step(feed, 0) == name(0, 2, 3, 5)
    world.episodes.release.set()
    assert await world.step(feed, 1) == name(1, 4, 6, 7)
    await feed.close()


async def test_a_new_feed_goes_on_where_a_killed_one_cancelled(world) -> None:
    feed = world.feed(over_sampling=1.5)
    world.episodes.slow = set(name(1, 4))
    await world.step(feed, 0)
    await feed.close()
    world.episodes.slow = set()
    again = world.feed(over_sampling=1.5)
    assert await world.step(again, 1) == name(1, 4, 6, 7)
    await again.close()


async def test_filtered_groups_are_replaced_and_told_apart(world) -> None:
    feed = world.feed(STD)
    world.episodes.dull = set(name(0, 3, 4))
    assert await world.step(feed, 0) == name(1, 2, 5, 6)
    assert drop_counts(world) == {"filtered: reward_std": 3}
    dropped = world.ledger.groups("dropped")
    assert [g.reward_mean for g in dropped] == [0.25] * 3, "what they got is known"
    assert feed.ready_count == 0
    counts = feed.take_counts()
    assert (counts.finished, counts.filtered, counts.surplus) == (7, 3, 0)
    assert counts.episodes == 3 * 4 + 4 * 2
    assert counts.reward_sum == pytest.approx(3 * 4 * 0.25 + 4 * 1.0), "each episode counts once"
    assert feed.take_counts().finished == 0
    await feed.close()


def test_a_step_for_which_no_group_finished_has_no_mean_of_them() -> None:
    """Its groups were there before; NaN is no JSON, and ends readers of metrics.jsonl."""
    none = GroupCounts(filtered=2)
    assert none.row() == {"filtered_groups": 2.0, "surplus_groups": 0.0}
    some = GroupCounts(finished=2, surplus=1, episodes=4, reward_sum=3.0)
    row = {"filtered_groups": 0.0, "surplus_groups": 1.0, "reward_mean_unfiltered": 0.75}
    assert some.row() == row


async def test_a_resumed_run_does_not_train_on_what_was_filtered(world) -> None:
    feed = world.feed(STD)
    world.episodes.dull = set(name(0))
    await feed.fill(0)
    async with asyncio.timeout(PATIENCE):
        while feed.ready_count < 3:
            await asyncio.sleep(0.01)
    await feed.close()
    again = world.feed(STD)
    assert await world.step(again, 0) == name(1, 2, 3, 4)
    await again.close()


async def test_a_task_without_signal_ends_the_run_and_says_so_before(
    world, caplog: pytest.LogCaptureFixture
) -> None:
    feed = world.feed(STD, filtered_in_a_row=24)
    world.episodes.dull = {f"g{i:07}" for i in range(100)}
    with pytest.raises(RolloutFailedError, match=r"24 groups in a row were filtered.*reward_std"):
        await world.step(feed, 0)
    await feed.close()
    told = [each.message for each in caplog.records if "in a row" in each.message]
    assert [int(text.split()[0]) for text in told] == [3, 6, 12]
    assert "by reward_std: the run ends at 24 (max_filtered_in_a_row)" in told[0]


def angry(group) -> bool:
    raise ZeroDivisionError("no mercy")


async def test_a_filter_that_raises_ends_the_run_and_loses_no_group(world) -> None:
    feed = world.feed(GroupFilters([FilterConfig(name=f"{__name__}:angry")]))
    with pytest.raises(RolloutFailedError, match="ZeroDivisionError: no mercy"):
        await world.step(feed, 0)
    await feed.close()
    assert len(world.ledger.groups("issued")) == 4


async def test_what_finished_beyond_the_target_is_generated_anew_by_the_next_weights(world) -> None:
    feed = world.feed(over_sampling=1.5)
    await feed.fill(0)
    async with asyncio.timeout(PATIENCE):
        while feed.ready_count < 6:
            await asyncio.sleep(0.01)
    assert await world.step(feed, 0) == name(0, 1, 2, 3)
    assert [g.group_id for g in world.ledger.groups("issued")] == name(4, 5)
    assert await world.step(feed, 1) == name(4, 5, 6, 7)
    assert not world.ledger.groups("dropped")
    assert {g.oldest_step for g in world.ledger.groups("consumed") if g.consumed_step == 2} == {1}
    await feed.close()


async def test_what_a_killed_run_had_not_settled_is_asked_for_again(world) -> None:
    """Killed in the middle of settling: g4 and g5 are generated, by weights of the step before."""
    feed = world.feed(over_sampling=1.5)
    world.episodes.slow = set(name(4, 5))
    assert await world.step(feed, 0) == name(0, 1, 2, 3)
    await feed.close()
    killed = world.feed()
    for group_id in name(4, 5):
        finished = world.episodes.finished(group_id, version=1).finished
        (group,) = [g for g in world.ledger.groups("issued") if g.group_id == group_id]
        killed.finished(group, finished)
    async with asyncio.timeout(PATIENCE):
        while killed.ready_count < 2:
            await asyncio.sleep(0.01)
    world.episodes.slow = set()
    again = world.feed(over_sampling=1.5)
    assert again.ready_count == 2
    assert await world.step(again, 1) == name(4, 5, 6, 7)
    assert not world.ledger.groups("dropped")
    assert {g.oldest_step for g in world.ledger.groups("consumed") if g.consumed_step == 2} == {1}
    await again.close()


async def test_a_group_that_finishes_while_it_is_settled_counts_once(world) -> None:
    """Its old answer, by the weights of the step before, comes after it was asked for again."""
    feed = world.feed(over_sampling=1.5)
    world.episodes.deaf = True
    world.episodes.slow = set(name(1, 4))
    assert await world.step(feed, 0) == name(0, 2, 3, 5)
    world.episodes.release.set()  # the first call goes on, with version 1
    taken = await world.step(feed, 1)
    assert taken == name(1, 4, 6, 7)
    consumed = {g.group_id: g.oldest_step for g in world.ledger.groups("consumed")}
    assert [consumed[group_id] for group_id in taken] == [1, 1, 1, 1]
    assert {world.episodes.issued[group_id] for group_id in name(1, 4)} == {2}
    assert not world.ledger.groups("dropped")
    await feed.close()


async def test_groups_of_lost_weights_that_come_later_are_dropped_and_replaced(world) -> None:
    """A worker still has them when the run has gone back; their version may not be known here."""
    world.ledger.promise_version(7)
    world.ledger.lose_version(7)
    feed = world.feed()
    world.episodes.version = 7
    async with asyncio.timeout(PATIENCE):
        await feed.fill(0)
        while feed.in_flight_count:
            await asyncio.sleep(0.01)
    assert feed.ready_count == 0
    assert drop_counts(world) == {"weight version 7 was lost before it was known to be written": 4}
    world.episodes.version = 1
    assert await world.step(feed, 0) == name(4, 5, 6, 7)
    assert feed.take_counts().filtered == 0
    await feed.close()
