"""A trainer of adapters behind its API: trains, publishes to engines, survives kill -9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.algo.spec import AdvantageSpec
from sluice.client import RemoteError, typed_errors
from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, DEFAULT_TARGETS
from sluice.weights.checkpoint import digest_base
from sluice.weights.store import WeightStore
from tests.adapters import peft_logprobs
from tests.service.trainer.harness import (
    ACTIVE,
    PPO,
    killed_in_a_pass,
    make_groups,
    poll,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.weights.harness import running_engines, serves

LORA = {"rank": 4, "alpha": 8}
FSDP = {
    "backend": "fsdp",
    "fsdp": {"dtype": "float32"},
    "ranks": {"count": 2, "heartbeat_seconds": 0.5, "restart_backoff": 0.1},
}


@pytest.mark.fast
async def test_adapters_are_trained_published_and_served(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    before = digest_base(model)
    settings: dict[str, Any] = FSDP | {"lora": LORA, "transfer": {"enabled": True}}
    with (
        running_trainer(tmp_path / "trainer", model, **settings) as trainer,
        running_engines(tmp_path, model, trainer.store, trainer.security, 1) as (engine,),
    ):
        async with trainer.client() as client, engine.client() as served:
            await until(client, lambda now: now.state == ACTIVE)
            batch = await upload(client, "adapted", make_groups("adapted", seed=8))
            await client.compute_logprobs(batch)
            await train_step(client, batch)
            await client.save_checkpoint("before-kill")
            expected = await train_step(client, batch)
            await killed_in_a_pass(client, batch)
            await client.compute_advantages(batch, AdvantageSpec(name="grpo"))
            assert await train_step(client, batch) == expected

            await poll(lambda: serves(served))
            published = await client.publish_weights([engine.target])
            assert not published.engines[0].HasField("error"), published.engines[0].error
            await served.prepare_weights(published.weights)
            await served.commit_weights(published.weights)
            assert (await served.get()).weights.digest == published.weights.digest

        store = WeightStore(trainer.store / "weights")
        record = store.latest()
        assert record.digest == published.weights.digest
        adapter, folder = record.adapter, record.directory
        assert adapter is not None and folder is not None
        assert (adapter.rank, adapter.alpha, adapter.targets) == (4, 8.0, DEFAULT_TARGETS)
        assert adapter.base_digest == before == digest_base(model)
        assert {p.name for p in folder.iterdir()} == {ADAPTER_CONFIG, ADAPTER_FILE, "manifest.json"}
        assert sum(t.abs().sum() for n, t in load_file(folder / ADAPTER_FILE).items() if "B" in n)
        adapted = peft_logprobs(model, folder, [1, 2, 3], [4, 5])  # read by peft, and not nothing
        assert adapted != pytest.approx(peft_logprobs(model, None, [1, 2, 3], [4, 5]), abs=1e-4)


@pytest.mark.fast
async def test_whole_weights_and_adapters_do_not_mix_in_a_store(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    with running_trainer(tmp_path / "whole", model) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await client.publish_weights()
        store = running.store
    with running_trainer(tmp_path / "adapters", model, lora=LORA, store=str(store)) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            with pytest.raises(RemoteError) as refused, typed_errors():
                await client.publish_weights()
            assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION
            assert refused.value.reason == "MIXED_WEIGHTS"
            assert not list((store / "weights" / "staging").iterdir())
            step = (await client.get()).step  # and it trains on
            batch = await upload(client, "after", make_groups("after"))
            await client.forward_backward(batch, PPO, expected_step=step, part_id="whole")
