"""One timer for many deadlines: each is kept, whichever of them it was set for."""

import asyncio

from sluice.runtime.deadlines import Deadlines
from tests.patience import PATIENCE


async def rung(expected: list[str], *steps: tuple[str, str, float]) -> list[str]:
    """What is told to be overdue, as far as `expected` is long, after ("add", key, seconds) and
    ("remove", key, _)."""
    told: asyncio.Queue[str] = asyncio.Queue()
    deadlines = Deadlines[str](told.put_nowait)
    for step, key, seconds in steps:
        deadlines.add(key, seconds) if step == "add" else deadlines.remove(key)
    async with asyncio.timeout(PATIENCE):
        found = [await told.get() for _ in expected]
    deadlines.close()
    assert told.empty()
    return found


async def test_each_is_overdue_in_its_time_and_once():
    order = ["first", "second", "third"]
    steps = [("add", "third", 0.05), ("add", "first", 0.01), ("add", "never", 1000.0)]
    assert await rung(order, *steps, ("add", "second", 0.03)) == order


async def test_what_is_removed_is_not_overdue_and_those_after_it_are():
    steps = [("add", "gone", 0.01), ("add", "late", 0.02), ("remove", "gone", 0.0)]
    assert await rung(["late"], *steps, ("remove", "unknown", 0.0)) == ["late"]


async def test_one_may_be_added_while_it_rings_and_none_after_the_close():
    told: asyncio.Queue[str] = asyncio.Queue()

    def overdue(key: str) -> None:
        told.put_nowait(key)
        if key == "a":
            deadlines.add("b", 0.01)

    deadlines = Deadlines[str](overdue)
    deadlines.add("a", 0.0)
    async with asyncio.timeout(PATIENCE):
        assert [await told.get(), await told.get()] == ["a", "b"]
    deadlines.add("c", 0.0)
    deadlines.close()
    timer = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.02, timer.set_result, None)
    await timer
    assert told.empty()
