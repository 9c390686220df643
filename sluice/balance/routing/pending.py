"""Leases that wait for a target: a sample is bound when a rank can run it, not before.

Order: first one probe of every group of which nothing is known, then the longest expected
first (a group's finished siblings, or the caller's history, say how long). Waiting time counts
like expected length, so among samples that came together the longest is first, and none waits
forever behind later ones.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sluice.balance.routing.groups import NO_GROUP, GroupTable

_OUTLASTS = 2.0  # expected duration of a group without an end so far, over its age
_TOKENS_PER_SECOND = 50.0  # what a second of waiting weighs; the same for all, or order drifts
_VOID_LIMIT = 1024  # entries of a heap beyond four per entry that waits
_Key = tuple[int, int]  # group, and the lease where there is no group


@dataclass
class _Waiting:
    """Leases of one group (or a single lease) that wait, all alike but for their order."""

    group: int
    enqueued: float
    leases: deque[int] = field(default_factory=deque)
    stamp: int = 0  # heap entries with an older stamp are void
    alone: float = math.nan  # expected tokens of a lease without a group


@dataclass(frozen=True)
class Last:
    """Seconds the lease is expected to run (NaN unknown), and seconds it has waited."""

    key: _Key
    expected: float
    waited: float


class PendingQueue:
    """Waiting leases of one kind of need."""

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups
        self._waiting: dict[_Key, _Waiting] = {}
        self._heap: list[tuple[float, int, _Key]] = []  # longest expected first
        self._shortest: list[tuple[float, int, _Key]] = []
        self._probes: deque[_Key] = deque()
        self._unknown: deque[_Key] = deque()  # a probe runs; oldest first
        self._stamp = 0
        self.count = 0  # leases in the queue, given back ones included until met or swept

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

    def keep(self, waits: Callable[[int], bool]) -> None:
        """Take out the leases that do not wait."""
        for key, entry in list(self._waiting.items()):
            before = len(entry.leases)
            entry.leases = deque(filter(waits, entry.leases))
            self.count -= before - len(entry.leases)
            if not entry.leases:
                del self._waiting[key]
        self._probes = deque(key for key in self._probes if key in self._waiting)
        self._unknown = deque(key for key in self._unknown if key in self._waiting)
        self._forget_void()

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
        if known is None or (
            unknown is not None and self._unknown_urgency(unknown, now) > known[0]
        ):
            assert unknown is not None
            return self._take(unknown, self._waiting[unknown])
        return self._take(known[1], self._waiting[known[1]])

    def last(self, now: float) -> Last | None:
        """The lease that would be bound last, for an engine that only suits a short one."""
        known = self._first(self._shortest)
        unknown = self._last_of(self._unknown) or self._last_of(self._probes)
        if known is not None and (unknown is None or self._is_short(self._waiting[known])):
            return self._as_last(known, now)
        return None if unknown is None else self._as_last(unknown, now)

    def take(self, last: Last) -> int:
        """Take out what `last` returned, before anything else changes."""
        entry = self._waiting[last.key]
        lease = self._take(last.key, entry)
        if entry.leases and last.key in self._probes:
            self._probes.remove(last.key)
            self._file_unknown(last.key, entry)
        return lease

    def _as_last(self, key: _Key, now: float) -> Last:
        entry = self._waiting[key]
        expected = self._expected(entry) * self._groups.seconds_per_token
        return Last(key, expected, now - entry.enqueued)

    def _is_short(self, entry: _Waiting) -> bool:
        return self._expected(entry) <= self._groups.mean_tokens

    def _last_of(self, keys: deque[_Key]) -> _Key | None:
        while keys:
            entry = self._waiting.get(keys[-1])
            if entry is not None and not entry.stamp:
                return keys[-1]
            keys.pop()
        return None

    def _file(self, key: _Key, entry: _Waiting) -> None:
        if not math.isnan(self._expected(entry)):
            self._push_known(key, entry)
        elif entry.group != NO_GROUP and math.isnan(self._groups.started[entry.group]):
            self._probes.append(key)
        else:
            self._file_unknown(key, entry)

    def _file_unknown(self, key: _Key, entry: _Waiting) -> None:
        if math.isnan(self._expected(entry)):
            self._unknown.append(key)
        else:
            self._push_known(key, entry)

    def _expected(self, entry: _Waiting) -> float:
        if entry.group == NO_GROUP:
            return entry.alone
        return float(self._groups.expected(np.asarray([entry.group]))[0])

    def _push_known(self, key: _Key, entry: _Waiting) -> None:
        self._stamp += 1
        entry.stamp = self._stamp
        urgency = self._expected(entry) - entry.enqueued * _TOKENS_PER_SECOND
        heapq.heappush(self._heap, (-urgency, self._stamp, key))
        heapq.heappush(self._shortest, (urgency, self._stamp, key))
        if len(self._shortest) > _VOID_LIMIT + 4 * len(self._waiting):
            self._forget_void()

    def _forget_void(self) -> None:
        """Take void entries out of both heaps; they leave by themselves only at the front."""
        for heap in (self._heap, self._shortest):
            heap[:] = [item for item in heap if self._is_valid(item[1], item[2])]
            heapq.heapify(heap)

    def _is_valid(self, stamp: int, key: _Key) -> bool:
        entry = self._waiting.get(key)
        return entry is not None and entry.stamp == stamp

    def _first_known(self) -> tuple[float, _Key] | None:
        key = self._first(self._heap)
        return None if key is None else (-self._heap[0][0], key)

    def _first(self, heap: list[tuple[float, int, _Key]]) -> _Key | None:
        while heap:
            _, stamp, key = heap[0]
            if self._is_valid(stamp, key):
                return key
            heapq.heappop(heap)
        return None

    def _first_unknown(self) -> _Key | None:
        while self._unknown:
            key = self._unknown[0]
            entry = self._waiting.get(key)
            if entry is not None and not entry.stamp:
                return key
            self._unknown.popleft()
        return None

    def _unknown_urgency(self, key: _Key, now: float) -> float:
        """Lengths have heavy tails: what has not ended yet will take about as long again."""
        entry, tokens = self._waiting[key], self._groups.mean_tokens
        if entry.group != NO_GROUP:
            started = float(self._groups.started[entry.group])
            if started == started:
                age = (now - started) / self._groups.seconds_per_token
                tokens = max(tokens, _OUTLASTS * age)
        return tokens - entry.enqueued * _TOKENS_PER_SECOND

    def _take(self, key: _Key, entry: _Waiting) -> int:
        self.count -= 1
        lease = entry.leases.popleft()
        if not entry.leases:
            del self._waiting[key]
        return lease
