"""What keeps a trainer alive does not end without a word: it goes on, or the process ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.trainer.controller import incarnation
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from tests.service.runtime.ends import run_service
from tests.unit.trainer.ranks import until
from tests.unit.trainer.stage import MODEL, Stage

ACTIVE = trainer_pb.Trainer.STATE_ACTIVE
UNPIN_FAILS = """
from sluice.samples.blob_store import BlobStore
def unpin(self, *_):
    raise PermissionError("the store is not ours")
BlobStore.unpin = unpin
"""
LAUNCH_FAILS = """
from services.trainer.controller.rank_group import Launcher
async def launch(self, *_):
    raise KeyError("what nobody expected")
Launcher.launch = launch
"""


@pytest.mark.parametrize(
    ("before", "error"),
    [
        pytest.param(UNPIN_FAILS, "PermissionError: the store is not ours", id="start"),
        pytest.param(LAUNCH_FAILS, "KeyError: 'what nobody expected'", id="supervisor"),
    ],
)
def test_a_trainer_that_will_never_have_ranks_says_why_and_ends(
    before: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    code, log = run_service(
        "services.trainer",
        *("--model", str(tmp_path), "--store", str(tmp_path / "store")),
        *("--ranks.launch", "external"),
        before=before,
    )
    assert code == 1, log
    assert "ranks failed: the process stops" in log
    assert error in log


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    await stage.server.start()
    yield stage
    if stage.rank is not None:
        await stage.rank.leave()
    await stage.trainer.close()
    await stage.server.close()


async def start(stage: Stage) -> None:
    """Until its rank is active."""
    starting = asyncio.create_task(stage.trainer.start(stage.server.address))
    await until(lambda: stage.trainer.ranks._incarnation is not None)
    await stage.connect()
    await starting


async def test_ranks_that_cannot_be_launched_for_a_while_are_launched_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(incarnation, "EXIT_GRACE", 0.0)
    ranks = stage.trainer.ranks

    async def launch(generation: int, *_: Any) -> None:
        if generation == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ranks._launcher, "launch", launch)
    await start(stage)
    assert stage.rank is not None
    await stage.rank.leave()
    await until(lambda: ranks.restart_count == 2)
    await stage.connect()
    assert "the ranks cannot be launched: [Errno 11] Resource temporarily" in caplog.text


async def test_a_rank_that_is_back_at_once_is_taken_for_the_next_launch(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts it; how the process before it ended is not waited for."""
    monkeypatch.setattr(incarnation, "EXIT_GRACE", 600.0)
    await start(stage)
    ranks = stage.trainer.ranks
    assert stage.rank is not None
    link = ranks.links[0]
    await stage.rank.leave()
    await until(lambda: link.loss is not None)
    assert ranks.restart_count == 0
    await stage.connect()
    await until(lambda: ranks.restart_count == 1 and ranks.state == ACTIVE)
    assert ranks.incarnation.number == 2
