"""A trainer as teacher: its log-probs of a student's rows, over the same blobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.algo.spec import AdvantageSpec
from sluice.client import RemoteError, TrainerClient
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.teachers import TrainerTeacher
from sluice.loop.training import train_step
from sluice.samples.arrow import encode_group
from sluice.samples.blobs import BlobReference, BlobStore
from tests.patience import PATIENCE
from tests.service.trainer.harness import PPO, RunningTrainer, make_group, running_trainer

DISTIL = AlgorithmConfig(advantage=AdvantageSpec(name="distillation"), loss=PPO)


@pytest.fixture(scope="module")
def teacher(
    tmp_path_factory: pytest.TempPathFactory, trainer: RunningTrainer
) -> Iterator[tuple[RunningTrainer, Path]]:
    root = tmp_path_factory.mktemp("teacher")
    model = build_tiny_qwen3(root / "model", seed=5)
    with running_trainer(root, model, store=str(trainer.store)) as running:
        yield running, model


def put(running: RunningTrainer, name: str, seed: int) -> tuple[LedgerGroup, list]:
    samples = make_group(name, size=4, seed=seed, rewards=[0.0, 1.0, 0.0, 1.0])
    blob = BlobStore(running.store).put(encode_group(samples))
    group = LedgerGroup(
        position=0,
        group_id=name,
        issue_step=0,
        state="generated",
        blob=blob,
        sample_count=len(samples),
    )
    return group, samples


async def test_a_step_reads_the_teacher_s_log_probs(
    client: TrainerClient, trainer: RunningTrainer, teacher: tuple[RunningTrainer, Path]
) -> None:
    running, directory = teacher
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    scoring = TrainerTeacher(running.address, running.security, PATIENCE)
    groups = [put(trainer, f"taught-{i}", i) for i in range(2)]
    rows = {}

    async def teach(student, batch, given, temperature) -> None:
        assert temperature is None
        await scoring.teach(student, batch, given, "teach", temperature)
        columns = ["teacher_logprobs", "rollout_logprobs"]
        rows.update(await student.get_columns(batch, columns))

    step = (await client.get()).step
    try:
        report = await train_step(
            client,
            DISTIL,
            [group for group, _ in groups],
            optimizer_step=step,
            name="distil",
            teach=teach,
        )
        async with running.client() as asked:
            assert not (await asked.get()).batches, "the teacher keeps no rows"
    finally:
        await scoring.close()
    gaps = []
    for sample in (sample for _, samples in groups for sample in samples):
        tokens = torch.tensor([sample.token_ids.tolist()])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens).logits[0].double(), -1)
        places = torch.arange(sample.prompt_length, tokens.shape[1])
        expected = logprobs[places - 1, tokens[0, places]].numpy()
        given = rows[sample.sample_id]["teacher_logprobs"]
        np.testing.assert_allclose(given, expected, atol=1e-5)
        gaps.append(rows[sample.sample_id]["rollout_logprobs"] - given)
    assert report.metrics["kl_teacher"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)


async def test_a_teacher_whose_ranks_are_killed_scores_again(
    client: TrainerClient, trainer: RunningTrainer, teacher: tuple[RunningTrainer, Path]
) -> None:
    running, _ = teacher
    group, samples = put(trainer, "killed", 9)
    batch = (await client.upload_batch("killed", 4, blobs=[group.blob])).batch
    scoring = TrainerTeacher(running.address, running.security, PATIENCE)
    await scoring.vocabulary()  # it takes work
    for rank in psutil.Process(running.process.pid).children():
        rank.kill()
    try:
        await scoring.teach(client, batch, [group], "killed", None)
    finally:
        await scoring.close()
    rows = await client.get_columns(batch, ["teacher_logprobs"])
    assert rows.keys() == {sample.sample_id for sample in samples}


async def test_a_blob_that_is_gone_is_the_group_s_loss_and_no_teacher_s(
    client: TrainerClient, trainer: RunningTrainer, teacher: tuple[RunningTrainer, Path]
) -> None:
    running, _ = teacher
    group, _ = put(trainer, "gone", 11)
    batch = (await client.upload_batch("gone", 4, blobs=[group.blob])).batch
    lost = LedgerGroup(
        position=1,
        group_id="lost",
        issue_step=0,
        state="generated",
        blob=BlobReference("0" * 32, 100),
        sample_count=4,
    )
    scoring = TrainerTeacher(running.address, running.security, PATIENCE)
    try:
        with pytest.raises(RemoteError) as caught:
            await scoring.teach(client, batch, [lost], "gone", None)
    finally:
        await scoring.close()
    assert caught.value.reason == "BLOB_NOT_FOUND"
