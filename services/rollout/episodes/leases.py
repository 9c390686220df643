"""Leases over (engine, dp rank): which engine samples what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.rollout.wire import VersionBounds


@dataclass(frozen=True)
class Lease:
    """The right to run one sample on a data-parallel rank of an engine."""

    lease_id: int
    engine_id: str
    address: str
    dp_rank: int


class LeaseSource(Protocol):
    """Where leases come from."""

    async def acquire(self, count: int, bounds: VersionBounds, pool: str) -> list[Lease]:
        """`count` leases; waits until engines can serve them."""

    def release(self, leases: Sequence[Lease]) -> None:
        """Give leases back; does not wait."""
