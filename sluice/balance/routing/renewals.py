"""Ids that were given back although this router did not know them.

A renewal that was on its way while its lease was given back must not charge it again. Ids
granted here are covered by the lease table; these are the others, remembered for a while.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sluice.balance.routing.clients import ClientRow
from sluice.balance.routing.groups import NO_GROUP
from sluice.balance.routing.leases import NOBODY, LeaseColumns
from sluice.balance.routing.tables import Tables
from sluice.balance.routing.types import Held, Renewal

_LIMIT = 200_000


class ReturnedIds:
    """Remembers an id for one to two `keep_seconds`."""

    def __init__(self, keep_seconds: float) -> None:
        self._keep = keep_seconds
        self._turned = 0.0
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __contains__(self, lease: int) -> bool:
        return lease in self._newer or lease in self._older

    def add(self, ids: Iterable[int]) -> None:
        if len(self._newer) < _LIMIT:
            self._newer.update(ids)

    def turn(self, now: float) -> None:
        """Forget the older half when its time is over."""
        if now - self._turned >= self._keep:
            self._older, self._newer, self._turned = self._newer, set(), now


IntArray = NDArray[np.int64]
_ON_ITS_WAY = 0.1  # share of a client's TTL in which an answer may still arrive


class Renewals:
    """`returned` is to be told of all ids that were given back and not live here."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.returned = ReturnedIds(tables.config.client_ttl)

    def take(self, row: ClientRow, held: Held, now: float) -> Renewal:
        """Charge what the client holds and nobody knows; drop what it never received."""
        known = self._tables.leases.is_live(row.slot, held.ids)
        unknown = np.flatnonzero(~known)
        adopted = self._adopt(row, held, unknown, now)
        row.returning = False
        released = self._drop_unlisted(row, held.ids, now)
        known[adopted] = True
        return Renewal(
            adopted_count=len(adopted),
            unknown=held.ids[~known],
            dropped_count=len(released),
            awaited=self._awaited(held, unknown),
            held_before=self._is_of_another_router(held.ids[adopted]),
        )

    def _is_of_another_router(self, ids: IntArray) -> bool:
        leases = self._tables.leases
        return bool(((ids >= 0) & ((ids < leases.first_id) | (ids >= leases.next_id))).any())

    def _awaited(self, held: Held, unknown: IntArray) -> frozenset[str]:
        used = np.unique(held.engines[unknown][held.ranks[unknown] >= 0]).tolist()
        names = (held.names[index] for index in used)
        return frozenset(name for name in names if self._tables.targets.find(name) is None)

    def _drop_unlisted(self, row: ClientRow, listed: IntArray, now: float) -> LeaseColumns:
        leases = self._tables.leases
        unlisted = np.setdiff1d(leases.held_by(row.slot), listed)
        again = np.intersect1d(unlisted, row.unlisted)
        if now - row.unlisted_since < self._tables.config.client_ttl * _ON_ITS_WAY:
            row.unlisted = again
            return leases.read(again[:0])
        released, _ = leases.release(row.slot, again)
        self._tables.give_back(released, row, now)
        row.unlisted, row.unlisted_since = np.setdiff1d(unlisted, again), now
        return released

    def _adopt(self, row: ClientRow, held: Held, indices: IntArray, now: float) -> IntArray:
        """Charge leases that another router, or this one before an expiry, had granted."""
        leases = self._tables.leases
        chosen: dict[int, tuple[int, int]] = {}  # id -> (index, target)
        for index in indices.tolist():
            lease, rank = int(held.ids[index]), int(held.ranks[index])
            foreign = not leases.first_id <= lease < leases.next_id
            if rank < 0 or lease in self.returned or not (foreign or row.returning):
                continue
            engine = self._tables.targets.find(held.names[int(held.engines[index])])
            if engine is None or rank >= engine.spec.dp_size or leases.client_of(lease) != NOBODY:
                continue
            chosen[lease] = (index, engine.first + rank)
        targets = np.asarray([target for _, target in chosen.values()], dtype=np.int64)
        leases.adopt(row.slot, np.asarray(list(chosen), dtype=np.int64), targets)
        self._tables.charge(targets, np.full(len(targets), NO_GROUP), now)
        return np.asarray([index for index, _ in chosen.values()], dtype=np.int64)
