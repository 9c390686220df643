"""Checkpoints in a bucket, from all ranks."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from sluice import faults
from sluice.bucket import ObjectBucket
from sluice.client import RemoteError
from tests.service.trainer.bucket_checkpoints import bucket_url, check_checkpoints, left_in
from tests.service.trainer.harness import ACTIVE, RESTART_SECONDS, running_trainer, until

TWO = {"ranks": {"count": 2}}


async def refusal(call: Awaitable[Any]) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await call
    return caught.value


async def test_another_count_of_ranks_goes_on_from_a_bucket(tmp_path: Path, model: Path) -> None:
    await check_checkpoints(tmp_path, model, TWO, {})


async def test_a_rank_killed_in_an_upload_leaves_the_checkpoint_before(
    tmp_path: Path, model: Path
) -> None:
    with bucket_url() as url:
        bucket, cache = ObjectBucket(url), tmp_path / "cache"
        ranks = {"count": 2, "restart_backoff": RESTART_SECONDS}
        settings = {"store": url, "ranks": ranks, "store_cache": {"directory": str(cache)}}
        with running_trainer(tmp_path / "trainer", model, **settings) as running:
            async with running.client() as client:
                await until(client, lambda now: now.state == ACTIVE)
                await client.save_checkpoint("before")
                error = await refusal(client.save_checkpoint("before"))
                assert error.reason == "CHECKPOINT_EXISTS"
                faults.arm(tmp_path / "trainer" / "faults", "checkpoint.uploaded", 1)
                with pytest.raises(RemoteError):
                    await client.save_checkpoint("killed")
                await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
                assert not bucket.exists("checkpoints/killed/checkpoint.json")
                assert (await refusal(client.load_checkpoint("checkpoints/killed"))).reason == (
                    "CHECKPOINT_NOT_FOUND"
                )
                assert (await client.load_checkpoint("checkpoints/before")).step == 0
                await client.save_checkpoint("killed")
                assert (await client.load_checkpoint("checkpoints/killed")).step == 0
        assert left_in(cache) == []
