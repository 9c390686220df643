"""Sticky sessions: a conversation stays on the (engine, dp rank) that holds its KV cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

NO_SESSION = -1
UNPLACED = -1


class SessionTable:
    """Sessions by key; each counts on one target until it ends or idles without a lease."""

    def __init__(self, idle_seconds: float, target_count: int = 0) -> None:
        self._idle_seconds = idle_seconds
        self._slots: dict[str, int] = {}
        self._keys: list[str | None] = []
        self._free: list[int] = []
        self._used = np.zeros(0)  # float64[slot]: last use; inf where the slot is free
        self._live = np.zeros(0, dtype=np.int64)  # leases held in the session
        self._target = np.zeros(0, dtype=np.int64)
        self.active = np.zeros(target_count, dtype=np.int64)  # int64[target]: sessions on it

    def __len__(self) -> int:
        return len(self._slots)

    def widen(self, target_count: int) -> None:
        """Make room for more targets."""
        more = np.zeros(target_count - len(self.active), dtype=np.int64)
        self.active = np.concatenate([self.active, more])

    def find(self, key: str) -> int:
        """Its slot, or NO_SESSION."""
        return self._slots.get(key, NO_SESSION)

    def open(self, key: str, now: float) -> int:
        """The slot of `key`, taken if new; a new session is UNPLACED."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._take(key)
        self._used[slot] = now
        return slot

    def target(self, slot: int) -> int:
        return int(self._target[slot])

    def place(self, slot: int, target: int) -> None:
        """Move a session to `target` (UNPLACED takes it off)."""
        previous = self._target[slot]
        if previous != UNPLACED:
            self.active[previous] -= 1
        if target != UNPLACED:
            self.active[target] += 1
        self._target[slot] = target

    def hold(self, slots: IntArray) -> None:
        """Note leases granted in sessions (or NO_SESSION); none idles while one is held."""
        if not self._keys:
            return
        held = slots[slots >= 0]
        if len(held):
            np.add.at(self._live, held, 1)

    def let_go(self, slots: IntArray, now: float) -> None:
        """Note leases given back; slots may hold NO_SESSION."""
        if not self._keys:
            return
        chosen = slots[slots >= 0]
        if len(chosen):
            np.subtract.at(self._live, chosen, 1)
            self._used[chosen] = now
            for slot in chosen.tolist():
                if self._keys[slot] is None:  # it ended while this lease was held
                    self._used[slot] = np.inf
                    self._give_back(slot)

    def end(self, key: str) -> bool:
        """Forget a session; False if unknown. Its leases stay charged until given back."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return False
        self.place(slot, UNPLACED)
        self._keys[slot] = None
        self._used[slot] = np.inf
        if self._live[slot] <= 0:
            self._give_back(slot)
        return True

    def clear_target(self, first: int, stop: int) -> int:
        """Take all sessions off targets [first, stop), whose cache is gone; returns how many."""
        moved = np.flatnonzero((self._target >= first) & (self._target < stop))
        self._target[moved] = UNPLACED
        self.active[first:stop] = 0
        return len(moved)

    def expire(self, now: float) -> int:
        """End sessions idle for longer than the limit; returns how many."""
        idle = np.flatnonzero((self._used <= now - self._idle_seconds) & (self._live <= 0))
        for slot in idle.tolist():
            key = self._keys[slot]
            assert key is not None
            self.end(key)
        return len(idle)

    def _give_back(self, slot: int) -> None:
        if self._live[slot] == 0:
            self._live[slot] = -1  # marks it free, so that it is given back once
            self._free.append(slot)

    def _take(self, key: str) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._keys[slot] = key
        self._live[slot] = 0
        self._target[slot] = UNPLACED
        return slot

    def _grow(self) -> None:
        size = len(self._keys)
        more = max(64, size)
        self._keys += [None] * more
        self._free += range(size + more - 1, size - 1, -1)
        self._used = np.concatenate([self._used, np.full(more, np.inf)])
        self._live = np.concatenate([self._live, np.full(more, -1, dtype=np.int64)])
        self._target = np.concatenate([self._target, np.full(more, UNPLACED, dtype=np.int64)])
