"""What a router process is told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sluice.balance.routing import BreakerConfig, PoolConfig
from sluice.config import Config, ProcessConfig
from sluice.runtime.server import ServerConfig

Policy = Literal["step_time", "min_count", "power_of_two", "round_robin", "random", "cache_aware"]


class BreakerSettings(Config):
    """When an engine that fails gets no more leases."""

    failures: int = Field(5, ge=1, description="Within the window, and half of its outcomes.")
    window_seconds: float = Field(30.0, gt=0)
    open_seconds: float = Field(30.0, gt=0, description="Until a trial lease.")


class PoolSettings(Config):
    """How leases of a pool are given and kept."""

    policy: Policy = "step_time"
    late_binding: bool = Field(True, description="Leases beyond the credits wait in the router.")
    credit_factor: float = Field(1.0, gt=0, description="Credit of a rank, in its max_running.")
    step_base: float = Field(0.020, gt=0, description="Seconds of an engine step with no request.")
    step_per_request: float = Field(
        0.0002, gt=0, description="Seconds one more request on the fullest rank adds."
    )
    prefill_rate: float = Field(20_000.0, gt=0, description="Prompt tokens per second of a rank.")
    break_margin: float = Field(
        4.0, ge=0, description="A session moves when that gains this many times its prefill."
    )
    client_ttl: float = Field(60.0, gt=0, description="Seconds a silent client keeps its leases.")
    engine_ttl: float = Field(15.0, gt=0, description="Seconds until a silent engine is lost.")
    session_ttl: float = Field(1800.0, gt=0, description="Seconds a session idles.")
    group_ttl: float = Field(600.0, gt=0, description="Seconds a group without leases is known.")
    max_leases: int = Field(1_000_000, ge=1)
    max_leases_per_client: int = Field(200_000, ge=1)
    max_queued: int = Field(200_000, ge=0)
    breaker: BreakerSettings = BreakerSettings()

    def to_pool_config(self) -> PoolConfig:
        values = self.model_dump(exclude={"breaker"})
        return PoolConfig(**values, breaker=BreakerConfig(**self.breaker.model_dump()))


class ProxySettings(Config):
    """Generate and StreamGenerate through the router."""

    attempts: int = Field(3, ge=1, description="Engines tried while none could be reached.")
    wait_seconds: float = Field(600.0, gt=0, description="For a free rank; then QUEUE_TIMEOUT.")


class RouterConfig(ProcessConfig):
    """Router service: engines, episode workers and leases."""

    default_pool: PoolSettings = PoolSettings()
    pools: dict[str, PoolSettings] = Field({}, description="Pools that differ from it, by name.")
    max_pools: int = Field(64, ge=1)
    tick_seconds: float = Field(0.5, gt=0, description="Between looks for what has expired.")
    seed: int | None = Field(None, description="Of random ties; unset draws one.")
    proxy: ProxySettings = ProxySettings()
    server: ServerConfig = ServerConfig()
