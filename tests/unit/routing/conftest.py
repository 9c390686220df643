"""Pools of a given shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sluice.balance.routing import EngineSpec, Pool, PoolConfig


@pytest.fixture
def make_pool() -> Callable[..., Pool]:
    """`make_pool(engines, ranks, max_running, **config)`: engines e0, e1, ... at time 0."""

    def make(engines: int = 1, ranks: int = 1, max_running: int = 0, **config: object) -> Pool:
        pool = Pool(PoolConfig(**config), np.random.default_rng(5))  # type: ignore[arg-type]
        for number in range(engines):
            spec = EngineSpec(name=f"e{number}", dp_size=ranks, max_running=max_running)
            pool.register(spec, 0.0)
        return pool

    return make
