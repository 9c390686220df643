"""Brings the lease table in line with what a client says it holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sluice.balance.routing.clients import ClientRow
from sluice.balance.routing.groups import NO_GROUP
from sluice.balance.routing.leases import NOBODY, Leases
from sluice.balance.routing.returned import ReturnedIds
from sluice.balance.routing.tables import Tables
from sluice.balance.routing.types import Held, Renewal

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
        adopted = self._adopt(row, held, np.flatnonzero(~known), now)
        row.returning = False
        released = self._drop_unlisted(row, held.ids, now)
        known[adopted] = True
        return Renewal(
            adopted_count=len(adopted), unknown=held.ids[~known], dropped_count=len(released)
        )

    def _drop_unlisted(self, row: ClientRow, listed: IntArray, now: float) -> Leases:
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
