"""The tables of one pool, and the two moves that keep them in step: charge and give back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice.balance.routing.clients import ClientRow, ClientTable
from sluice.balance.routing.groups import GroupTable
from sluice.balance.routing.leases import LeaseColumns, LeaseTable
from sluice.balance.routing.sessions import SessionTable
from sluice.balance.routing.targets import TargetTable
from sluice.balance.routing.types import PoolConfig, all_of

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    config: PoolConfig
    targets: TargetTable
    leases: LeaseTable
    clients: ClientTable
    sessions: SessionTable
    groups: GroupTable

    @classmethod
    def create(cls, config: PoolConfig, first_lease_id: int) -> Tables:
        return cls(
            config=config,
            targets=TargetTable(config, first_lease_id),  # so no two processes share epochs
            leases=LeaseTable(first_lease_id),
            clients=ClientTable(config.client_ttl),
            sessions=SessionTable(config.session_ttl),
            groups=GroupTable(config.group_ttl),
        )

    def charge(self, targets: IntArray, groups: IntArray, now: float) -> None:
        """Charge leases to targets[i] as samples of groups[i]; QUEUED ones are left out."""
        bound = targets >= 0
        if not all_of(bound):
            targets, groups = targets[bound], groups[bound]
        if not len(targets):
            return
        self.targets.charge(targets)
        self.groups.start(groups, now)

    def give_back(
        self, leases: LeaseColumns, row: ClientRow, now: float, tokens: IntArray | None = None
    ) -> None:
        """Undo the charges of leases just released; tokens float64[n], negative unknown."""
        if not len(leases):
            return
        targets = leases.targets
        bound = targets >= 0
        if not all_of(bound):
            targets = targets[bound]
            self.clients.queue(row, len(targets) - len(bound))
        self.targets.uncharge(targets)
        self.sessions.let_go(leases.sessions, now)
        self.groups.finish(leases.groups, tokens, now)
