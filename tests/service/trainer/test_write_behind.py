"""Checkpoints written beside training: of the state before, whole or not there, one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice import faults
from sluice.algo.spec import AdvantageSpec
from sluice.client import RemoteError
from tests.service.trainer.harness import (
    ACTIVE,
    RESTART_SECONDS,
    make_groups,
    running_trainer,
    train_step,
    until,
    upload,
)

FILES = ("policy.safetensors", "optimizer.safetensors", "random-00001.safetensors")


async def test_training_goes_on_and_a_kill_leaves_the_checkpoint_before(
    tmp_path: Path, model: Path
) -> None:
    ranks = {"count": 2, "heartbeat_seconds": 0.5, "restart_backoff": RESTART_SECONDS}
    with running_trainer(tmp_path, model, name="behind", ranks=ranks) as running:
        checkpoints = running.store / "checkpoints"
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            batch = await upload(client, "behind", make_groups("behind", seed=8))
            await train_step(client, batch)
            saved = await client.save_checkpoint("waited-for")
            writing = await client.begin_checkpoint("beside")
            expected = await train_step(client, batch)
            assert (await writing).step == saved.step
            for name in FILES:
                one, other = (checkpoints / each / name for each in ("waited-for", "beside"))
                assert one.read_bytes() == other.read_bytes(), name
            now = await client.get()
            assert (now.step, now.checkpoint) == (saved.step + 1, "checkpoints/beside")

            faults.arm(tmp_path / "faults", "rank1.written")
            writing = await client.begin_checkpoint("doomed")
            with pytest.raises(RemoteError, match="killed by SIGKILL") as caught:
                await writing
            assert caught.value.reason == "RANK_LOST"
            assert not (checkpoints / "doomed").exists()
            back = await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
            assert (back.step, back.checkpoint) == (saved.step, "checkpoints/beside")
            await client.compute_advantages(batch, AdvantageSpec(name="grpo"))
            assert await train_step(client, batch) == expected
            assert (await client.save_checkpoint("after")).step == saved.step + 1
            assert not list(checkpoints.glob(".*")), "nothing is left of it"
