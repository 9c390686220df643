from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.trainer.ranks import until
from tests.unit.trainer.stage import Stage


@contextlib.asynccontextmanager
async def serving(stage: Stage) -> AsyncIterator[None]:
    """Its trainer, with a rank that is ready, while the block runs."""
    await stage.server.start()
    starting = asyncio.create_task(stage.trainer.start(stage.server.address))
    await until(lambda: stage.trainer.ranks._incarnation is not None)
    await stage.connect()
    await starting
    yield
    assert stage.rank is not None
    await stage.rank.leave()
    await stage.trainer.close()
    await stage.server.close()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    async with serving(stage):
        yield stage
