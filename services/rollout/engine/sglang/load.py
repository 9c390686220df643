"""Slots of every data-parallel rank, handed out in order of arrival, and counts of samples."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout.engine.interface import RankLoad


@dataclass(eq=False)
class _Waiter:
    wanted: int
    granted: asyncio.Future[int]


class SlotLimiter:
    """Hands out slots; while it is shut nobody new gets one, and those who have one keep it."""

    def __init__(self, dp_size: int, slots: int) -> None:
        self._free = [slots] * dp_size
        self._waiters: list[deque[_Waiter]] = [deque() for _ in range(dp_size)]
        self._is_open = True

    async def enter(self, rank: int, wanted: int) -> int:
        """Waits for slots of `rank`; returns their number, at least one and at most `wanted`."""
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
        """Gives back slots."""
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


@dataclass
class _Rank:
    waiting: int = 0
    running: int = 0
    inside: int = 0
    reserved: int = 0


class Load:
    """Counts samples: each arrives, enters (has a slot), begins (its first token) and leaves."""

    def __init__(self, dp_size: int) -> None:
        self._ranks = [_Rank() for _ in range(dp_size)]
        self._changed = asyncio.Event()
        self.drawn_tokens = self.prefill_tokens = self.prefix_hit_tokens = 0
        self.moves = 0  # grows with whatever SGLang answers

    @property
    def waiting(self) -> int:
        return sum(rank.waiting for rank in self._ranks)

    @property
    def inside(self) -> int:
        return sum(rank.inside for rank in self._ranks)

    def arrive(self, rank: int, count: int) -> None:
        self._ranks[rank].waiting += count

    def depart(self, rank: int) -> None:
        """Takes out a sample that has had no slot."""
        self._ranks[rank].waiting -= 1

    def enter(self, rank: int, reserved: int) -> None:
        self.moves += 1
        self._ranks[rank].inside += 1
        self._ranks[rank].reserved += reserved

    def begin(self, rank: int, prefill_tokens: int, prefix_hit_tokens: int) -> None:
        self._ranks[rank].waiting -= 1
        self._ranks[rank].running += 1
        self.prefill_tokens += prefill_tokens
        self.prefix_hit_tokens += prefix_hit_tokens

    def draw(self, count: int) -> None:
        self.moves += 1
        self.drawn_tokens += count

    def leave(self, rank: int, reserved: int, *, has_begun: bool, ends: bool) -> None:
        """Gives a slot back; what neither ended nor began waits as before."""
        self.moves += 1
        place = self._ranks[rank]
        place.inside -= 1
        place.reserved -= reserved
        place.running -= has_begun
        place.waiting += (not ends) - (not has_begun)
        self._changed.set()

    async def empty(self) -> None:
        """Returns once nothing has a slot."""
        while self.inside:
            self._changed.clear()
            await self._changed.wait()

    def by_rank(self, max_tokens: int) -> Sequence[RankLoad]:
        return [
            RankLoad(
                running_count=rank.running,
                waiting_count=rank.waiting,
                used_tokens=rank.reserved,
                max_tokens=max_tokens,
            )
            for rank in self._ranks
        ]
