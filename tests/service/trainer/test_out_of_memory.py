"""A rank that has no memory for a pass: the pass is made again, and costs no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice import faults
from sluice.client import RemoteError
from tests.service.trainer.harness import (
    ACTIVE,
    PPO,
    make_groups,
    running_trainer,
    train_step,
    until,
    upload,
)


async def test_a_pass_is_made_again_and_a_step_is_told(tmp_path: Path, model: Path) -> None:
    """The rank has added all gradients when it has no memory left: they count once."""
    with running_trainer(tmp_path, model, ranks={"restart_backoff": 0.1}) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await client.save_checkpoint("start")
            batch = await upload(client, "b", make_groups("b"))
            await client.compute_logprobs(batch)
            expected = await train_step(client, batch)
            for name in ("forward_backward", "compute_logprobs"):
                await client.load_checkpoint("checkpoints/start")
                batch = await upload(client, name, make_groups("b"))
                faults.arm(tmp_path / "faults", f"rank0.{name}.memory")
                await client.compute_logprobs(batch)
                found = await train_step(client, batch)
                assert found.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-6)
                assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
                assert faults.disarm(tmp_path / "faults") == [], "it has fired"
            now = await client.get()
            assert (now.restart_count, now.step) == (0, 1)

            await client.forward_backward(batch, PPO, expected_step=1, part_id="b")
            faults.arm(tmp_path / "faults", "rank0.step.memory")
            with pytest.raises(
                RemoteError, match=r"step is out of memory.*What makes room"
            ) as told:
                await client.step_optimizer(1, ["b"])
            assert told.value.reason == "OUT_OF_MEMORY"
            assert int(told.value.metadata["total"]) > int(told.value.metadata["free"]) > 0
            again = await until(client, lambda now: now.restart_count == 1 and now.state == ACTIVE)
            assert again.step == 0, "as the checkpoint that was loaded"
