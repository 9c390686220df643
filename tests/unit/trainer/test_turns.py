"""Calls that leave a trainer's queue, and those that have begun and go on without their caller."""

from __future__ import annotations

import asyncio

import pytest

from services.trainer.controller.state import Turns
from sluice.runtime.waits import Waits


class Call:
    """A call that stands until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.begun.set()
        await self.go_on.wait()
        self.done.set()


async def leave(caller: asyncio.Task[None]) -> None:
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_call_that_has_begun_goes_on_without_its_caller() -> None:
    turns, call = Turns(4, Waits()), Call()
    caller = asyncio.create_task(turns.run("first", call))
    await call.begun.wait()
    await leave(caller)
    call.go_on.set()
    await call.done.wait()


async def test_who_leaves_while_another_has_the_turn_never_begins() -> None:
    turns, first, left, last = Turns(4, Waits()), Call(), Call(), Call()
    holding = asyncio.create_task(turns.run("first", first))
    await first.begun.wait()
    leaving = asyncio.create_task(turns.run("left", left))
    waiting = asyncio.create_task(turns.run("last", last))
    await asyncio.sleep(0)
    await leave(leaving)
    first.go_on.set()
    last.go_on.set()
    await asyncio.gather(holding, waiting)
    assert last.done.is_set()
    assert not left.begun.is_set()


async def test_who_leaves_before_it_is_ready_gives_the_turn_up() -> None:
    turns, ready, left, last = Turns(4, Waits()), Call(), Call(), Call()
    leaving = asyncio.create_task(turns.run("left", left, ready))
    await ready.begun.wait()
    await leave(leaving)
    last.go_on.set()
    await turns.run("last", last)
    assert last.done.is_set()
    assert not left.begun.is_set()
    assert not ready.done.is_set()


async def test_what_is_wrong_before_it_is_ready_is_told_and_nothing_begins() -> None:
    async def fail() -> None:
        raise OSError("the version before is lost")

    turns, call = Turns(4, Waits()), Call()
    with pytest.raises(OSError, match="the version before is lost"):
        await turns.run("first", call, fail)
    assert not call.begun.is_set()
