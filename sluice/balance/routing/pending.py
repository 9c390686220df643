"""Leases that wait for a target: a sample is bound when a rank can run it, not before.

Order: first one probe of every group of which nothing is known, then the longest expected
first (a group's finished siblings, or the caller's history, say how long). Waiting time counts
like expected time, so among samples that came together the longest is first, and none waits
forever behind later ones.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sluice.balance.routing.groups import NO_GROUP, GroupTable


@dataclass
class _Waiting:
    """Leases of one group (or a single lease) that wait, all alike but for their order."""

    group: int
    enqueued: float
    leases: deque[int] = field(default_factory=deque)
    stamp: int = 0  # heap entries with an older stamp are void
    alone: float = math.nan  # expected tokens of a lease without a group


class PendingQueue:
    """Waiting leases of one kind of need."""

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups
        self._waiting: dict[tuple[int, int], _Waiting] = {}  # (group, first lease if no group)
        self._heap: list[tuple[float, int, tuple[int, int]]] = []
        self._probes: deque[tuple[int, int]] = deque()
        self._unknown: deque[tuple[int, int]] = deque()  # a probe runs; oldest first
        self._stamp = 0
        self.count = 0  # leases in the queue, cancelled ones included until met

    def push(self, lease: int, group: int, expected: float, now: float) -> None:
        """Add a lease; `expected` tokens (NaN unknown) matter only without a group."""
        key = (group, lease if group == NO_GROUP else NO_GROUP)
        entry = self._waiting.get(key)
        fresh = entry is None
        if entry is None:
            entry = self._waiting[key] = _Waiting(group, now, alone=expected)
        entry.leases.append(lease)
        self.count += 1
        if fresh:
            self._file(key, entry)

    def learnt(self, group: int) -> None:
        """A sample of the group finished: its siblings' place in the queue may change."""
        key = (group, NO_GROUP)
        entry = self._waiting.get(key)
        if entry is not None:
            self._push_known(key, entry)

    def pop(self, now: float) -> int:
        """Take out the lease to bind next; raises IndexError when none waits."""
        while self._probes:
            key = self._probes.popleft()
            entry = self._waiting.get(key)
            if entry is not None:
                if len(entry.leases) > 1:
                    self._file_unknown(key, entry)
                return self._take(key, entry)
        known, unknown = self._first_known(), self._first_unknown()
        if known is None and unknown is None:
            raise IndexError("no lease waits")
        if known is None or (unknown is not None and self._unknown_rank(unknown, now) > known[0]):
            assert unknown is not None
            return self._take(unknown, self._waiting[unknown])
        return self._take(known[1], self._waiting[known[1]])

    def _file(self, key: tuple[int, int], entry: _Waiting) -> None:
        if not math.isnan(self._expected(entry)):
            self._push_known(key, entry)
        elif entry.group != NO_GROUP and math.isnan(self._groups.started[entry.group]):
            self._probes.append(key)
        else:
            self._file_unknown(key, entry)

    def _file_unknown(self, key: tuple[int, int], entry: _Waiting) -> None:
        if math.isnan(self._expected(entry)):
            self._unknown.append(key)
        else:
            self._push_known(key, entry)

    def _expected(self, entry: _Waiting) -> float:
        if entry.group == NO_GROUP:
            return entry.alone
        return float(self._groups.expected(np.asarray([entry.group]))[0])

    def _push_known(self, key: tuple[int, int], entry: _Waiting) -> None:
        self._stamp += 1
        entry.stamp = self._stamp
        seconds = self._expected(entry) * self._groups.seconds_per_token
        heapq.heappush(self._heap, (entry.enqueued - seconds, self._stamp, key))

    def _first_known(self) -> tuple[float, tuple[int, int]] | None:
        while self._heap:
            negated, stamp, key = self._heap[0]
            entry = self._waiting.get(key)
            if entry is not None and entry.stamp == stamp:
                return -negated, key
            heapq.heappop(self._heap)
        return None

    def _first_unknown(self) -> tuple[int, int] | None:
        while self._unknown:
            key = self._unknown[0]
            entry = self._waiting.get(key)
            if entry is not None and not entry.stamp:
                return key
            self._unknown.popleft()
        return None

    def _unknown_rank(self, key: tuple[int, int], now: float) -> float:
        """A group none of whose samples has ended runs at least as long as its oldest has."""
        entry = self._waiting[key]
        seconds = self._groups.mean_tokens * self._groups.seconds_per_token
        if entry.group != NO_GROUP:
            started = float(self._groups.started[entry.group])
            seconds = max(seconds, now - started if started == started else 0.0)
        return seconds - entry.enqueued

    def _take(self, key: tuple[int, int], entry: _Waiting) -> int:
        self.count -= 1
        lease = entry.leases.popleft()
        if not entry.leases:
            del self._waiting[key]
        return lease
