"""How evenly experts are used reaches callers, the rows of a run and Prometheus."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluice.client import TrainerClient
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.metrics import is_documented
from sluice.loop.training import train_step
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from tests.contract.training_backend.cases import build_model
from tests.service.trainer.harness import ACTIVE, GRPO, PPO, make_group, running_trainer, until
from tests.service.trainer.test_epochs import gauge

SHOWN = {
    "expert_load_max": 'expert_load_ratio{kind="max"}',
    "expert_load_mean": 'expert_load_ratio{kind="mean"}',
    "experts_unused": "unused_experts",
}


async def test_a_step_tells_how_evenly_experts_are_used(tmp_path: Path) -> None:
    """Of weights that hardly move, steps in a run tell what each tells alone; a row has the mean.

    Of the trainer one sees the last.
    """
    build_model(tmp_path / "model", "qwen3_moe", num_experts=8)
    optim = {"learning_rate": 1e-12}
    with running_trainer(tmp_path, tmp_path / "model", optim=optim) as trainer:
        groups = [stored(BlobStore(trainer.store), index) for index in range(2)]
        async with trainer.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            first, second = [await step_alone(client, group) for group in groups]
            assert first.keys() == second.keys() == SHOWN.keys() and first != second
            assert 1 < first["expert_load_mean"] <= first["expert_load_max"] <= 4  # two a token
            algorithm = AlgorithmConfig(advantage=GRPO, loss=PPO, mini_batches=2)
            report = await train_step(client, algorithm, groups, optimizer_step=2, name="run")
            for name, shown in SHOWN.items():
                assert await asyncio.to_thread(gauge, trainer, shown) == second[name]
    means = {name: (first[name] + second[name]) / 2 for name in SHOWN}
    assert {name: report.metrics[name] for name in SHOWN} == pytest.approx(means)
    assert all(map(is_documented, report.metrics))


def stored(store: BlobStore, index: int) -> LedgerGroup:
    samples = make_group(f"group-{index}", seed=7 + index, rewards=[0.0, 1.0, 0.0, 1.0])
    return LedgerGroup(
        position=index,
        group_id=f"group-{index}",
        state="generated",
        issue_step=0,
        blob=store.put(encode_group(samples)),
        sample_count=len(samples),
    )


async def step_alone(client: TrainerClient, group: LedgerGroup) -> dict[str, float]:
    """What a step of one group tells."""
    batch = (await client.upload_batch(group.group_id, 4, blobs=[group.blob])).batch
    await client.compute_advantages(batch, GRPO)
    step = (await client.get()).step
    await client.forward_backward(batch, PPO, expected_step=step, part_id="a")
    stepped = await client.step_optimizer(step, ["a"])
    await client.delete_batch(batch)
    return dict(stepped.metrics)
