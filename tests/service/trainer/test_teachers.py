"""A trainer as teacher: its log-probs of a student's rows, over the same blobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient, typed_errors
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.teachers import ATTEMPTS, TrainerTeacher
from sluice.loop.training import train_step
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import top_columns
from tests import warm
from tests.patience import PATIENCE
from tests.service.trainer.harness import PPO, RunningTrainer, make_group, running_trainer
from tests.service.trainer.test_errors import INVALID, PRECONDITION, assert_is, refusal

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


COUNT = 4
TOP = AlgorithmConfig(loss=LossSpec(name="topk_forward_kl", settings={"top_count": COUNT}))
NAMES = top_columns(COUNT)


async def test_a_step_reads_the_teacher_s_likeliest_tokens(
    client: TrainerClient,
    trainer: RunningTrainer,
    teacher: tuple[RunningTrainer, Path],
) -> None:
    running, directory = teacher
    await client.publish_weights()  # other tests may have trained it
    model = max((trainer.store / "weights" / "versions").iterdir())
    named, taught = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        for path in (directory, model)
    )
    scoring = TrainerTeacher(running.address, running.security, PATIENCE)
    groups = [put(trainer, f"named-{i}", i) for i in range(2)]
    batch = (await client.upload_batch("named", 8, blobs=[group.blob for group, _ in groups])).batch
    try:
        await scoring.teach(client, batch, [group for group, _ in groups], "named", 1.0, COUNT)
    finally:
        await scoring.close()
    rows = await client.get_columns(batch, [*NAMES, "teacher_logprobs"])
    divergence, elsewhere, count = 0.0, 0.0, 0
    for sample in (sample for _, samples in groups for sample in samples):
        tokens = torch.tensor([sample.token_ids.tolist()])
        places = slice(sample.prompt_length - 1, -1)
        with torch.no_grad():
            q, p = (each(tokens).logits[0, places].log_softmax(-1) for each in (named, taught))
        best, ids = q.topk(COUNT, dim=1)
        given = rows[sample.sample_id]
        assert given[NAMES[0]].tolist() == ids.tolist()
        np.testing.assert_allclose(given[NAMES[1]], best, atol=1e-5)
        response = tokens[0, sample.prompt_length :, None]
        np.testing.assert_allclose(
            given["teacher_logprobs"], q.gather(1, response)[:, 0], atol=1e-5
        )
        q, p = best.exp(), p.gather(1, ids).exp()
        turned_p = torch.cat([p.flip(1), 1 - p.sum(1, keepdim=True)], dim=1)
        q, p = (torch.cat([each, 1 - each.sum(1, keepdim=True)], dim=1) for each in (q, p))
        divergence += float((q * (q / p).log()).sum())
        elsewhere += float((q * (q / turned_p).log()).sum())
        count += len(q)
    step = (await client.get()).step
    passed = await client.forward_backward(batch, TOP.loss, expected_step=step, part_id="named")
    assert passed.metrics["kl_teacher"] == pytest.approx(divergence / count, rel=1e-4)
    assert passed.token_count == count
    # the negative control: the tokens of other places are another divergence
    turned = {name: {NAMES[0]: row[NAMES[0]][:, ::-1].copy()} for name, row in rows.items()}
    await client.put_columns(batch, turned)
    wrong = await client.forward_backward(batch, TOP.loss, expected_step=step, part_id="wrong")
    assert wrong.metrics["kl_teacher"] == pytest.approx(elsewhere / count, rel=1e-4)
    # of a student that nobody has trained, whose tokens are nearly alike
    assert wrong.metrics["kl_teacher"] != pytest.approx(divergence / count, rel=2e-4)


class Spoiling(TrainerClient):
    """A student in front of which the columns' blobs are spoiled in the store, once each way."""

    def __init__(self, trainer: RunningTrainer, ways: list[str]) -> None:
        super().__init__(trainer.address, trainer.security)
        self._store, self.ways, self.batches = trainer.store, ways, list[str]()

    async def take_columns(
        self, batch: str, blobs: Sequence[BlobReference], columns: Mapping[str, str]
    ) -> int:
        if self.ways:
            path = self._store / "blobs" / blobs[0].digest
            data = bytearray(path.read_bytes())
            path.unlink()
            way = self.ways.pop(0)
            data[len(data) // 2] ^= way == "flipped"
            if way != "gone":
                path.write_bytes(data[: -len(data) // 3] if way == "cut" else data)
        return await super().take_columns(batch, blobs, columns)


async def test_columns_that_the_store_loses_are_computed_again(
    client: TrainerClient, trainer: RunningTrainer, teacher: tuple[RunningTrainer, Path]
) -> None:
    running, _ = teacher
    group, samples = put(trainer, "spoilt", 12)
    batch = (await client.upload_batch("spoilt", 4, blobs=[group.blob])).batch
    scoring = TrainerTeacher(running.address, running.security, PATIENCE)
    spoiling = Spoiling(trainer, ["gone", "flipped", "cut"])
    try:
        async with spoiling:
            await scoring.teach(spoiling, batch, [group], "spoilt", None, COUNT)
            assert not spoiling.ways
            rows = await client.get_columns(batch, [*NAMES])
            assert rows.keys() == {sample.sample_id for sample in samples}
            assert all(row.keys() == set(NAMES) for row in rows.values())
            spoiling.ways = ["gone"] * 99
            with pytest.raises(RemoteError) as caught:
                await scoring.teach(spoiling, batch, [group], "lost", None, COUNT)
            assert caught.value.reason == "BLOB_NOT_FOUND"
            assert len(spoiling.ways) == 99 - ATTEMPTS
        async with running.client() as asked:
            assert not (await asked.get()).batches
    finally:
        await scoring.close()


@pytest.mark.parametrize("count", [-1, 14, 1025, 2**31 - 1])  # of thirteen tokens
async def test_a_count_of_tokens_that_no_place_has_is_refused(
    count: int, client: TrainerClient, trainer: RunningTrainer
) -> None:
    group, _ = put(trainer, "count", 13)
    batch = (await client.upload_batch("count", 4, blobs=[group.blob])).batch
    error = await refusal(client.compute_logprobs(batch, top_count=count))
    assert_is(error, INVALID, "INVALID_FIELD", field="top_count")
    await client.compute_logprobs(batch, top_count=13)
    rows = await client.get_columns(batch, [*top_columns(13)])
    for row in rows.values():
        assert (np.sort(row["teacher_top_ids/13"], 1) == np.arange(13)).all()
        total = np.exp(row["teacher_top_logprobs/13"].astype(np.float64)).sum(1)
        np.testing.assert_allclose(total, 1, atol=1e-5)


async def test_columns_by_reference_that_are_wrong_are_refused_and_nothing_is_lost(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    group, samples = put(trainer, "own", 14)
    other, _ = put(trainer, "foreign", 15)
    batches = [
        (await client.upload_batch(name, 4, blobs=[each.blob])).batch
        for name, each in (("own", group), ("foreign", other))
    ]
    for batch in batches:
        await client.compute_logprobs(batch, top_count=COUNT)
    own, foreign = [await client.refer_columns(b, ["old_logprobs", *NAMES]) for b in batches]
    store = BlobStore(trainer.store)
    whole = store.put(encode_group(samples))
    noise = store.put(b"no columns")
    short = [replace(s, columns={"values": s.columns["rollout_logprobs"][:0]}) for s in samples]
    bare = {"token_ids": np.empty(0, dtype=np.int32), "prompt_length": 0}
    cut = store.put(encode_group([replace(s, **bare) for s in short]))
    nan = [
        replace(s, columns={"values": np.full(s.response_length, np.nan, np.float32)}, **bare)
        for s in samples
    ]
    nans = store.put(encode_group(nan))
    batch, taken = batches[0], {"old_logprobs": "teacher_logprobs"}
    cases: list[tuple[Sequence[BlobReference], Mapping[str, str], str, dict[str, str]]] = [
        (own, {}, "INVALID_FIELD", {"field": "columns"}),
        ((), taken, "INVALID_FIELD", {"field": "columns"}),
        (own, {"novel": "values"}, "INVALID_FIELD", {"field": "columns[0]"}),
        (own, {"../x": "values"}, "INVALID_FIELD", {"field": "columns[0]"}),
        (own, {"old_logprobs": "\0"}, "INVALID_FIELD", {"field": "columns"}),
        (own, {"old_logprobs": "x" * 5000}, "INVALID_FIELD", {"field": "columns"}),
        (own, {"old_logprobs": "loss_mask"}, "INVALID_FIELD", {"field": "columns"}),
        (own, {"old_logprobs": "advantages"}, "INVALID_FIELD", {"field": "columns"}),
        (own, {"old_logprobs": "reward"}, "INVALID_FIELD", {"field": "columns"}),
        (own, {NAMES[0]: NAMES[0], NAMES[1]: NAMES[0]}, "INVALID_FIELD", {"field": "columns"}),
        ([*own, *own], taken, "INVALID_FIELD", {"field": "blobs"}),
        (own, {"old_logprobs": NAMES[0]}, "INVALID_FIELD", {"field": f"columns[{NAMES[0]!r}]"}),
        (own, {NAMES[0]: NAMES[1]}, "INVALID_FIELD", {"field": f"columns[{NAMES[1]!r}]"}),
        (own, {"values": "values"}, "COLUMN_MISSING", {"columns": "values"}),
        (foreign, taken, "SAMPLE_NOT_FOUND", {"name": "foreign/0"}),
        ([cut], {"values": "values"}, "INVALID_FIELD", {"column": "values"}),
        ([nans], {"values": "values"}, "INVALID_FIELD", {"column": "values"}),
        ([noise], taken, "INVALID_FIELD", {"field": "blob"}),
        ([BlobReference("0" * 32, 9)], taken, "BLOB_NOT_FOUND", {"name": "0" * 32}),
        ([BlobReference("../" * 9, 9)], taken, "BLOB_NOT_FOUND", {}),
    ]
    for blobs, columns, reason, metadata in cases:
        error = await refusal(client.take_columns(batch, blobs, columns))
        assert error.reason == reason, (columns, str(error))
        assert metadata.items() <= error.metadata.items(), (columns, error.metadata)
    request = pb.GetColumnsRequest(
        batch=batch, columns=["rollout_logprobs"], by_reference=True, sample_ids=["own/0"]
    )

    async def first(request: pb.GetColumnsRequest) -> None:
        with typed_errors():
            async for _ in client.stub.GetColumns(request):
                return

    assert_is(await refusal(first(request)), INVALID, "INVALID_FIELD", field="sample_ids")
    error = await refusal(client.refer_columns(batch, ["values"]))
    assert_is(error, PRECONDITION, "COLUMN_MISSING", columns="values", sample_id="own/0")

    async def both() -> AsyncIterator[pb.PutColumnsRequest]:
        row = pb.RowColumns(sample_id="own/0")
        row.columns["weight"].scalar = 1.0
        message = pb.PutColumnsRequest(batch=batch, rows=[row], columns=taken)
        message.blobs.add(digest=own[0].digest, size_bytes=own[0].size)
        yield message

    error = await refusal(client.stub.PutColumns(both()))
    assert_is(error, INVALID, "INVALID_FIELD", field="blobs")
    # columns of a blob that also holds more: those that are asked for, under their new name
    assert await client.take_columns(batch, [whole], {"rollout_logprobs": "values"}) == 4
    assert await client.take_columns(batch, own, taken) == 4
    rows = await client.get_columns(batch, ["values", "teacher_logprobs", "reward"])
    for sample in samples:
        found = rows[sample.sample_id]
        assert np.array_equal(found["values"], sample.columns["rollout_logprobs"])
        assert len(found["teacher_logprobs"]) == sample.response_length
        assert found["reward"] == sample.columns["reward"]


async def test_a_teacher_whose_ranks_are_killed_scores_again(
    client: TrainerClient, trainer: RunningTrainer, teacher: tuple[RunningTrainer, Path]
) -> None:
    running, _ = teacher
    group, samples = put(trainer, "killed", 9)
    batch = (await client.upload_batch("killed", 4, blobs=[group.blob])).batch
    scoring = TrainerTeacher(running.address, running.security, PATIENCE)
    await scoring.describe()  # it takes work
    for rank in warm.children(running.process.pid):
        rank.kill()
    try:
        await scoring.teach(client, batch, [group], "killed", None, COUNT)
    finally:
        await scoring.close()
    rows = await client.get_columns(batch, ["teacher_logprobs", *NAMES])
    assert rows.keys() == {sample.sample_id for sample in samples}
    assert all(len(row) == 3 for row in rows.values())


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
