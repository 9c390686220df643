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


class WaitingRoom:
    """One queue per kind of need, so a version nobody serves yet holds up no other."""

    def __init__(self, tables: Tables, placement: Placement) -> None:
        self._tables = tables
        self._placement = placement
        self._lanes: dict[Needs, PendingQueue] = {}
        self.woken: set[str] = set()  # clients whose `bound` has news

    @property
    def count(self) -> int:
        """Leases that wait, those cancelled but not yet met included."""
        return sum(lane.count for lane in self._lanes.values())

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
        row.queued += len(ids)

    def learnt(self, groups: IntArray) -> None:
        """Samples of these groups ended: expectations of their siblings have changed."""
        if not self._lanes:
            return
        for group in np.unique(groups[groups >= 0]).tolist():
            for lane in self._lanes.values():
                lane.learnt(group)

    def dispatch(self, now: float) -> int:
        """Bind as many waiting leases as there are free slots; returns how many."""
        if not self._lanes:
            return 0
        count = 0
        for needs, lane in list(self._lanes.items()):
            while lane.count:
                bound = self._fill(needs, lane, now)
                if not bound:
                    break
                count += bound
            if not lane.count:
                del self._lanes[needs]
        return count

    def _fill(self, needs: Needs, lane: PendingQueue, now: float) -> int:
        free = min(self._tables.targets.fleet(needs).free_count, _BATCH)
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
            unknown = np.full(len(rest), np.nan)  # they are in order already
            fleet = self._tables.targets.fleet(needs)
            targets[rest] = self._placement.spread(fleet, groups, unknown, None)
            self._tables.charge(targets[rest], groups, now)
        for index in np.flatnonzero(targets == QUEUED).tolist():  # a session took its slot
            lane.push(int(ids[index]), int(columns.groups[index]), np.nan, now)
        self._bind(ids, targets)
        return int((targets >= 0).sum())

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
            row.queued -= 1
            row.bound.append((lease, target))
            self.woken.add(row.name)
