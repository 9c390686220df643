"""Ranks that answer, err, fall silent, hang and die, over the real stream."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.trainer.config import TrainerConfig
from services.trainer.controller import incarnation
from services.trainer.controller.incarnation import RankIncarnation
from services.trainer.controller.launch import WorkerServer
from services.trainer.controller.rank_group import Launcher, RankGroup
from services.trainer.errors import (
    OutOfMemoryError,
    RankError,
    RankLostError,
    TrainerFailedError,
)
from sluice.api.common.v1 import wait_service_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import parse_config
from sluice.runtime.errors import InvalidFieldError, LoadingError, NotFoundError
from sluice.runtime.waits import Waits
from tests.patience import PATIENCE
from tests.unit.trainer.ranks import ScriptedRank, ranks_config, until

ACTIVE, FAILED = trainer_pb.Trainer.STATE_ACTIVE, trainer_pb.Trainer.STATE_FAILED
DISCARD = pb.FollowResponse(discard=pb.DiscardCommand())
STEP = pb.FollowResponse(step=pb.StepCommand(normalizer=1.0))
GRADIENTS = pb.FollowResponse(forward_backward=pb.GradientsCommand())


class House:
    """A group on a port, and the ranks that connect to it."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.waits = Waits()
        self.restored: list[int] = []
        values = {
            "model": str(path),
            "store": str(path),
            "ranks": ranks_config(**settings),
        }
        (path / "config.json").write_text("{}")
        config = parse_config(TrainerConfig, values)
        self.size = config.ranks.count
        self.group = RankGroup(config.ranks, Launcher(), self.waits, self._restore)
        self.server = WorkerServer(config, self.group)
        self.ranks: list[ScriptedRank] = []

    def connect(self, rank: int, **options: Any) -> ScriptedRank:
        scripted = ScriptedRank(self.server.address, rank, self.size, **options)
        self.ranks.append(scripted)
        return scripted

    async def connect_all(self, **options: Any) -> list[ScriptedRank]:
        connected = [self.connect(rank, **options) for rank in range(self.size)]
        await until(lambda: self.group.state == ACTIVE)
        return connected

    async def listed(self) -> dict[str, wait_service_pb2.Wait]:
        request = wait_service_pb2.ListWaitsRequest()
        return {wait.what: wait for wait in (await self.waits.ListWaits(request, None)).waits}

    async def _restore(self, generation: RankIncarnation) -> None:
        self.restored.append(generation.number)


@pytest.fixture
async def open_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(incarnation, "EXIT_GRACE", 0.05)  # no process explains its end here
    houses: list[House] = []

    async def start(**settings: Any) -> House:
        house = House(tmp_path, **settings)
        houses.append(house)
        await house.server.start()
        house.group.start(house.server.address)
        await until(lambda: house.group._incarnation is not None)
        return house

    yield start
    for house in houses:
        for rank in house.ranks:
            await rank.leave()
        await house.group.close()
        await house.server.close()


async def test_answers_come_in_the_order_of_ranks(open_house: Any) -> None:
    house = await open_house(count=3)
    with pytest.raises(LoadingError):
        _ = house.group.incarnation
    waits = await house.listed()
    loading = waits["ranks to load the model"]
    assert list(loading.on) == ["rank 0", "rank 1", "rank 2"]
    assert loading.explanation == "nothing was heard yet of rank 0, 1, 2"

    async def slow(command: pb.FollowResponse) -> pb.CommandResult:
        await asyncio.sleep(0.05)
        return pb.CommandResult(sums=pb.PassSums(loss=1.0))

    async def fast(command: pb.FollowResponse) -> pb.CommandResult:
        return pb.CommandResult(sums=pb.PassSums(loss=2.0))

    layout = trainer_pb.ParallelLayout(data=2)
    house.connect(0, answer=slow)
    house.connect(1, answer=fast, ready=pb.RankReady(layout=layout, data_rank=0, reports=False))
    house.connect(2, answer=fast, ready=pb.RankReady(layout=layout, data_rank=1, reports=True))
    await until(lambda: house.group.state == ACTIVE)
    ranks = house.group.incarnation
    results = await ranks.run(DISCARD)
    assert [result.sums.loss for result in results] == [1.0, 2.0, 2.0]
    reporting = ranks.reporting(results)
    assert [result.sums.loss for result in reporting] == [1.0, 2.0]
    assert house.restored == [1]
    assert await house.listed() == {}


async def test_each_data_rank_gets_its_own_command(open_house: Any) -> None:
    house = await open_house()
    ranks = await house.connect_all()

    def build(data_rank: int) -> pb.FollowResponse:
        return pb.FollowResponse(drop_batch=pb.DropBatch(batch_id=f"for {data_rank}"))

    await house.group.incarnation.run(build)
    assert [rank.received[0].drop_batch.batch_id for rank in ranks] == ["for 0", "for 1"]


async def test_an_error_is_an_answer(open_house: Any) -> None:
    house = await open_house()
    status = NotFoundError("blob", "abc").to_status()

    async def fail(command: pb.FollowResponse) -> pb.CommandResult:
        return pb.CommandResult(error=status)

    house.connect(0)
    house.connect(1, answer=fail)
    await until(lambda: house.group.state == ACTIVE)
    ranks = house.group.incarnation
    with pytest.raises(RankError) as caught:
        await ranks.run(DISCARD)
    assert caught.value.code == grpc.StatusCode.NOT_FOUND
    assert caught.value.reason == "BLOB_NOT_FOUND"
    assert caught.value.metadata == {"name": "abc", "rank": "1"}
    assert house.group.incarnation is ranks, "the ranks live on"


async def test_a_silent_rank_is_named_until_it_speaks(open_house: Any) -> None:
    house = await open_house(silent_seconds=0.3)
    asked = asyncio.Event()

    async def late(command: pb.FollowResponse) -> pb.CommandResult:
        await asked.wait()
        return pb.CommandResult()

    house.connect(0)
    sleeper = house.connect(1, answer=late)
    sleeper.beating.clear()  # from the start: no heartbeat is on its way past the command
    await until(lambda: house.group.state == ACTIVE)
    running = asyncio.create_task(house.group.incarnation.run(GRADIENTS))

    def names_the_sleeper(waits: dict[str, wait_service_pb2.Wait]) -> bool:
        command = waits.get("forward_backward on all ranks")
        return (
            command is not None
            and list(command.on) == ["rank 1"]
            and re.fullmatch(
                r"rank 1 silent for \d+\.\d s, last in forward_backward", command.explanation
            )
            is not None
            and "heartbeat of rank 1" in waits
        )

    def hears_the_sleeper(waits: dict[str, wait_service_pb2.Wait]) -> bool:
        explanation = waits["forward_backward on all ranks"].explanation
        return "heartbeat of rank 1" not in waits and explanation == "rank 1 in pondering"

    for condition in (names_the_sleeper, hears_the_sleeper):
        async with asyncio.timeout(PATIENCE):
            while not condition(await house.listed()):
                await asyncio.sleep(0.02)
        sleeper.beating.set()
    asked.set()
    await running


async def is_active(group: RankGroup, active: bool) -> None:
    async with asyncio.timeout(PATIENCE):
        await group.wait_active(active)


async def test_a_trainer_is_not_ready_while_a_rank_is_stuck_in_a_command(open_house: Any) -> None:
    house = await open_house(stuck_seconds=0.1)
    let_go = asyncio.Event()

    async def late(command: pb.FollowResponse) -> pb.CommandResult:
        await let_go.wait()
        return pb.CommandResult()

    await house.connect_all(answer=late)
    await is_active(house.group, True)
    running = asyncio.create_task(house.group.incarnation.run(GRADIENTS))
    await is_active(house.group, False)
    assert list((await house.listed())["forward_backward on all ranks"].on) == ["rank 0", "rank 1"]
    assert house.group.state == ACTIVE  # the command may yet end
    let_go.set()
    await running
    await is_active(house.group, True)


async def test_a_trainer_is_not_ready_while_a_rank_is_silent(open_house: Any) -> None:
    house = await open_house(silent_seconds=0.3)
    _, sleeper = await house.connect_all()
    await is_active(house.group, True)
    sleeper.beating.clear()
    await is_active(house.group, False)
    sleeper.beating.set()
    await is_active(house.group, True)


async def test_a_clock_that_is_set_makes_no_rank_look_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, now = incarnation.RankLink(0, 1, "here"), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert rank.to_proto().heartbeat_time.ToNanoseconds() / 1e9 > now + 3540


async def test_no_rank_is_lost_where_all_were_stopped_for_a_while(
    open_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `docker compose pause`: the first look after that found every rank silent."""
    house = await open_house(
        count=1, heartbeat_seconds=0.1, silent_seconds=0.3, lost_seconds=PATIENCE
    )
    house.connect(0)
    await until(lambda: house.group.state == ACTIVE)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * PATIENCE)
    (link,) = house.group.incarnation.links.values()
    assert link.silence > PATIENCE
    await until(lambda: link.silence < PATIENCE)
    assert (house.group.failure, house.group.state) == ("", ACTIVE)


async def test_a_rank_silent_for_too_long_is_lost(open_house: Any) -> None:
    # Alone: where the process is held up for so long, another rank would be lost before it.
    house = await open_house(count=1, heartbeat_seconds=0.1, silent_seconds=0.3, lost_seconds=0.6)
    house.connect(0).beating.clear()
    await until(lambda: house.group.failure != "")
    found = re.fullmatch(r"rank 0 was silent for (\d+\.\d) s, last in \w+", house.group.failure)
    assert found is not None and float(found[1]) >= 0.6, house.group.failure


async def test_a_command_has_a_deadline(open_house: Any) -> None:
    house = await open_house(command_timeout=0.2)

    async def never(command: pb.FollowResponse) -> None:
        return None

    living, stuck = house.connect(0, answer=never), house.connect(1, answer=never)
    await until(lambda: house.group.state == ACTIVE)
    ranks = house.group.incarnation
    running = asyncio.create_task(ranks.run(STEP))
    await asyncio.sleep(0)  # the command is given
    # Rank 0 answers here and now: over its stream it could be later than this deadline, too.
    answer = pb.FollowRequest(result=pb.CommandResult(sequence=1))
    ranks.hear(ranks.links[0], answer)
    with pytest.raises(RankLostError, match=r"rank 1 did not end step within 0\.2 s") as caught:
        await running
    assert caught.value.metadata == {"rank": "1"}
    await living.ended()  # the others are ended too
    await stuck.ended()
    with pytest.raises(RankLostError, match="rank 1 did not end step"):
        _ = house.group.incarnation  # until the ranks are back
    await house.connect_all()
    assert house.restored == [1, 2]
    assert house.group.restart_count == 1


async def test_a_rank_that_is_elsewhere_than_the_others_is_told_first_and_named(
    open_house: Any,
) -> None:
    """Seven stand in a collective, and one where it read a file: all wait for that one."""
    house = await open_house(count=8, command_timeout=2.0)

    async def never(command: pb.FollowResponse) -> None:
        return None

    gathering = "torch.distributed:1 all_gather, called by sluice.algo.collectives:2 gather"
    reading = "pathlib:3 read_bytes, called by my_losses:4 table"
    ranks = [house.connect(rank, answer=never) for rank in range(8)]
    await until(lambda: house.group.state == ACTIVE)
    group = house.group.incarnation
    running = asyncio.create_task(group.run(STEP))
    await until(lambda: all(rank.received for rank in ranks))
    for rank in ranks:
        rank.beating.clear()
    for number, rank in enumerate(ranks):
        where = reading if number == 5 else gathering
        rank.say(pb.FollowRequest(heartbeat=pb.RankHeartbeat(activity="step", where=where)))
    await until(lambda: all(link.where for link in group.links.values()))
    told = f"rank 5 in step at {reading}; rank 0-4, 6-7 in step at {gathering}"
    assert (await house.listed())["step on all ranks"].explanation == told
    assert group.links[5].to_proto().where == reading
    with pytest.raises(RankLostError) as caught:
        await running
    assert str(caught.value) == f"rank 5 did not end step within 2 s: {told}"
    assert caught.value.rank == 5


async def test_a_rank_that_leaves_ends_the_commands_under_way(open_house: Any) -> None:
    house = await open_house()

    async def never(command: pb.FollowResponse) -> None:
        return None

    ranks = await house.connect_all(answer=never)
    running = asyncio.create_task(house.group.incarnation.run(STEP))
    await until(lambda: bool(ranks[1].received))
    await ranks[1].leave()
    with pytest.raises(RankLostError, match="rank 1 closed its stream") as caught:
        await running
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == "RANK_LOST"


async def test_one_failing_rank_does_not_leave_the_others_in_a_collective(
    open_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incarnation, "ERROR_GRACE", 0.1)
    house = await open_house()

    async def never(command: pb.FollowResponse) -> None:
        return None

    async def fail(command: pb.FollowResponse) -> pb.CommandResult:
        return pb.CommandResult(error=InvalidFieldError("loss", "broken").to_status())

    house.connect(0, answer=never)
    house.connect(1, answer=fail)
    await until(lambda: house.group.state == ACTIVE)
    with pytest.raises(RankError, match="rank 1: loss: broken") as caught:
        await house.group.incarnation.run(STEP)
    assert caught.value.reason == "INVALID_FIELD", "which no later try helps"
    await until(lambda: house.group.restart_count == 1)
    assert house.group.failure == "rank 1 failed in step: loss: broken; rank 0 in pondering"


async def test_ranks_that_wait_for_no_other_end_their_work_though_one_has_failed(
    open_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are at work still, each on rows of its own, and are as fit as that one afterwards."""
    monkeypatch.setattr(incarnation, "ERROR_GRACE", 0.05)
    house = await open_house()
    failing = InvalidFieldError("loss", "broken").to_status()

    async def work(command: pb.FollowResponse) -> pb.CommandResult:
        await asyncio.sleep(1.0)  # longer by far than those have who may wait in a collective
        return pb.CommandResult()

    async def fail(command: pb.FollowResponse) -> pb.CommandResult:
        is_pass = command.HasField("forward_backward")
        return pb.CommandResult(error=failing if is_pass else None)

    layout = trainer_pb.ParallelLayout(data=2)
    for rank, answer in enumerate((work, fail)):
        ready = pb.RankReady(layout=layout, data_rank=rank, alone=["forward_backward"])
        house.connect(rank, answer=answer, ready=ready)
    await until(lambda: house.group.state == ACTIVE)
    with pytest.raises(RankError, match="rank 1: loss: broken"):
        await house.group.incarnation.run(GRADIENTS)
    await house.group.incarnation.run(STEP)
    assert (house.group.restart_count, house.group.state) == (0, ACTIVE)


async def test_who_lacked_memory_is_named_though_others_failed_before_it(
    open_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks one hangs, and the first has an error that only follows."""
    monkeypatch.setattr(incarnation, "ERROR_GRACE", 0.1)
    house = await open_house(count=3)
    errors = {0: LoadingError("peer is gone"), 2: OutOfMemoryError("no memory for 3 GiB")}

    def answer(rank: int) -> Any:
        async def fail(command: pb.FollowResponse) -> pb.CommandResult:
            return pb.CommandResult(error=errors[rank].to_status())

        return fail

    async def never(command: pb.FollowResponse) -> None:
        return None

    for rank in range(3):
        house.connect(rank, answer=answer(rank) if rank in errors else never)
    await until(lambda: house.group.state == ACTIVE)
    with pytest.raises(RankError, match="rank 2: no memory for 3 GiB") as caught:
        await house.group.incarnation.run(STEP)
    assert caught.value.lacked_memory


async def test_restarts_are_bounded_and_count_again_after_a_step(open_house: Any) -> None:
    house = await open_house(max_restarts=1)
    for restarts in (0, 1):
        ranks = await house.connect_all()
        assert house.group.restart_count == restarts
        if restarts:
            house.group.note_progress()
        await ranks[0].leave()
        await until(lambda: house.group.state != ACTIVE)
        await ranks[1].ended()
    ranks = await house.connect_all()
    await ranks[0].leave()
    async with asyncio.timeout(PATIENCE):
        await house.group.wait_given_up()
    assert house.group.failure.startswith("rank 0 closed its stream")
    with pytest.raises(RankLostError):  # for callers the next process may do better
        _ = house.group.incarnation


async def test_a_model_that_cannot_be_loaded_fails_at_once(open_house: Any) -> None:
    house = await open_house(max_restarts=5)
    status = LoadingError("OSError: no such file").to_status()
    house.connect(0)
    house.connect(1, ready=pb.RankReady(error=status))
    await until(lambda: house.group.state == FAILED)
    assert house.group.failure == "rank 1: OSError: no such file"
    assert house.group.restart_count == 0
    with pytest.raises(TrainerFailedError) as caught:
        _ = house.group.incarnation
    assert caught.value.metadata == {"cause": house.group.failure}


@pytest.mark.parametrize("launch", ["local", "external"])
async def test_ranks_that_crash_as_they_load_are_not_launched_by_another_process(
    open_house: Any, launch: str
) -> None:
    house = await open_house(launch=launch, max_restarts=1)
    for launched in (1, 2):
        await until(lambda number=launched: house.group._incarnation.number == number)
        rank = house.connect(0)
        await until(lambda: bool(house.group.links))
        await rank.leave()
    async with asyncio.timeout(PATIENCE):
        await house.group.wait_given_up()
    if launch == "external":  # they may be late
        assert house.group.state != FAILED
        return
    assert house.group.state == FAILED
    assert house.group.failure.startswith("rank 0 closed its stream")
    assert house.group.failure.endswith(", 2 times in a row before it was loaded")


async def test_ranks_that_do_not_come_are_named(open_house: Any) -> None:
    house = await open_house()
    house.connect(0)
    async with asyncio.timeout(PATIENCE):
        while list((await house.listed())["ranks to load the model"].on) != ["rank 1"]:
            await asyncio.sleep(0.02)


async def test_ranks_that_do_not_come_in_time_are_lost(open_house: Any) -> None:
    house = await open_house(start_timeout=0.1, max_restarts=0)
    async with asyncio.timeout(PATIENCE):
        await house.group.wait_given_up()
    assert house.group.failure == "rank 0 was not ready within 0.1 s"


async def test_ranks_that_come_back_before_the_group_does_wait_for_it(open_house: Any) -> None:
    """torchrun starts its ranks again at once, whatever pause the group makes."""
    house = await open_house(restart_backoff=0.4)
    ranks = await house.connect_all()
    await ranks[0].leave()
    await until(lambda: house.group.state != ACTIVE)
    early = [house.connect(rank) for rank in range(2)]
    await until(lambda: house.group.state == ACTIVE and all(rank.meeting for rank in early))
    assert house.group.restart_count == 1
    assert [rank.error for rank in early] == [None, None]
    names = [{rank.meeting for rank in launch} for launch in (ranks, early)]
    assert all(len(of_one) == 1 and "" not in of_one for of_one in names)
    assert names[0].isdisjoint(names[1])  # or they would find what those before them left


@pytest.mark.parametrize(
    ("rank", "world_size", "generation"), [(1, 3, 0), (2, 2, 0), (0, 2, 0), (1, 2, 7)]
)
async def test_ranks_that_do_not_belong_here_are_refused(
    open_house: Any, rank: int, world_size: int, generation: int
) -> None:
    house = await open_house()
    house.connect(0)
    await until(lambda: len(house.group.links) == 1)
    intruder = ScriptedRank(
        house.server.address, rank, world_size, generation=generation, only_hello=True
    )
    await intruder.ended()
    await intruder.leave()
    assert intruder.error is not None
    assert intruder.error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(house.group.links) == 1
