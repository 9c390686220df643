"""Many deadlines on one timer: most of what is awaited comes long before them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")


class Deadlines(Generic[K]):
    """Calls `overdue` with what is still here when its time is over.

    A timer for each that is cancelled a moment later would cost more than the wait itself.
    """

    def __init__(self, overdue: Callable[[K], None]) -> None:
        self._overdue = overdue
        self._until: dict[K, float] = {}  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._next = math.inf  # when it rings
        self._loop: asyncio.AbstractEventLoop | None = None  # asked for once: that is a system call

    def add(self, key: K, seconds: float) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        until = self._until[key] = self._loop.time() + seconds
        if until < self._next:
            self._ring_at(until)

    def remove(self, key: K) -> None:
        """What is not here is no error."""
        self._until.pop(key, None)

    def close(self) -> None:
        """Call for nothing any more."""
        self._until.clear()
        self._silence()

    def _ring_at(self, until: float) -> None:
        self._silence()
        self._timer = asyncio.get_running_loop().call_at(until, self._ring)
        self._next = until

    def _silence(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next = None, math.inf

    def _ring(self) -> None:
        self._silence()
        now = asyncio.get_running_loop().time()
        late = [key for key, until in self._until.items() if until <= now]
        for key in late:
            self.remove(key)
        if self._until:
            self._ring_at(min(self._until.values()))
        for key in late:
            self._overdue(key)
