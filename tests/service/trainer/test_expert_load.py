"""How evenly experts are used reaches callers, the rows of a run and Prometheus."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluice.algo.spec import LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
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
    "experts_aux_loss": 'experts_loss{kind="aux"}',
    "experts_z_loss": 'experts_loss{kind="z"}',
}


async def test_a_step_tells_how_evenly_experts_are_used(tmp_path: Path) -> None:
    """Of weights that hardly move, steps in a run tell what each tells alone; a row has the mean.

    Of the trainer one sees the last.
    """
    build_model(tmp_path / "model", "qwen3_moe", num_experts=8)
    settings = {
        "optim": {"learning_rate": 1e-12},
        "experts": {"aux_loss_coefficient": 1e-3, "z_loss_coefficient": 1e-3},
    }
    with running_trainer(tmp_path, tmp_path / "model", **settings) as trainer:
        groups = [stored(BlobStore(trainer.store), index) for index in range(2)]
        async with trainer.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            told = [dict((await step_alone(client, group)).metrics) for group in groups]
            peaks = [each.pop("memory_peak_gib") for each in told]
            first, second = told
            assert first.keys() == second.keys() == SHOWN.keys() and first != second
            assert 1 < first["expert_load_mean"] <= first["expert_load_max"] <= 4  # two a token
            algorithm = AlgorithmConfig(advantage=GRPO, loss=PPO, mini_batches=2)
            report = await train_step(client, algorithm, groups, optimizer_step=2, name="run")
            for name, shown in SHOWN.items():
                assert await asyncio.to_thread(gauge, trainer, shown) == second[name]
            peak = await asyncio.to_thread(gauge, trainer, "memory_peak_bytes")
            size = await asyncio.to_thread(gauge, trainer, "memory_size_bytes")
            assert 0 < max(peaks) <= peak / 2**30 == report.metrics["memory_peak_gib"]
            assert peak < size
    means = {name: (first[name] + second[name]) / 2 for name in SHOWN}
    assert {name: report.metrics[name] for name in SHOWN} == pytest.approx(means)
    assert all(map(is_documented, report.metrics))


async def test_losses_of_routers_are_as_large_whatever_a_step_divides_by(tmp_path: Path) -> None:
    """Coefficients beside which the policy's gradients are little."""
    build_model(tmp_path / "model", "qwen3_moe", num_experts=8)
    settings = {
        "optim": {"learning_rate": 1e-12},
        "experts": {"aux_loss_coefficient": 100.0, "z_loss_coefficient": 100.0},
    }
    norms = []
    with running_trainer(tmp_path, tmp_path / "model", **settings) as trainer:
        group = stored(BlobStore(trainer.store), 0)
        async with trainer.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            for aggregation in ("token_mean", "sample_mean", "sum"):
                loss = PPO.model_copy(update={"aggregation": aggregation})
                norms.append((await step_alone(client, group, loss)).grad_norm)
    assert norms[0] > 1
    assert norms == pytest.approx([norms[0]] * 3, rel=0.05)


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


async def step_alone(
    client: TrainerClient, group: LedgerGroup, loss: LossSpec = PPO
) -> pb.StepOptimizerResponse:
    """A step of one group."""
    batch = (await client.upload_batch(group.group_id, 4, blobs=[group.blob])).batch
    await client.compute_advantages(batch, GRPO)
    step = (await client.get()).step
    await client.forward_backward(batch, loss, expected_step=step, part_id="a")
    stepped = await client.step_optimizer(step, ["a"])
    await client.delete_batch(batch)
    return stepped
