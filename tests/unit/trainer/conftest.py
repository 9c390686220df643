from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.trainer.ranks import until
from tests.unit.trainer.stage import Stage


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    await stage.server.start()
    starting = asyncio.create_task(stage.trainer.start(stage.server.address))
    await until(lambda: stage.trainer.ranks._incarnation is not None)
    await stage.connect()
    await starting
    yield stage
    assert stage.rank is not None
    await stage.rank.leave()
    await stage.trainer.close()
    await stage.server.close()
