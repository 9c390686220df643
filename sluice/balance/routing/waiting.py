"""Leases that wait for a target: a sample is bound when a rank can run it, not before.

Order: first one probe of every group of which nothing is known, then the longest expected
first (a group's finished siblings, or the caller's history, say how long). Waiting time counts
like expected length, so among samples that came together the longest is first, and none waits
forever behind later ones.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sluice.balance.routing.groups import NO_GROUP, NO_SESSION, UNPLACED, GroupTable
from sluice.balance.routing.leases import QUEUED, ClientRow
from sluice.balance.routing.placement import TargetSelector
from sluice.balance.routing.tables import Tables
from sluice.balance.routing.types import FloatArray, IntArray, Needs

_OUTLASTS = 2.0  # expected duration of a group without an end so far, over its age
_TOKENS_PER_SECOND = 50.0  # what a second of waiting weighs; the same for all, or order drifts
_BATCH = 1024
_STALE_SHARE = 8  # a sweep is due when one in so many has been given back
_CAUTION = 2.0  # an unknown duration is taken for this many mean ones
MOST_NEEDS = 64  # different versions that the leases of one client wait for
_VOID_LIMIT = 1024  # entries of a heap beyond four per entry that waits
_Key = tuple[int, int]  # group, and the lease where there is no group


@dataclass
class _PendingGroup:
    """Leases of one group (or a single lease) that wait, all alike but for their order."""

    group: int
    enqueued: float
    leases: deque[int] = field(default_factory=deque)
    stamp: int = 0  # heap entries with an older stamp are void
    alone: float = math.nan  # expected tokens of a lease without a group


@dataclass(frozen=True)
class QueueTail:
    """Names the last lease of a queue: seconds it will run (NaN unknown) and has waited."""

    key: _Key
    expected: float
    waited: float


class PendingQueue:
    """Orders the leases that wait for the same versions."""

    def __init__(self, groups: GroupTable, opener: str = "") -> None:
        self._groups = groups
        self.opener = opener  # the client whose lease was the first
        self._waiting: dict[_Key, _PendingGroup] = {}
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
            entry = self._waiting[key] = _PendingGroup(group, now, alone=expected)
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

    def length_changed(self, group: int) -> None:
        """Move the siblings of a sample that finished: their expected length has changed."""
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

    def last(self, now: float) -> QueueTail | None:
        """Returns the lease that would be bound last, for an engine that suits short ones."""
        known = self._first(self._shortest)
        unknown = self._last_of(self._unknown) or self._last_of(self._probes)
        if known is not None and (unknown is None or self._is_short(self._waiting[known])):
            return self._as_tail(known, now)
        return None if unknown is None else self._as_tail(unknown, now)

    def take(self, last: QueueTail) -> int:
        """Take out what `last` returned, before anything else changes."""
        entry = self._waiting[last.key]
        lease = self._take(last.key, entry)
        if entry.leases and last.key in self._probes:
            self._probes.remove(last.key)
            self._file_unknown(last.key, entry)
        return lease

    def _as_tail(self, key: _Key, now: float) -> QueueTail:
        entry = self._waiting[key]
        expected = self._expected(entry) * self._groups.seconds_per_token
        return QueueTail(key, expected, now - entry.enqueued)

    def _is_short(self, entry: _PendingGroup) -> bool:
        return self._expected(entry) <= self._groups.mean_tokens

    def _last_of(self, keys: deque[_Key]) -> _Key | None:
        while keys:
            entry = self._waiting.get(keys[-1])
            if entry is not None and not entry.stamp:
                return keys[-1]
            keys.pop()
        return None

    def _file(self, key: _Key, entry: _PendingGroup) -> None:
        if not math.isnan(self._expected(entry)):
            self._push_known(key, entry)
        elif entry.group != NO_GROUP and math.isnan(self._groups.started[entry.group]):
            self._probes.append(key)
        else:
            self._file_unknown(key, entry)

    def _file_unknown(self, key: _Key, entry: _PendingGroup) -> None:
        if math.isnan(self._expected(entry)):
            self._unknown.append(key)
        else:
            self._push_known(key, entry)

    def _expected(self, entry: _PendingGroup) -> float:
        if entry.group == NO_GROUP:
            return entry.alone
        return self._groups.expected_of(entry.group)

    def _push_known(self, key: _Key, entry: _PendingGroup) -> None:
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

    def _take(self, key: _Key, entry: _PendingGroup) -> int:
        self.count -= 1
        lease = entry.leases.popleft()
        if not entry.leases:
            del self._waiting[key]
        return lease


class PendingQueues:
    """Keeps a queue for each kind of need, so a version nobody serves yet holds up no other."""

    def __init__(self, tables: Tables, placement: TargetSelector) -> None:
        self._tables = tables
        self._placement = placement
        self._lanes: dict[Needs, PendingQueue] = {}
        self._opened: Counter[str] = Counter()  # of them, by client
        self.woken: set[str] = set()  # clients whose `bound` has news

    @property
    def count(self) -> int:
        """How many leases wait."""
        return self._tables.clients.queued

    def takes(self, client: str, needs: Needs) -> bool:
        """Whether a lease of the client may wait for these versions: every change of the pool
        looks at each queue, so no client opens many."""
        return needs in self._lanes or self._opened[client] < MOST_NEEDS

    def has(self, needs: Needs) -> bool:
        lane = self._lanes.get(needs)
        return lane is not None and lane.count > 0

    def add(
        self,
        row: ClientRow,
        ids: IntArray,
        groups: IntArray,
        expected: FloatArray,
        needs: Needs,
        now: float,
    ) -> None:
        """Queue leases ids[i] of groups[i] with expected[i] tokens (NaN unknown)."""
        lane = self._lanes.get(needs)
        if lane is None:
            lane = self._lanes[needs] = PendingQueue(self._tables.groups, row.name)
            self._opened[row.name] += 1
        for lease, group, tokens in zip(
            ids.tolist(), groups.tolist(), expected.tolist(), strict=True
        ):
            lane.push(lease, group, tokens, now)
        self._tables.clients.queue(row, len(ids))

    def lengths_changed(self, groups: IntArray) -> None:
        """Move the siblings of samples that ended: their expected lengths have changed."""
        if not self._lanes:
            return
        for group in np.unique(groups[groups >= 0]).tolist():
            self.length_changed(group)

    def length_changed(self, group: int) -> None:
        """Move the siblings of a sample that ended; the group may be NO_GROUP."""
        if group != NO_GROUP:
            for lane in self._lanes.values():
                lane.length_changed(group)

    def sweep(self) -> None:
        """Take out what was given back while it waited, once that is much beside what waits.

        Nothing else does where no rank comes free, as for a version that nobody serves any more.
        """
        stale = sum(lane.count for lane in self._lanes.values()) - self.count
        if stale * _STALE_SHARE <= self.count:
            return
        target_of = self._tables.leases.target_of
        for needs, lane in list(self._lanes.items()):
            lane.keep(lambda lease: target_of(lease) == QUEUED)
            if not lane.count:
                self._close(needs)

    def dispatch(self, now: float) -> int:
        """Bind as many waiting leases as there are free slots; returns how many."""
        if not self._lanes:
            return 0
        count = 0
        for needs, lane in list(self._lanes.items()):
            while lane.count and (bound := self._fill(needs, lane, now)):
                count += bound
            if lane.count:
                count += self._fill_slow(needs, lane, now)
            if not lane.count:
                self._close(needs)
        return count

    def _close(self, needs: Needs) -> None:
        opener = self._lanes.pop(needs).opener
        self._opened[opener] -= 1
        if not self._opened[opener]:
            del self._opened[opener]

    def _fill(self, needs: Needs, lane: PendingQueue, now: float) -> int:
        """Bind those in front, one for every free slot that is not a slow engine's."""
        free = min(self._tables.targets.prompt_free_count(needs), _BATCH)
        ids = self._pop(lane, free, now)
        if not len(ids):
            return 0
        if len(ids) == 1 and self._fill_last_slot(int(ids[0]), needs, now):
            return 1
        columns = self._tables.leases.read(ids)
        single = columns.sessions == NO_SESSION
        targets = np.full(len(ids), QUEUED, dtype=np.int64)
        for index in np.flatnonzero(~single).tolist():
            targets[index] = self._session_target(int(columns.sessions[index]), needs)
            self._tables.charge(targets[index : index + 1], columns.groups[index : index + 1], now)
        rest = np.flatnonzero(single)
        if len(rest):
            groups = columns.groups[rest]
            fleet = self._tables.targets.fleet(needs)
            targets[rest] = self._placement.spread(fleet, groups, None, None)  # in order already
            self._tables.charge(targets[rest], groups, now)
        for index in np.flatnonzero(targets == QUEUED).tolist():  # a session took its slot
            lane.push(int(ids[index]), int(columns.groups[index]), np.nan, now)
        self._bind(ids, targets)
        return int((targets >= 0).sum())

    def _fill_last_slot(self, lease: int, needs: Needs, now: float) -> bool:
        """Bind a lease to the one slot that is free, without vectors; False where the lease has a
        session or there are more."""
        fleet = self._tables.targets.fleet(needs)
        _, session, group = self._tables.leases.read_one(lease)
        if fleet.free_count != 1 or session != NO_SESSION:
            return False
        target = int(fleet.room.argmax())
        self._tables.charge_one(target, group, now)
        self._bind_one(lease, target)
        return True

    def _fill_slow(self, needs: Needs, lane: PendingQueue, now: float) -> int:
        """Give a slow engine's free slots to those at the end that are done sooner there.

        At the end of the queue a lease waits about `lane.count` / (running elsewhere) mean
        durations for a prompt rank; on the slow engine it loses (slowdown - 1) of its own.
        """
        tables, bound = self._tables, 0
        while lane.count and (slow := tables.targets.slow_fleet(needs)) is not None:
            last = lane.last(now)
            if last is None:
                break
            mean = tables.groups.mean_tokens * tables.groups.seconds_per_token
            duration = last.expected if last.expected == last.expected else mean * _CAUTION
            wait = lane.count / max(slow.running_elsewhere, 1) * mean
            if mean and duration * (slow.slowdown - 1.0) > max(wait, last.waited):
                break
            if not mean and lane.count < slow.running_elsewhere * (slow.slowdown - 1) * _CAUTION:
                break
            lease = lane.take(last)
            if tables.leases.target_of(lease) != QUEUED:
                continue
            ids = np.array([lease])
            columns = tables.leases.read(ids)
            if columns.sessions[0] != NO_SESSION:
                targets = self._placement.open_sessions(slow.fleet, columns.sessions.tolist())
            else:
                targets = self._placement.spread(slow.fleet, columns.groups, None, None)
            tables.charge(targets, columns.groups, now)
            self._bind(ids, targets)
            bound += 1
        return bound

    def _pop(self, lane: PendingQueue, count: int, now: float) -> IntArray:
        ids: list[int] = []
        while len(ids) < count and lane.count:
            lease = lane.pop(now)
            if self._tables.leases.target_of(lease) == QUEUED:  # else it was given back
                ids.append(lease)
        return np.asarray(ids, dtype=np.int64)

    def _session_target(self, session: int, needs: Needs) -> int:
        sessions, targets = self._tables.sessions, self._tables.targets
        target = sessions.target(session)
        if target != UNPLACED and targets.able(needs)[targets.engine_of[target]]:
            return target
        chosen = self._placement.open_sessions(targets.fleet(needs), [session])
        return int(chosen[0]) if len(chosen) else QUEUED

    def _bind(self, ids: IntArray, targets: IntArray) -> None:
        for lease, target in zip(ids.tolist(), targets.tolist(), strict=True):
            if target != QUEUED:
                self._bind_one(lease, target)

    def _bind_one(self, lease: int, target: int) -> None:
        leases, clients = self._tables.leases, self._tables.clients
        leases.bind(lease, target)
        row = clients.at(leases.client_of(lease))
        clients.queue(row, -1)
        row.bound.append((lease, target))
        self.woken.add(row.name)
