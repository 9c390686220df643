"""Settings of a router process."""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field

from sluice.balance.routing import PoolConfig
from sluice.config import Config, ProcessConfig
from sluice.runtime.server import ServerConfig

C = TypeVar("C", bound=Config)


class ProxySettings(Config):
    """Generate and StreamGenerate through the router."""

    attempts: int = Field(3, ge=1, description="Engines tried while none could be reached.")
    max_samples: int = Field(4096, ge=1, le=65_536, description="Of one request.")
    wait_seconds: float = Field(600.0, gt=0, description="For a free rank; then QUEUE_TIMEOUT.")


class RouterConfig(ProcessConfig):
    """Router service: engines, episode workers and leases."""

    default_pool: PoolConfig = PoolConfig()
    pools: dict[str, PoolConfig] = Field(
        {}, description="Pools that differ from it, by name; what one leaves out is the default's."
    )
    max_pools: int = Field(64, ge=1, le=127)
    tick_seconds: float = Field(
        0.5, ge=0.01, le=2, description="Between looks for what has expired."
    )
    seed: int | None = Field(None, ge=0, description="Of random ties; unset draws one.")
    proxy: ProxySettings = ProxySettings()
    server: ServerConfig = ServerConfig()

    def pool(self, name: str) -> PoolConfig:
        """The settings of a pool."""
        own = self.pools.get(name, PoolConfig())
        breaker = _changed(self.default_pool.breaker, own.breaker)
        return _changed(self.default_pool, own).model_copy(update={"breaker": breaker})


def _changed(config: C, own: C) -> C:
    """The configuration with what the other one names."""
    return config.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})
