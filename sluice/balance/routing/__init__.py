"""Leases over (engine, dp rank): placement, sessions, late binding, health. Pure; no transport."""

from __future__ import annotations

from sluice.balance.routing.breaker import BreakerConfig, Outcome
from sluice.balance.routing.leases import QUEUED
from sluice.balance.routing.load_reports import RankReport
from sluice.balance.routing.policies import POLICIES
from sluice.balance.routing.pool import Expired, Pool
from sluice.balance.routing.types import (
    NO_VERSION,
    EngineSpec,
    EngineState,
    EngineView,
    Grant,
    Held,
    LeaseRefusedError,
    LeaseRequest,
    Needs,
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
    "Held",
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
