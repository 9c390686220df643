"""Slots are handed out in order, and none is ever lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine.sglang.load import Load, SlotLimiter
from tests.patience import PATIENCE


async def test_slots_go_to_who_came_first_and_as_many_as_there_are() -> None:
    gate = SlotLimiter(1, 4)
    assert await gate.enter(0, 3) == 3
    assert await gate.enter(0, 3) == 1
    first = asyncio.create_task(gate.enter(0, 2))
    second = asyncio.create_task(gate.enter(0, 1))
    await asyncio.sleep(0)
    gate.leave(0)
    assert await first == 1
    await asyncio.sleep(0)
    assert not second.done()
    gate.leave(0)
    assert await second == 1


async def test_nobody_enters_a_closed_gate_and_ranks_are_apart() -> None:
    gate = SlotLimiter(2, 1)
    gate.shut()
    waiting = [asyncio.create_task(gate.enter(rank, 1)) for rank in (0, 1, 1)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    gate.open()
    assert await waiting[0] == await waiting[1] == 1
    assert not waiting[2].done()
    waiting[2].cancel()
    await asyncio.gather(waiting[2], return_exceptions=True)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=20))
def test_whoever_gives_up_takes_no_slot_along(steps: list[tuple[int, bool]]) -> None:
    async def run() -> None:
        gate = SlotLimiter(1, 5)
        tasks = [asyncio.create_task(gate.enter(0, wanted)) for wanted, _ in steps]
        await asyncio.sleep(0)
        for task, (_, gives_up) in zip(tasks, steps, strict=True):
            if gives_up:
                task.cancel()  # perhaps just granted
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            for task in tasks:
                if task.done() and not task.cancelled() and task.get_name() != "left":
                    task.set_name("left")
                    gate.leave(0, task.result())
        for task in tasks:
            if not task.cancelled() and task.get_name() != "left":
                gate.leave(0, task.result())
        assert await gate.enter(0, 5) == 5

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


async def test_loads_follow_a_sample_through_a_pause_and_back() -> None:
    load = Load(1)
    load.arrive(0, 2)
    load.enter(0, 10)
    load.enter(0, 10)
    load.begin(0, 3, 2)
    load.leave(0, 10, has_begun=False, ends=False)  # sent back to the gate
    (rank,) = load.by_rank(99)
    assert (rank.running_count, rank.waiting_count, rank.used_tokens) == (1, 1, 10)
    empty = asyncio.create_task(load.empty())
    await asyncio.sleep(0)
    assert not empty.done()
    load.leave(0, 10, has_begun=True, ends=True)
    await asyncio.wait_for(empty, PATIENCE)
    load.depart(0)
    (rank,) = load.by_rank(99)
    assert (rank.running_count, rank.waiting_count, rank.used_tokens) == (0, 0, 0)
    assert (load.prefill_tokens, load.prefix_hit_tokens) == (3, 2)


async def test_an_engine_that_closes_a_gate_can_be_waited_for() -> None:
    with pytest.raises(TimeoutError):
        gate = SlotLimiter(1, 1)
        gate.shut()
        await asyncio.wait_for(gate.enter(0, 1), 0.01)
    gate.open()
    assert await gate.enter(0, 1) == 1
