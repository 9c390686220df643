"""Turns: what changes the trainer runs one call at a time, in the order of the calls."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from services.trainer import metrics
from sluice.runtime.errors import QueueFullError
from sluice.runtime.waits import Waits

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """Runs calls one at a time, each to its end even if its caller goes away."""

    def __init__(self, limit: int, waits: Waits) -> None:
        self._limit, self._waits = limit, waits
        self._lock = asyncio.Lock()
        self._holder = ""
        self._calls: set[asyncio.Task[Any]] = set()

    async def run(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call` when it is its turn. Raises QueueFullError when too many wait for theirs."""
        if len(self._calls) >= self._limit:
            raise QueueFullError(
                f"{self._limit} calls wait for their turn", limit=self._limit, kind="calls"
            )
        task = asyncio.ensure_future(self.wait_and_run(what, call))
        self._calls.add(task)
        metrics.WAITING_CALLS.set(len(self._calls))
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    async def wait_and_run(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call` when it is its turn, however many wait."""
        with self._waits.waiting(f"turn of {what}", on=lambda: [self._holder]):
            await self._lock.acquire()
        self._holder = what
        try:
            return await call()
        finally:
            self._lock.release()

    async def close(self) -> None:
        """Cancel the calls that run or wait, and wait for their end."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        metrics.WAITING_CALLS.set(len(self._calls))


class TakesTurns(Protocol):
    """An owner of methods that are `in_turn`."""

    turns: Turns


S = TypeVar("S", bound=TakesTurns)


def in_turn(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], Awaitable[T]]:
    """Run a method as one of its owner's turns, named by the method."""
    what = method.__name__.replace("_", " ")

    @functools.wraps(method)
    async def run(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.turns.run(what, lambda: method(self, *args, **kwargs))

    return run
