"""A trainer of two sharded ranks behind its API: trains, publishes, survives kill -9."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.algo.spec import AdvantageSpec
from sluice.client import EngineClient, RemoteError
from tests.behind_run import check_run
from tests.service.trainer.harness import (
    ACTIVE,
    PPO,
    end,
    make_groups,
    poll,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.weights.harness import running_engines

SETTINGS = {
    "backend": "fsdp",
    "fsdp": {"dtype": "float32"},
    "ranks": {"count": 2, "heartbeat_seconds": 0.5, "restart_backoff": 0.1},
}


async def serves(client: EngineClient) -> bool:
    try:
        return (await client.get()).HasField("weights")
    except RemoteError:
        return False


@pytest.mark.fast
async def test_a_rank_killed_in_mid_pass_costs_no_number(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    with running_trainer(tmp_path / "trainer", model, **SETTINGS) as running:
        async with running.client() as client:
            ready = await until(client, lambda now: now.state == ACTIVE)
            assert ready.layout.data == 2
            batch = await upload(client, "kill", make_groups("kill", seed=8))
            await client.compute_logprobs(batch)
            await train_step(client, batch)
            await client.save_checkpoint("before-kill")
            expected = await train_step(client, batch)

            step = (await client.get()).step
            ranks = {rank.rank: rank.process_id for rank in (await client.get()).ranks}
            end(ranks[0], signal.SIGSTOP)  # so that the pass is under way when rank 1 dies
            passing = asyncio.create_task(
                client.forward_backward(batch, PPO, expected_step=step, part_id="lost")
            )

            async def is_under_way() -> bool:
                return any("forward_backward" in w.what for w in await client.list_waits())

            await poll(is_under_way)
            end(ranks[1], signal.SIGKILL)
            with pytest.raises(RemoteError):
                await passing
            again = await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
            assert again.step == step - 1
            await client.compute_advantages(batch, AdvantageSpec(name="grpo"))
            assert await train_step(client, batch) == expected

            await client.publish_weights()
            directory = next(running.store.rglob("model-00001-*.safetensors")).parent
            names = {n for f in directory.glob("*.safetensors") for n in load_file(f)}
            assert names == load_file(model / "model.safetensors").keys()
            loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            assert loaded.config.model_type == "qwen3"


@pytest.mark.fast
def test_a_run_survives_a_rank_lost_while_it_writes_behind(tmp_path: Path) -> None:
    check_run(tmp_path, {"backend": "fsdp", "fsdp": SETTINGS["fsdp"]})


async def test_an_engine_receives_what_the_ranks_published_as_deltas(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    settings = SETTINGS | {
        "publish": {"delta": True},
        "transfer": {"enabled": True, "timeout_seconds": 20.0},
        "optim": {"learning_rate": 1e-5},
    }
    with (
        running_trainer(tmp_path / "trainer", model, **settings) as trainer,
        running_engines(tmp_path, model, trainer.store, trainer.security, 1) as (engine,),
    ):
        async with trainer.client() as client, engine.client() as served:
            await until(client, lambda now: now.state == ACTIVE)
            await poll(lambda: serves(served), 60)
            batch = await upload(client, "sent", make_groups("sent", seed=8))
            await train_step(client, batch)
            published = await client.publish_weights([engine.target])
            assert not published.engines[0].HasField("error"), published.engines[0].error
            assert published.byte_count < published.full_byte_count  # as deltas
            await served.prepare_weights(published.weights)
            await served.commit_weights(published.weights)
            assert (await served.get()).weights == published.weights
