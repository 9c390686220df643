"""The tables of one pool, and the moves that keep them in step: charge, give back, renew."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sluice.balance.routing.groups import NO_GROUP, NO_SESSION, GroupTable, SessionTable
from sluice.balance.routing.leases import NOBODY, ClientRow, ClientTable, LeaseColumns, LeaseTable
from sluice.balance.routing.targets import TargetTable
from sluice.balance.routing.types import (
    IntArray,
    LeaseClaims,
    PoolConfig,
    Renewal,
    all_true,
    full_of,
)

_RELEASED_LIMIT = 200_000
_ON_ITS_WAY = 0.1  # share of a client's TTL in which an answer may still arrive


class ReleasedIds:
    """Remembers ids whose release the lease table does not tell.

    A renewal that was on its way while its lease was given back must not charge it again. Ids
    granted here are covered by the lease table, but for those of a client that has just returned;
    the others are remembered for one to two `keep_seconds`.
    """

    def __init__(self, keep_seconds: float) -> None:
        self._keep = keep_seconds
        self._turned = 0.0
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __contains__(self, lease: int) -> bool:
        return lease in self._newer or lease in self._older

    def add(self, ids: Iterable[int]) -> None:
        if len(self._newer) < _RELEASED_LIMIT:
            self._newer.update(ids)

    def turn(self, now: float) -> None:
        """Forget the older half when its time is over."""
        if now - self._turned >= self._keep:
            self._older, self._newer, self._turned = self._newer, set(), now


class Tables:
    """Moves leases through all tables at once, so that charges always equal live leases."""

    def __init__(self, config: PoolConfig, first_lease_id: int) -> None:
        self.config = config
        self.targets = TargetTable(config, first_lease_id)  # so no two processes share epochs
        self.leases = LeaseTable(first_lease_id)
        self.clients = ClientTable(config.client_ttl)
        self.sessions = SessionTable(config.session_ttl)
        self.groups = GroupTable(config.group_ttl)
        self.released_ids = ReleasedIds(config.client_ttl)

    def charge(self, targets: IntArray, groups: IntArray, now: float) -> None:
        """Charge leases to targets[i] as samples of groups[i]; QUEUED ones are left out."""
        bound = targets >= 0
        if not all_true(bound):
            targets, groups = targets[bound], groups[bound]
        if not len(targets):
            return
        self.targets.charge(targets)
        self.groups.start(groups, now)

    def give_back(
        self, leases: LeaseColumns, row: ClientRow, now: float, tokens: IntArray | None = None
    ) -> None:
        """Undo the charges of leases just released; tokens int64[n], negative unknown."""
        if not len(leases):
            return
        targets = leases.targets
        bound = targets >= 0
        if not all_true(bound):
            targets = targets[bound]
            self.clients.queue(row, len(targets) - len(bound))
        self.targets.uncharge(targets)
        self.sessions.let_go(leases.sessions, now)
        self.groups.finish(leases.groups, tokens, now)

    def charge_one(self, target: int, group: int, now: float) -> None:
        """`charge` of one lease that has a target, without vectors."""
        self.targets.charge_one(target)
        self.groups.start_one(group, now)

    def give_back_one(
        self, lease: tuple[int, int, int], row: ClientRow, now: float, tokens: int
    ) -> None:
        """`give_back` of one lease (target, session, group), without vectors."""
        target, session, group = lease
        if target >= 0:
            self.targets.uncharge_one(target)
        else:
            self.clients.queue(row, -1)
        if session != NO_SESSION:
            self.sessions.let_go(np.array([session]), now)
        if group != NO_GROUP:
            self.groups.finish_one(group, 1, (tokens,), now)

    def renew(self, row: ClientRow, claims: LeaseClaims, now: float) -> Renewal:
        """Bring the tables in line with what a client holds.

        Charges what nobody knows here, and drops what the client never received.
        """
        known = self.leases.is_live(row.slot, claims.ids)
        unknown = np.flatnonzero(~known)
        adopted = self._adopt(row, claims, unknown, now)
        self._note_return(row, now)
        released = self._drop_unlisted(row, claims.ids, now)
        known[adopted] = True
        return Renewal(
            adopted_count=len(adopted),
            unknown=claims.ids[~known],
            dropped_count=len(released),
            awaited=self._awaited(claims, unknown),
            held_before=self._is_of_another_router(claims.ids[adopted]),
        )

    def _note_return(self, row: ClientRow, now: float) -> None:
        """Take a client for one that is back once it has renewed for as long as its TTL.

        Its first renewal may be an older one, which was on its way while the line was cut.
        """
        row.returned_at = min(row.returned_at, now)
        if now - row.returned_at >= self.config.client_ttl:
            row.returning = False

    def _is_of_another_router(self, ids: IntArray) -> bool:
        first, next_id = self.leases.first_id, self.leases.next_id
        return bool(((ids >= 0) & ((ids < first) | (ids >= next_id))).any())

    def _awaited(self, claims: LeaseClaims, unknown: IntArray) -> frozenset[str]:
        used = np.unique(claims.engines[unknown][claims.ranks[unknown] >= 0]).tolist()
        names = (claims.names[index] for index in used)
        return frozenset(name for name in names if self.targets.find(name) is None)

    def _drop_unlisted(self, row: ClientRow, listed: IntArray, now: float) -> LeaseColumns:
        leases = self.leases
        unlisted = np.setdiff1d(leases.held_by(row.slot), listed)
        again = np.intersect1d(unlisted, row.unlisted)
        if now - row.unlisted_since < self.config.client_ttl * _ON_ITS_WAY:
            row.unlisted = again
            return leases.read(again[:0])
        released, _ = leases.release(row.slot, again)
        self.give_back(released, row, now)
        row.unlisted, row.unlisted_since = np.setdiff1d(unlisted, again), now
        return released

    def _adopt(
        self, row: ClientRow, claims: LeaseClaims, indices: IntArray, now: float
    ) -> IntArray:
        """Charge leases that another router, or this one before an expiry, had granted.

        No more than may be out: the rest are unknown, like those of an engine that is gone.
        """
        leases, config = self.leases, self.config
        room = min(
            config.max_leases - leases.live_count,
            config.max_leases_per_client - leases.count_of(row.slot),
        )
        chosen: dict[int, tuple[int, int]] = {}  # id -> (index, target)
        for index in indices.tolist():
            lease, rank = int(claims.ids[index]), int(claims.ranks[index])
            foreign = not leases.first_id <= lease < leases.next_id
            if rank < 0 or lease in self.released_ids or not (foreign or row.returning):
                continue
            engine = self.targets.find(claims.names[int(claims.engines[index])])
            if engine is None or rank >= engine.spec.dp_size or leases.client_of(lease) != NOBODY:
                continue
            if len(chosen) >= room and lease not in chosen:
                break
            chosen[lease] = (index, engine.first + rank)
        targets = np.asarray([target for _, target in chosen.values()], dtype=np.int64)
        leases.adopt(row.slot, np.asarray(list(chosen), dtype=np.int64), targets)
        self.charge(targets, full_of(NO_GROUP, len(targets)), now)
        return np.asarray([index for index, _ in chosen.values()], dtype=np.int64)
