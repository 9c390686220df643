"""Leases over (engine, dp rank): placement, sessions, late binding, health. Pure; no transport."""

from __future__ import annotations

from sluice.balance.routing.health import RankReport
from sluice.balance.routing.leases import QUEUED
from sluice.balance.routing.placement import POLICIES
from sluice.balance.routing.pool import Expired, Pool
from sluice.balance.routing.types import (
    NO_VERSION,
    BreakerConfig,
    EngineSpec,
    EngineState,
    EngineView,
    Grant,
    LeaseClaims,
    LeaseRefusedError,
    LeaseRequest,
    Needs,
    Outcome,
    PoolConfig,
    Refusal,
    Renewal,
)

__all__ = [
    "NO_VERSION",
    "POLICIES",
    "QUEUED",
    "BreakerConfig",
    "EngineSpec",
    "EngineState",
    "EngineView",
    "Expired",
    "Grant",
    "LeaseClaims",
    "LeaseRefusedError",
    "LeaseRequest",
    "Needs",
    "Outcome",
    "Pool",
    "PoolConfig",
    "RankReport",
    "Refusal",
    "Renewal",
]
