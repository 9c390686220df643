"""A trainer of two tensor-parallel ranks behind its API: trains, publishes, survives kill -9."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice import faults
from sluice.algo.spec import AdvantageSpec
from sluice.client import RemoteError
from tests.service.trainer.harness import (
    ACTIVE,
    check_full_disk,
    killed_in_a_pass,
    make_groups,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.trainer.sleeping import check_steps

SETTINGS = {
    "backend": "megatron",
    "megatron": {"tensor": 2, "dtype": "float32"},
    "ranks": {"count": 2, "heartbeat_seconds": 0.5, "restart_backoff": 0.1},
}
BFLOAT16 = {"tensor": 2, "dtype": "bfloat16"}


async def test_a_rank_killed_in_mid_step_costs_no_number(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    with running_trainer(tmp_path / "trainer", model, **SETTINGS) as running:
        async with running.client() as client:
            ready = await until(client, lambda now: now.state == ACTIVE)
            assert (ready.layout.tensor, ready.layout.data) == (2, 1)
            batch = await upload(client, "kill", make_groups("kill", seed=8))
            scored = await client.compute_logprobs(batch)
            assert scored.mean < 0
            await train_step(client, batch)
            writing = await client.begin_checkpoint("before-kill")
            expected = await train_step(client, batch)  # beside the writing, which it is not in
            await writing
            await killed_in_a_pass(client, batch)
            await client.compute_advantages(batch, AdvantageSpec(name="grpo"))
            await check_full_disk(client)
            assert await train_step(client, batch) == expected


async def test_a_rank_killed_while_it_saves_leaves_the_former(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    values = {**SETTINGS, "megatron": {**BFLOAT16, "optimizer_offload": 0.5}}
    with running_trainer(tmp_path / "trainer", model, **values) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            batch = await upload(client, "kill", make_groups("kill", seed=8))
            await train_step(client, batch)
            await client.save_checkpoint("former")
            expected = await train_step(client, batch)
            faults.arm(tmp_path / "trainer/faults", "rank0.chunk", 40)
            with pytest.raises(RemoteError):
                await client.save_checkpoint("torn")
            again = await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
            assert again.step == 1
            await client.compute_advantages(batch, AdvantageSpec(name="grpo"))
            assert await train_step(client, batch) == expected


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        pytest.param({}, 8.9, id="cut"),  # 2 bytes, a gradient, a master and two moments
        pytest.param({"distributed_optimizer": False}, 8.9, id="whole"),
        pytest.param({"optimizer_offload": 0.5}, 5.9, id="half-offloaded"),
    ],
)
async def test_ranks_that_sleep_make_the_same_steps(
    tmp_path: Path, settings: dict[str, bool], least: float
) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    values = SETTINGS | {"megatron": {**BFLOAT16, **settings}}
    with running_trainer(tmp_path / "trainer", model, **values) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await check_steps(client, least=least)
