"""A first step whose log-probs cannot be the trainer's own stops before it is made."""

from dataclasses import replace

import numpy as np
import pytest

from sluice.algo.spec import AdvantageSpec
from sluice.client import TrainerClient
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.training import MismatchError, train_step
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from tests.service.trainer.harness import PPO, RunningTrainer, make_group, upload

ALGORITHM = AlgorithmConfig(advantage=AdvantageSpec(name="grpo"), loss=PPO)


async def on_policy_group(
    client: TrainerClient, running: RunningTrainer, name: str, gap: float
) -> LedgerGroup:
    """A group whose engine gave the trainer's own log-probs, but for `gap` nats."""
    samples = make_group(name, size=4, seed=5, rewards=[0.0, 1.0, 0.0, 1.0])
    batch = await upload(client, f"scored-{name}", samples)
    await client.compute_logprobs(batch)
    columns = await client.get_columns(batch, ["old_logprobs"])
    await client.delete_batch(batch)
    samples = [
        replace(
            sample,
            columns={
                **sample.columns,
                "rollout_logprobs": (columns[sample.sample_id]["old_logprobs"] + gap).astype(
                    np.float32
                ),
            },
        )
        for sample in samples
    ]
    blob = BlobStore(running.store).put(encode_group(samples))
    return LedgerGroup(
        position=0,
        group_id=name,
        issue_step=0,
        state="generated",
        blob=blob,
        sample_count=len(samples),
    )


@pytest.mark.parametrize("gap", [0.3, -0.3])
async def test_a_gap_that_no_rounding_explains_ends_the_step(
    client: TrainerClient, trainer: RunningTrainer, gap: float
) -> None:
    group = await on_policy_group(client, trainer, f"far{gap}", gap)
    step = (await client.get()).step
    with pytest.raises(MismatchError) as caught:
        await train_step(
            client, ALGORITHM, [group], optimizer_step=step, name="far", max_mismatch=0.2
        )
    for named in ("max_mismatch 0.2", "temperature", "weights", "tokenizer or model family"):
        assert named in str(caught.value)
    after = await client.get()
    assert (after.step, list(after.part_ids)) == (step, [])


@pytest.mark.parametrize(("gap", "limit"), [(0.0, 1e-4), (0.1, 0.2), (0.3, 0.0)])
async def test_a_gap_within_the_limit_is_trained_on(
    client: TrainerClient, trainer: RunningTrainer, gap: float, limit: float
) -> None:
    group = await on_policy_group(client, trainer, f"near{gap}", gap)
    step = (await client.get()).step
    report = await train_step(
        client, ALGORITHM, [group], optimizer_step=step, name="near", max_mismatch=limit
    )
    assert report.optimizer_step == step + 1
    assert report.metrics["rollout_mismatch"] == pytest.approx(gap, abs=1e-4)
