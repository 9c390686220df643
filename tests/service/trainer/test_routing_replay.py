"""Experts of the rollout reach the ranks that replay them, through the API and the blob store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.backend import Row
from sluice.client import RemoteError, TrainerClient
from sluice.samples.sample import Sample
from tests.contract.training_backend.cases import build_model, ragged_rows
from tests.fsdp.oracle import logprob_difference
from tests.models.forced import ForcedOracle, shape_of, with_experts
from tests.service.trainer.harness import ACTIVE, running_trainer, until

BACKENDS: list[dict[str, Any]] = [
    {"backend": "reference", "reference": {"routing_replay": "rollout"}},
    {"backend": "fsdp", "fsdp": {"routing_replay": "rollout", "dtype": "float32"}},
]


def sampled(row: Row) -> Sample:
    """The row as a rollout gives it: experts of every token but the last."""
    assert row.routed_experts is not None
    return Sample(
        sample_id=row.sample_id,
        group_id=row.group_id,
        token_ids=row.token_ids.numpy().astype(np.int32),
        prompt_length=row.prompt_length,
        columns={"reward": 0.0},
        routed_experts=row.routed_experts.numpy().astype(np.int16),
    )


@pytest.mark.parametrize("settings", BACKENDS, ids=lambda each: each["backend"])
async def test_experts_of_the_rollout_reach_the_ranks(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = build_model(tmp_path / "model", "qwen3_moe")
    rows = with_experts(ragged_rows(), shape_of(model))
    with running_trainer(tmp_path / "trainer", model.directory, **settings) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            samples = [sampled(row) for row in rows]
            batch = (await client.upload_batch("all", len(samples), samples=samples)).batch
            await client.compute_logprobs(batch)
            found = await client.get_columns(batch, ["old_logprobs"])
            lacking = await refusal(client, replace(samples[1], routed_experts=None), "lacking")
            experts = samples[1].routed_experts
            assert experts is not None
            beyond = await refusal(
                client, replace(samples[1], routed_experts=experts + np.int16(4)), "beyond"
            )
            twice = await refusal(
                client, replace(samples[1], routed_experts=experts * np.int16(0)), "twice"
            )
    oracle = ForcedOracle(model.load())
    wanted = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    told = {name: torch.from_numpy(columns["old_logprobs"]) for name, columns in found.items()}
    assert logprob_difference(told, wanted) <= 5e-6
    for refused, reason in ((lacking, "has no routed_experts"), (beyond, "is not among 4")):
        assert (refused.code.name, refused.reason) == ("FAILED_PRECONDITION", "ROUTING_MISSING")
        assert rows[1].sample_id in str(refused) and reason in str(refused)
    assert twice.code.name == "INVALID_ARGUMENT"
    assert "name an expert twice for token 0" in str(twice)


async def refusal(client: TrainerClient, sample: Sample, name: str) -> RemoteError:
    """How a batch of this sample is refused, or log-probs of it."""
    with pytest.raises(RemoteError) as caught:
        batch = (await client.upload_batch(name, 1, samples=[sample])).batch
        await client.compute_logprobs(batch)
    return caught.value
