"""Leases that have an id but no target yet, and their binding when credits come free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sluice.balance.routing.clients import ClientRow
from sluice.balance.routing.leases import QUEUED
from sluice.balance.routing.pending import PendingQueue
from sluice.balance.routing.placement import Placement
from sluice.balance.routing.sessions import NO_SESSION, UNPLACED
from sluice.balance.routing.tables import Tables
from sluice.balance.routing.types import Needs

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
_BATCH = 1024
_STALE_SHARE = 8  # a sweep is due when one in so many has been given back
_CAUTION = 2.0  # an unknown duration is taken for this many mean ones


class WaitingRoom:
    """One queue per kind of need, so a version nobody serves yet holds up no other."""

    def __init__(self, tables: Tables, placement: Placement) -> None:
        self._tables = tables
        self._placement = placement
        self._lanes: dict[Needs, PendingQueue] = {}
        self.woken: set[str] = set()  # clients whose `bound` has news

    @property
    def count(self) -> int:
        """Leases that wait."""
        return self._tables.clients.queued

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
            lane = self._lanes[needs] = PendingQueue(self._tables.groups)
        for lease, group, tokens in zip(
            ids.tolist(), groups.tolist(), expected.tolist(), strict=True
        ):
            lane.push(lease, group, tokens, now)
        self._tables.clients.queue(row, len(ids))

    def learnt(self, groups: IntArray) -> None:
        """Samples of these groups ended: expectations of their siblings have changed."""
        if not self._lanes:
            return
        for group in np.unique(groups[groups >= 0]).tolist():
            for lane in self._lanes.values():
                lane.learnt(group)

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
                del self._lanes[needs]

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
                del self._lanes[needs]
        return count

    def _fill(self, needs: Needs, lane: PendingQueue, now: float) -> int:
        """Bind those in front, one for every free slot that is not a slow engine's."""
        free = min(self._tables.targets.prompt_free_count(needs), _BATCH)
        ids = self._pop(lane, free, now)
        if not len(ids):
            return 0
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
        leases, clients = self._tables.leases, self._tables.clients
        for lease, target in zip(ids.tolist(), targets.tolist(), strict=True):
            if target == QUEUED:
                continue
            leases.bind(lease, target)
            row = clients.at(leases.client_of(lease))
            clients.queue(row, -1)
            row.bound.append((lease, target))
            self.woken.add(row.name)
