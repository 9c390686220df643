"""The reference of a KL is a version of the weights, where a request names one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.client import TrainerClient
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.training import train_step
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample
from tests.service.trainer.harness import (
    ACTIVE,
    RunningTrainer,
    make_group,
    make_groups,
    running_trainer,
    until,
    upload,
)
from tests.service.trainer.test_errors import (
    INVALID,
    NOT_FOUND,
    PRECONDITION,
    assert_is,
    refusal,
)

RATE, KL, EVERY, STEPS = 0.01, 0.1, 2, 5
ALGORITHM = AlgorithmConfig(
    advantage=AdvantageSpec(name="grpo"),
    loss=LossSpec(name="ppo_clip", clip_low=0.2, kl_coefficient=KL, kl_estimator="k3"),
    reference_every=EVERY,
)


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    with running_trainer(tmp_path_factory.mktemp("moving"), model) as running:
        yield running


def groups_of(step: int, store: Path) -> tuple[list[LedgerGroup], list[Sample]]:
    every, groups = list[Sample](), []
    for index in range(2):
        name = f"step-{step}-{index}"
        samples = make_group(name, seed=10 * step + index)
        blob = BlobStore(store).put(encode_group(samples))
        groups.append(
            LedgerGroup(
                position=0,
                group_id=name,
                issue_step=0,
                state="generated",
                blob=blob,
                sample_count=len(samples),
            )
        )
        every += samples
    return groups, every


def logprobs(model: Any, sample: Sample) -> torch.Tensor:
    tokens = torch.tensor(sample.token_ids.tolist())
    table = model(tokens[None]).logits[0, sample.prompt_length - 1 : -1].log_softmax(-1)
    return table.gather(1, tokens[sample.prompt_length :, None])[:, 0]


async def test_kls_are_those_of_a_loop_whose_reference_moves(
    moving: RunningTrainer, model: Path
) -> None:
    """A plain loop with a copy of the model every other step. Its advantages are the trainer's."""
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    policy.get_input_embeddings().padding_idx = None
    reference = copy.deepcopy(policy)
    adam = torch.optim.AdamW(policy.parameters(), RATE, (0.9, 0.95), 1e-8, weight_decay=0.0)
    version, moved = 0, list[float]()
    async with moving.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        for step in range(STEPS):
            groups, samples = groups_of(step, moving.store)
            report = await train_step(
                client,
                ALGORITHM,
                groups,
                optimizer_step=step,
                name=f"moving-{step}",
                looked_at=groups,
                reference_version=version,
            )
            total, kl, count = torch.zeros(()), 0.0, sum(s.response_length for s in samples)
            for sample in samples:
                row = report.columns[sample.sample_id]
                with torch.no_grad():
                    should = logprobs(reference, sample)
                own = logprobs(policy, sample)
                found = torch.tensor(row["reference_logprobs"])
                torch.testing.assert_close(found, should, atol=2e-5, rtol=0)
                before = torch.tensor(sample.columns["rollout_logprobs"])
                ratio, gap = (own - before).exp(), should - own
                gain = torch.tensor(row["advantages"])
                surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                k3 = gap.exp() - gap - 1
                total = total + (KL * k3 - surrogate).sum()
                kl += float(k3.detach().sum())
            expected = pytest.approx(kl / count, rel=1e-3, abs=1e-6)
            assert report.metrics["kl_reference"] == expected
            adam.zero_grad()
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            adam.step()
            moved.append(kl / count)
            published = await client.publish_weights()
            if (step + 1) % EVERY == 0:
                version, reference = published.weights.version, copy.deepcopy(policy)
    assert moved[0] == pytest.approx(0, abs=1e-6) and moved[2] < 1e-6 < moved[1], "it moved"


async def test_what_cannot_be_the_reference_is_refused(
    client: TrainerClient, moving: RunningTrainer
) -> None:
    batch = await upload(client, "refused", make_groups("refused", 1))
    published = (await client.publish_weights()).weights.version
    assert not (await client.get()).fixed_reference
    gone = client.compute_logprobs(batch, reference=True, reference_version=published + 1000)
    assert_is(await refusal(gone), NOT_FOUND, "WEIGHTS_NOT_FOUND")
    for reference, version in ((False, published), (True, -1)):
        call = client.compute_logprobs(batch, reference=reference, reference_version=version)
        assert_is(await refusal(call), INVALID, "INVALID_FIELD", field="reference_version")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"publish": {"delta": True}}, "publish.delta"),
        ({"lora": {"rank": 2}}, "lora"),
    ],
)
async def test_a_trainer_whose_reference_stays_says_so(
    tmp_path: Path, model: Path, settings: dict[str, Any], why: str
) -> None:
    with running_trainer(tmp_path, model, **settings) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            assert why in (await client.get()).fixed_reference
            batch = await upload(client, "fixed", make_groups("fixed", 1))
            call = client.compute_logprobs(batch, reference=True, reference_version=1)
            assert_is(await refusal(call), PRECONDITION, "REFERENCE_FIXED")
