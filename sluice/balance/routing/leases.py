"""Leases and their clients: every lease is charged once to one target and given back once, by id.

Recent leases live in flat arrays indexed by id (a sliding window), so granting, releasing and
expiring a batch are vector operations and a lease costs 20 bytes. The few that outlive the
window, and those adopted from an earlier router process, live in a dictionary.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sluice.balance.routing.types import BoolArray, IntArray, all_true

FREE = NOBODY = -1  # no such lease: never granted, or given back
QUEUED = -2  # granted an id, not yet bound to a target
_FIRST_WINDOW = 4096
_HANDFUL = 32  # up to so many a set is faster than vector operations
_EXPIRED_CLIENTS = 4096  # whose names are remembered


@dataclass(frozen=True, slots=True)
class LeaseColumns:
    """Holds columns of leases, each int64[n]; a target may be QUEUED, a session or group -1."""

    ids: IntArray
    targets: IntArray
    sessions: IntArray
    groups: IntArray

    def __len__(self) -> int:
        return len(self.ids)


class LeaseTable:
    """Hands out ids in ascending, contiguous ranges from `first_id`, never twice."""

    def __init__(self, first_id: int = 1) -> None:
        self.first_id = first_id
        self.next_id = first_id
        self.live_count = 0  # leases that are bound or queued
        self.local_count = 0  # of these, with negative ids: picked while no router was there
        self._base = first_id  # ids in [base, next_id) are in the window
        # Rows: target, client, session, group. FREE and NOBODY where there is no lease.
        self._columns: NDArray[np.int32]
        self._rows: list[memoryview]  # of them, for one lease
        self._adopt_columns(np.full((4, _FIRST_WINDOW), FREE, dtype=np.int32))
        self._old: dict[int, tuple[int, int, int, int]] = {}
        self._ids: dict[int, _ClientIds] = {}

    @property
    def holder_count(self) -> int:
        """How many clients have live leases."""
        return len(self._ids)

    def grant(
        self, client: int, targets: IntArray, sessions: IntArray | int, groups: IntArray | int
    ) -> int:
        """Record len(targets) new leases of `client`; returns the first of their ids."""
        count = len(targets)
        self._make_room(count)
        first = self.next_id
        self.next_id += count
        where = slice(first - self._base, self.next_id - self._base)
        self._columns[0, where] = targets
        self._columns[1, where] = client
        self._columns[2, where] = sessions
        self._columns[3, where] = groups
        self.live_count += count
        self._ids_of(client).extend_range(first, count)
        return first

    def grant_one(self, client: int, target: int, group: int) -> int:
        """`grant` of one lease without a session, without vectors."""
        lease = self.next_id
        if lease - self._base >= len(self._rows[0]):
            self._make_room(1)
        self.next_id += 1
        targets, clients, sessions, groups = self._rows
        where = lease - self._base
        targets[where], clients[where], sessions[where], groups[where] = target, client, FREE, group
        self.live_count += 1
        self._ids_of(client).extend_range(lease, 1)
        return lease

    def adopt(self, client: int, ids: IntArray, targets: IntArray) -> None:
        """Record leases that an earlier process granted, or this one before their client expired;
        none of `ids` may be live here."""
        for lease, target in zip(ids.tolist(), targets.tolist(), strict=True):
            if self._base <= lease < self.next_id:
                self._columns[:, lease - self._base] = (target, client, -1, -1)
            else:
                self._old[lease] = (target, client, -1, -1)
        self.live_count += len(ids)
        self.local_count += int((ids < 0).sum())
        self._ids_of(client).extend(ids)

    def bind(self, lease: int, target: int) -> None:
        """Give a queued lease its target."""
        if self._base <= lease < self.next_id:
            self._columns[0, lease - self._base] = target
        else:
            _, client, session, group = self._old[lease]
            self._old[lease] = (target, client, session, group)

    def target_of(self, lease: int) -> int:
        """Its target, QUEUED, or FREE."""
        if self._base <= lease < self.next_id:
            return int(self._columns[0, lease - self._base])
        entry = self._old.get(lease)
        return FREE if entry is None else entry[0]

    def client_of(self, lease: int) -> int:
        """The client that holds it, or NOBODY."""
        if self._base <= lease < self.next_id:
            return int(self._columns[1, lease - self._base])
        entry = self._old.get(lease)
        return NOBODY if entry is None else entry[1]

    def count_of(self, client: int) -> int:
        """How many live leases `client` holds."""
        owned = self._ids.get(client)
        return owned.live if owned is not None else 0

    def read(self, ids: IntArray) -> LeaseColumns:
        """Columns of live leases."""
        return LeaseColumns(ids, *self._gather(ids)[[0, 2, 3]])

    def read_one(self, lease: int) -> tuple[int, int, int]:
        """Target, session and group of a live lease."""
        if self._base <= lease < self.next_id:
            target, _, session, group = self._columns[:, lease - self._base].tolist()
        else:
            target, _, session, group = self._old[lease]
        return target, session, group

    def is_live(self, client: int, ids: IntArray) -> BoolArray:
        """bool[n]: which ids are live leases of `client`."""
        if self._all_inside(ids):
            return self._columns[1, ids - self._base] == client
        inside = (ids >= self._base) & (ids < self.next_id)
        live = np.zeros(len(ids), dtype=bool)
        where = ids[inside] - self._base
        live[inside] = self._columns[1, where] == client
        for index in np.flatnonzero(~inside).tolist() if self._old else ():
            entry = self._old.get(int(ids[index]))
            live[index] = entry is not None and entry[1] == client
        return live

    def release(self, client: int, ids: IntArray) -> tuple[LeaseColumns, BoolArray | None]:
        """Forget live leases of `client`; returns their columns, and bool[n]: which ids they
        were, or None for all of them, granted by this table.

        An id that is not a live lease of `client`, or appears a second time, counts for nothing.
        """
        released, live = self._release_recent(client, ids), None
        if released is None:
            live = self.is_live(client, ids) & _first_occurrence(ids)
            released = self._forget(ids[live])
        if owned := self._ids.get(client):
            owned.live -= len(released)
            self._tidy(client, owned)
        return released, live

    def release_one(self, client: int, lease: int) -> tuple[int, int, int] | None:
        """`release` of a live lease in the window, without vectors: its target, session and
        group. None for any other, which changes nothing."""
        where = lease - self._base
        if not 0 <= where < self.next_id - self._base:
            return None
        targets, clients, sessions, groups = self._rows
        owned = self._ids.get(client)
        if clients[where] != client or owned is None:
            return None
        released = targets[where], sessions[where], groups[where]
        targets[where], clients[where] = FREE, NOBODY
        self.live_count -= 1
        owned.live -= 1
        self._tidy(client, owned)
        return released

    def _release_recent(self, client: int, ids: IntArray) -> LeaseColumns | None:
        """What most releases are: live leases in the window, once each; None for others."""
        where = ids - self._base
        # As unsigned numbers, ids before the window are beyond it.
        size = self.next_id - self._base
        if not len(ids) or np.maximum.reduce(where.view(np.uint64)) >= size:
            return None
        columns = self._columns.take(where, axis=1)
        if not all_true(columns[1] == client) or not _distinct(where):
            return None
        self._columns[0][where] = FREE
        self._columns[1][where] = NOBODY
        self.live_count -= len(ids)
        return LeaseColumns(ids, columns[0], columns[2], columns[3])

    def release_client(self, client: int) -> LeaseColumns:
        """Forget all leases of `client`, in time proportional to their number."""
        return self.release(client, self.held_by(client))[0]

    def held_by(self, client: int) -> IntArray:
        """Ids of the live leases of `client`, int64[n]."""
        owned = self._ids.get(client)
        if owned is None:
            return np.empty(0, dtype=np.int64)
        ids = owned.ids()
        ids = ids[self.is_live(client, ids)]
        return ids if len(ids) == owned.live else np.unique(ids)  # one was adopted twice

    def bound_within(self, first_target: int, stop_target: int) -> tuple[IntArray, IntArray]:
        """(ids, clients) of all leases bound to targets in [first, stop); scans the table."""
        size = self.next_id - self._base
        targets = self._columns[0, :size]
        inside = np.flatnonzero((targets >= first_target) & (targets < stop_target))
        old = [(i, e[1]) for i, e in self._old.items() if first_target <= e[0] < stop_target]
        ids = np.concatenate([inside + self._base, _int64(i for i, _ in old)])
        clients = np.concatenate([self._columns[1, inside], _int64(c for _, c in old)])
        return ids, clients.astype(np.int64)

    def targets_of_group(self, group: int) -> IntArray:
        """int64[n]: targets of the group's bound leases; scans the table."""
        size = self.next_id - self._base
        targets = self._columns[0, :size][self._columns[3, :size] == group]
        old = [entry[0] for entry in self._old.values() if entry[3] == group]
        found = np.concatenate([targets, np.asarray(old, dtype=np.int64)])
        return found[found >= 0]

    def _forget(self, ids: IntArray) -> LeaseColumns:
        columns = self._gather(ids)
        if self._all_inside(ids):
            self._columns[:2, ids - self._base] = FREE
        else:
            inside = (ids >= self._base) & (ids < self.next_id)
            self._columns[:2, ids[inside] - self._base] = FREE
            for index in np.flatnonzero(~inside).tolist():
                del self._old[int(ids[index])]
            self.local_count -= int((ids < 0).sum())
        self.live_count -= len(ids)
        return LeaseColumns(ids, columns[0], columns[2], columns[3])

    def _all_inside(self, ids: IntArray) -> bool:
        return not len(ids) or bool(ids.min() >= self._base and ids.max() < self.next_id)

    def _gather(self, ids: IntArray) -> IntArray:
        """int64[4, n]: target, client, session and group of live leases."""
        if self._all_inside(ids):
            return self._columns[:, ids - self._base].astype(np.int64)
        inside = (ids >= self._base) & (ids < self.next_id)
        columns = np.empty((4, len(ids)), dtype=np.int64)
        columns[:, inside] = self._columns[:, ids[inside] - self._base]
        for index in np.flatnonzero(~inside).tolist():
            columns[:, index] = self._old[int(ids[index])]
        return columns

    def _ids_of(self, client: int) -> _ClientIds:
        owned = self._ids.get(client)
        if owned is None:
            owned = self._ids[client] = _ClientIds()
        return owned

    def _tidy(self, client: int, owned: _ClientIds) -> None:
        """Forget ids that are no longer live, once they are many beside those that are."""
        if owned.live <= 0:
            del self._ids[client]
            return
        if owned.size <= 2 * owned.live + _FIRST_WINDOW:
            return
        ids = self.held_by(client)
        owned.ranges, owned.size = [(ids, 0)], len(ids)

    def _adopt_columns(self, columns: NDArray[np.int32]) -> None:
        self._columns, self._rows = columns, [row.data for row in columns]

    def _make_room(self, count: int) -> None:
        """Slide the window past its oldest part, or widen it when many there are live."""
        size, capacity = self.next_id - self._base, self._columns.shape[1]
        if size + count <= capacity:
            return
        drop = min(size, max(capacity // 2, size + count - capacity))
        leaving = np.flatnonzero(self._columns[0, :drop] != FREE)
        if size + count - drop > capacity or len(leaving) * 8 > capacity:
            wider = 1 << (size + count + capacity // 2).bit_length()
            columns = np.full((4, wider), FREE, dtype=np.int32)
            columns[:, :size] = self._columns[:, :size]
            self._adopt_columns(columns)
            return
        for index in leaving.tolist():
            target, client, session, group = self._columns[:, index].tolist()
            self._old[self._base + index] = (target, client, session, group)
        kept = self._columns[:, drop:size].copy()
        if capacity > _FIRST_WINDOW and self.live_count * 16 < capacity:
            fewer = max(capacity // 2, size - drop + count)
            self._adopt_columns(np.full((4, fewer), FREE, np.int32))
        self._columns[:, : size - drop] = kept
        self._columns[:, size - drop :] = FREE
        self._base += drop


class _ClientIds:
    """Ids once granted to one client, a superset of what it holds, as ranges or arrays."""

    __slots__ = ("live", "ranges", "size")

    def __init__(self) -> None:
        self.ranges: list[tuple[IntArray | int, int]] = []
        self.size = 0
        self.live = 0

    def extend_range(self, first: int, count: int) -> None:
        self.ranges.append((first, count))
        self.size += count
        self.live += count

    def extend(self, ids: IntArray) -> None:
        self.ranges.append((ids, 0))
        self.size += len(ids)
        self.live += len(ids)

    def ids(self) -> IntArray:
        parts = [
            np.arange(start, start + count) if isinstance(start, int) else start
            for start, count in self.ranges
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


@dataclass
class ClientRow:
    """slot: its number in the lease columns; bound: (lease, target) of queued leases that got
    a target and that the client has not been told of; unlisted: leases it did not name when it
    renewed, of which it may not have heard; returning: it had expired, and what it names it still
    holds."""

    name: str
    slot: int
    last_seen: float
    returning: bool = False
    returned_at: float = math.inf  # its first renewal since
    queued: int = 0
    bound: list[tuple[int, int]] = field(default_factory=list)
    unlisted: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    unlisted_since: float = -math.inf  # the renewal that lacked those


class ClientTable:
    """Keeps clients in order of their last sign of life, so expiry looks at the expired alone."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._rows: OrderedDict[str, ClientRow] = OrderedDict()
        self._by_slot: dict[int, ClientRow] = {}
        self._expired: OrderedDict[str, None] = OrderedDict()  # names, the latest few thousand
        self._next_slot = 0
        self.queued = 0  # leases of all clients that wait

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def touch(self, name: str, now: float) -> ClientRow:
        """Note a sign of life; the client appears if unknown."""
        row = self._rows.get(name)
        if row is None:
            returning = name in self._expired
            self._expired.pop(name, None)
            row = self._rows[name] = ClientRow(name, self._next_slot, now, returning)
            self._by_slot[self._next_slot] = row
            self._next_slot += 1
        elif row.last_seen != now:
            self._rows.move_to_end(name)
            row.last_seen = now
        return row

    def find(self, name: str) -> ClientRow | None:
        return self._rows.get(name)

    def at(self, slot: int) -> ClientRow:
        return self._by_slot[slot]

    def queue(self, row: ClientRow, count: int) -> None:
        """Note `count` more leases of the client that wait; negative: that wait no more."""
        row.queued += count
        self.queued += count

    def remove(self, row: ClientRow) -> None:
        del self._rows[row.name]
        del self._by_slot[row.slot]

    def expired(self, now: float) -> list[ClientRow]:
        """Take out the clients whose heartbeat is overdue."""
        gone: list[ClientRow] = []
        while self._rows:
            row = next(iter(self._rows.values()))
            if row.last_seen > now - self._ttl:
                break
            self.expire(row)
            gone.append(row)
        return gone

    def expire(self, row: ClientRow) -> None:
        """Take out a client; should it come back, it is known to have been one."""
        self.remove(row)
        self._expired[row.name] = None
        if len(self._expired) > _EXPIRED_CLIENTS:
            self._expired.popitem(last=False)


def _int64(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)


def _distinct(values: IntArray) -> bool:
    """Whether no value appears twice; most often they ascend, as ids are given out."""
    if len(values) <= _HANDFUL:
        return len(set(values.tolist())) == len(values)
    return all_true(values[1:] > values[:-1]) or len(np.unique(values)) == len(values)


def _first_occurrence(ids: IntArray) -> BoolArray:
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    first = np.empty(len(ids), dtype=bool)
    first[order[:1]] = True
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first
