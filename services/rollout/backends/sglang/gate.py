"""Who may decode: slots of every data-parallel rank, handed out in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class _Waiter:
    wanted: int
    granted: asyncio.Future[int]


class Gate:
    """While it is closed, nobody new gets in; those inside stay."""

    def __init__(self, dp_size: int, slots: int) -> None:
        self._free = [slots] * dp_size
        self._waiters: list[deque[_Waiter]] = [deque() for _ in range(dp_size)]
        self._is_open = True

    async def enter(self, rank: int, wanted: int) -> int:
        """At least one slot of `rank`, at most `wanted`, as soon as there are any."""
        waiter = _Waiter(wanted, asyncio.get_running_loop().create_future())
        self._waiters[rank].append(waiter)
        self._admit(rank)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiters[rank]:
                self._waiters[rank].remove(waiter)
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.leave(rank, waiter.granted.result())
            raise

    def leave(self, rank: int, count: int = 1) -> None:
        """Give back slots."""
        self._free[rank] += count
        self._admit(rank)

    def shut(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        for rank in range(len(self._free)):
            self._admit(rank)

    def _admit(self, rank: int) -> None:
        waiters = self._waiters[rank]
        while self._is_open and waiters and self._free[rank]:
            waiter = waiters.popleft()
            if waiter.granted.done():
                continue
            count = min(waiter.wanted, self._free[rank])
            self._free[rank] -= count
            waiter.granted.set_result(count)
