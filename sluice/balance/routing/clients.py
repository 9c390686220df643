"""Clients of a pool: one heartbeat each, however many leases they hold."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_REMEMBERED = 4096


@dataclass
class ClientRow:
    """slot: its number in the lease columns; bound: (lease, target) of queued leases that got
    a target and that the client has not been told of; unlisted: leases it did not name when it
    renewed, of which it may not have heard."""

    name: str
    slot: int
    last_seen: float
    returning: bool = False  # it had expired: what it lists at its next renewal it still holds
    queued: int = 0
    bound: list[tuple[int, int]] = field(default_factory=list)
    unlisted: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    unlisted_since: float = -math.inf  # the renewal that lacked those


class ClientTable:
    """Clients in order of their last sign of life, so expiry looks at the expired alone."""

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
        else:
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
            self.remove(row)
            self._expired[row.name] = None
            if len(self._expired) > _REMEMBERED:
                self._expired.popitem(last=False)
            gone.append(row)
        return gone
