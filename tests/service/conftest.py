"""Real services under mTLS and a token, as `sluice up` starts them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Stack, start_stack, stop_stack
from tests.service.security.trust import Trust, create_trust


@pytest.fixture(scope="session")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Trust:
    return create_trust(tmp_path_factory.mktemp("trust"))


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory, trust: Trust) -> Iterator[Stack]:
    """Two ranks, so that they meet each other too."""
    run_dir = tmp_path_factory.mktemp("secured")
    settings = {"model": str(run_dir / "model"), "ranks": {"count": 2}}
    stack = start_stack(
        run_dir,
        {"security": trust.right.model_dump(mode="json")},
        trainer={"kind": "trainer", "config": settings},
    )
    yield stack
    stop_stack(stack)
