"""What callers get wrong: the code, the reason, and nothing lost by it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import loss_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient, typed_errors
from sluice.runtime.wire import sample_to_proto
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample
from tests.service.trainer.harness import PPO, RunningTrainer, make_group, upload

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
ABORTED = grpc.StatusCode.ABORTED


async def refusal(call: Awaitable[Any]) -> RemoteError:
    with pytest.raises(RemoteError) as caught, typed_errors():
        await call
    return caught.value


def assert_is(error: RemoteError, code: grpc.StatusCode, reason: str, **metadata: str) -> None:
    assert (error.code, error.reason) == (code, reason), error
    for key, value in metadata.items():
        assert error.metadata.get(key) == value, error.metadata


async def test_unknown_names(client: TrainerClient) -> None:
    batch = await upload(client, "known", make_group("known"))
    step = (await client.get()).step
    for call in (
        client.compute_logprobs("batches/no"),
        client.compute_advantages("batches/no", AdvantageSpec(name="grpo")),
        client.forward_backward("batches/no", PPO, expected_step=step, part_id="p"),
        client.delete_batch("batches/no"),
        client.get_columns("batches/no", ["reward"]),
    ):
        assert_is(await refusal(call), NOT_FOUND, "BATCH_NOT_FOUND", name="batches/no")
    assert_is(await refusal(client.delete_batch("known")), INVALID, "INVALID_FIELD", field="batch")
    error = await refusal(
        client.forward_backward(batch, PPO, expected_step=step, part_id="p", sample_ids=["x/9"])
    )
    assert_is(error, NOT_FOUND, "SAMPLE_NOT_FOUND", name="x/9")
    error = await refusal(client.get_columns(batch, ["reward"], sample_ids=["x/9"]))
    assert_is(error, NOT_FOUND, "SAMPLE_NOT_FOUND", name="x/9")
    error = await refusal(client.load_checkpoint("checkpoints/no"))
    assert_is(error, NOT_FOUND, "CHECKPOINT_NOT_FOUND", name="checkpoints/no")
    error = await refusal(client.get_columns(batch, ["no_such_column"]))
    assert_is(error, INVALID, "INVALID_FIELD", field="columns[0]")
    assert (await client.get()).part_ids == []


async def test_a_token_is_needed(trainer: RunningTrainer) -> None:
    async with TrainerClient(trainer.address) as stranger:
        error = await refusal(stranger.get())
    assert_is(error, grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING_OR_WRONG")


async def test_names_that_are_taken(client: TrainerClient) -> None:
    group = make_group("taken")
    await client.upload_batch("taken", len(group), samples=group)
    error = await refusal(client.upload_batch("taken", len(group), samples=group))
    assert_is(error, EXISTS, "BATCH_EXISTS", name="batches/taken")
    await client.save_checkpoint("taken")
    error = await refusal(client.save_checkpoint("taken"))
    assert_is(error, EXISTS, "CHECKPOINT_EXISTS", name="checkpoints/taken")
    error = await refusal(client.save_checkpoint("../outside"))
    assert_is(error, INVALID, "INVALID_FIELD", field="checkpoint_id")


async def test_bad_checkpoint_names_are_refused_before_there_is_an_operation(
    client: TrainerClient,
) -> None:
    stub = client.stub
    for name in ("../outside", "", "a/b", "-", "x" * 129):
        error = await refusal(stub.SaveCheckpoint(pb.SaveCheckpointRequest(checkpoint_id=name)))
        assert_is(error, INVALID, "INVALID_FIELD", field="checkpoint_id")
        request = pb.LoadCheckpointRequest(checkpoint=f"checkpoints/{name}")
        error = await refusal(stub.LoadCheckpoint(request))
        assert_is(error, INVALID, "INVALID_FIELD", field="checkpoint")


async def test_engines_of_a_publication_are_refused_before_there_is_an_operation(
    client: TrainerClient,
) -> None:
    engine = {"engine_id": "a", "address": "127.0.0.1:9"}

    async def publish(*engines: dict[str, str]) -> RemoteError:
        request = pb.PublishWeightsRequest(engines=list(engines))
        return await refusal(client.stub.PublishWeights(request))

    many = ({**engine, "engine_id": f"engine-{index}"} for index in range(5000))
    error = await publish(*many)
    assert_is(error, INVALID, "INVALID_FIELD", field="engines", setting="transfer.max_engines")
    error = await publish(engine, {**engine, "address": "/tmp/engine"})
    assert_is(error, INVALID, "INVALID_FIELD", field="engines[1].address")
    error = await publish(engine, engine)
    assert_is(error, INVALID, "INVALID_FIELD", field="engines[1].engine_id")
    assert_is(await publish(engine), PRECONDITION, "TRANSFER_DISABLED")


async def test_plans_and_uploads_are_bounded(client: TrainerClient) -> None:
    plans: tuple[tuple[dict[str, Any], str], ...] = (
        ({"bare_rows": [{"length": 1}], "micro_batch_multiple": 2**31 - 1}, "micro_batch_multiple"),
        ({"bare_rows": [{"length": 1}] * 140_000}, "bare_rows"),
        ({"batch": "batches/x", "sample_ids": ["s"] * 140_000}, "sample_ids"),
        ({"bare_rows": [{"length": -1}]}, "bare_rows[0].length"),
    )
    for values, field in plans:
        error = await refusal(client.stub.PlanBatch(pb.PlanBatchRequest(**values)))
        assert_is(error, INVALID, "INVALID_FIELD", field=field)

    async def messages(count: int) -> AsyncIterator[pb.UploadBatchRequest]:
        yield pb.UploadBatchRequest(header=pb.BatchHeader(batch_id="more", sample_count=count))
        for sample in make_group("more"):
            yield pb.UploadBatchRequest(sample=sample_to_proto(sample))

    for count in (1, 2**31 - 1, 0, -1):
        error = await refusal(client.stub.UploadBatch(messages(count)))
        assert_is(error, INVALID, "INVALID_FIELD", field="header.sample_count")

    async def header() -> AsyncIterator[pb.UploadBatchRequest]:
        yield pb.UploadBatchRequest(header=pb.BatchHeader(batch_id="none", sample_count=1))

    error = await refusal(client.stub.UploadBatch(header()))
    assert_is(error, INVALID, "INVALID_FIELD", field="header.sample_count")


async def test_rows_that_do_not_fit(client: TrainerClient) -> None:
    group = make_group("bad", seed=3)
    first = group[0]
    length = first.response_length

    def column(name: str, values: Any) -> Any:
        return replace(first, columns={**first.columns, name: values})

    long = np.zeros(20_000, dtype=np.int32)
    cases = {
        "columns[rollout_logprobs]": column(
            "rollout_logprobs", np.zeros(length + 1, dtype=np.float32)
        ),
        "columns['novel']": column("novel", 1.0),
        "columns['reward']": column("reward", np.zeros(length, dtype=np.float32)),
        "prompt_length": replace(first, prompt_length=len(first.token_ids) + 1, columns={}),
        "token_ids": replace(first, token_ids=np.full_like(first.token_ids, 13)),
    }
    for field, sample in cases.items():
        error = await refusal(client.upload_batch("bad", 1, samples=[sample]))
        assert_is(error, INVALID, "INVALID_FIELD", field=field.strip(), sample_id="bad/0")
    oversize = replace(first, token_ids=long, prompt_length=5, columns={})
    error = await refusal(client.upload_batch("bad", 1, samples=[oversize]))
    assert_is(error, INVALID, "OVERSIZE_SAMPLE", sample_id="bad/0", length="20000", cap="16384")
    assert (await client.get()).max_row_tokens == 16384
    error = await refusal(client.upload_batch("bad", 2, samples=[first, first]))
    assert_is(error, INVALID, "INVALID_FIELD", field="sample_id", sample_id="bad/0")
    error = await refusal(client.upload_batch("bad", 3, samples=group))
    assert_is(error, INVALID, "INVALID_FIELD", field="header.sample_count")
    assert (await client.get()).batches == []


async def test_wrong_column_length_in_a_blob_names_sample_and_column(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    group = make_group("wrong", seed=3)
    short = {**group[2].columns, "rollout_logprobs": np.zeros(0, dtype=np.float32)}
    group[2] = replace(group[2], columns=short)
    blob = BlobStore(trainer.store, sync=False).put(encode_group(group))
    error = await refusal(client.upload_batch("wrong", 4, blobs=[blob]))
    assert_is(error, INVALID, "INVALID_FIELD", sample_id="wrong/2", column="rollout_logprobs")


async def test_blobs_that_are_not_there_or_damaged(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    store = BlobStore(trainer.store, sync=False)
    missing = BlobReference("0" * 32, 10)
    error = await refusal(client.upload_batch("b", 1, blobs=[missing]))
    assert_is(error, NOT_FOUND, "BLOB_NOT_FOUND", name="0" * 32)
    no_group = store.put(b"these bytes are no Arrow file")
    error = await refusal(client.upload_batch("b", 1, blobs=[no_group]))
    assert_is(error, INVALID, "INVALID_FIELD", field="blob")
    blob = store.put(encode_group(make_group("damaged", seed=9)))
    path = trainer.store / "blobs" / blob.digest
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    error = await refusal(client.upload_batch("b", 4, blobs=[blob]))
    assert_is(error, grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH", blob=blob.digest)
    assert (await client.get()).batches == []


async def test_malformed_uploads(client: TrainerClient) -> None:
    sample = sample_to_proto(make_group("malformed")[0])
    header = pb.BatchHeader(batch_id="malformed", sample_count=1)

    async def stream(*messages: pb.UploadBatchRequest) -> AsyncIterator[pb.UploadBatchRequest]:
        for message in messages:
            yield message

    first, row = pb.UploadBatchRequest(header=header), pb.UploadBatchRequest(sample=sample)
    blob = {"digest": "a" * 32, "size_bytes": 5}
    behind_none = pb.UploadBatchRequest(more_blobs=[blob])
    too_many = pb.UploadBatchRequest(blob=blob, more_blobs=[blob])
    wrong = (first, pb.UploadBatchRequest()), (first, behind_none), (first, too_many)
    for messages in ((row,), (), (first, first), *wrong):
        error = await refusal(client.stub.UploadBatch(stream(*messages)))
        assert_is(error, INVALID, "INVALID_FIELD")


async def test_missing_columns_name_columns_and_a_row(client: TrainerClient) -> None:
    group = make_group("columns", seed=4)
    group[1] = replace(group[1], columns={"reward": 1.0})
    response = await client.upload_batch("columns", 4, samples=group)
    step = (await client.get()).step
    call = client.forward_backward(response.batch, PPO, expected_step=step, part_id="p")
    error = await refusal(call)
    assert_is(error, PRECONDITION, "COLUMN_MISSING", columns="advantages", sample_id="columns/0")
    await client.compute_advantages(response.batch, AdvantageSpec(name="grpo"))
    call = client.forward_backward(response.batch, PPO, expected_step=step, part_id="p")
    error = await refusal(call)
    assert_is(
        error, PRECONDITION, "COLUMN_MISSING", columns="rollout_logprobs", sample_id="columns/1"
    )
    # The other rows can be trained on.
    await client.forward_backward(
        response.batch, PPO, expected_step=step, part_id="p", sample_ids=["columns/0"]
    )
    error = await refusal(client.compute_advantages(response.batch, AdvantageSpec(name="gae")))
    assert_is(error, PRECONDITION, "COLUMN_MISSING", columns="values")


async def test_settings_that_are_wrong_or_without_effect(client: TrainerClient) -> None:
    batch = await upload(client, "settings", make_group("settings"))
    step = (await client.get()).step

    def call(**loss: Any) -> Awaitable[Any]:
        request = pb.ForwardBackwardRequest(
            batch=batch, loss=loss_pb2.LossSpec(**loss), expected_step=step, part_id="p"
        )
        return client.stub.ForwardBackward(request)

    for wrong in (
        {"name": "a2c"},
        {"name": "ppo_clip"},
        {"name": "sft", "clip_low": 0.2},
        {"name": "sft", "temperature": 0.0},
    ):
        assert_is(await refusal(call(**wrong)), INVALID, "INVALID_FIELD")
    error = await refusal(call(name="value"))
    assert_is(error, INVALID, "INVALID_FIELD", field="loss.name")
    assert "value" not in (await client.get()).losses
    for temperature in (-1.0, 1e-40, 1e9, math.inf, math.nan):
        request = pb.ComputeLogprobsRequest(batch=batch, model=1, temperature=temperature)
        error = await refusal(client.stub.ComputeLogprobs(request))
        assert_is(error, INVALID, "INVALID_FIELD", field="temperature")
    for rate in (-1.0, 1e6, math.inf, math.nan):
        error = await refusal(client.step_optimizer(0, ["a"], learning_rate=rate))
        assert_is(error, INVALID, "INVALID_FIELD", field="learning_rate")
    request = pb.ForwardBackwardRequest(batch=batch, loss=loss_pb2.LossSpec(name="sft"))
    error = await refusal(client.stub.ForwardBackward(request))
    assert_is(error, INVALID, "INVALID_FIELD", field="expected_step")


async def test_steps_and_parts_must_be_the_expected_ones(client: TrainerClient) -> None:
    batch = await upload(client, "parts", make_group("parts"))
    step = (await client.get()).step
    error = await refusal(client.step_optimizer(step, ["a"]))
    assert_is(error, PRECONDITION, "NO_GRADIENTS")
    error = await refusal(client.forward_backward(batch, PPO, expected_step=step + 1, part_id="a"))
    assert_is(error, ABORTED, "STEP_MISMATCH", expected=str(step + 1), actual=str(step))
    await client.forward_backward(batch, PPO, expected_step=step, part_id="a")
    await client.forward_backward(batch, PPO, expected_step=step, part_id="b")
    assert (await client.get()).part_ids == ["a", "b"]
    for parts in (["a"], ["a", "b", "c"], ["a", "b", "b"], ["a", "c"]):
        error = await refusal(client.step_optimizer(step, parts))
        assert_is(
            error,
            PRECONDITION,
            "PARTS_MISMATCH",
            expected=",".join(parts),
            gathered="a,b",
        )
    error = await refusal(client.step_optimizer(step - 1, ["a", "b"]))
    assert_is(error, ABORTED, "STEP_MISMATCH", actual=str(step))
    assert (await client.step_optimizer(step, ["b", "a"])).step == step + 1
    error = await refusal(client.step_optimizer(step, ["a", "b"]))
    assert_is(error, ABORTED, "STEP_MISMATCH")


async def test_a_part_is_added_once(client: TrainerClient) -> None:
    group = make_group("once", seed=8)
    batch = await upload(client, "once", group)
    step = (await client.get()).step
    await client.save_checkpoint("once")
    first = await client.forward_backward(batch, PPO, expected_step=step, part_id="a")
    again = await client.forward_backward(batch, PPO, expected_step=step, part_id="a")
    assert again == first
    error = await refusal(
        client.forward_backward(
            batch, PPO, expected_step=step, part_id="a", sample_ids=[group[0].sample_id]
        )
    )
    assert_is(error, INVALID, "PART_REUSED", part_id="a")
    other = PPO.model_copy(update={"aggregation": "sample_mean"})
    error = await refusal(client.forward_backward(batch, other, expected_step=step, part_id="b"))
    assert_is(error, PRECONDITION, "AGGREGATION_MISMATCH", part_id="a")
    repeated = await client.step_optimizer(step, ["a"])
    await client.load_checkpoint("checkpoints/once")
    batch = await upload(client, "once", group)
    await client.forward_backward(batch, PPO, expected_step=step, part_id="a")
    single = await client.step_optimizer(step, ["a"])
    assert repeated.grad_norm == single.grad_norm, "the repetition added nothing"


async def test_a_lost_reply_changes_nothing(client: TrainerClient) -> None:
    """The same request_id again, also while the first call still runs, is the same call."""
    group = make_group("lost", seed=12)
    batch = await upload(client, "lost", group)
    step = (await client.get()).step
    await client.save_checkpoint("lost")
    request = pb.ForwardBackwardRequest(
        batch=batch,
        loss=loss_pb2.LossSpec(name="ppo_clip", clip_low=0.2),
        expected_step=step,
        part_id="a",
        request_id="forward-1",
    )
    running = client.stub.ForwardBackward(request)
    first, second = await client.stub.ForwardBackward(request), await running
    assert first == second == await client.stub.ForwardBackward(request)
    request.part_id = "b"
    error = await refusal(client.stub.ForwardBackward(request))
    assert_is(error, INVALID, "REQUEST_ID_REUSED", request_id="forward-1")
    stepping = pb.StepOptimizerRequest(expected_step=step, part_ids=["a"], request_id="step-1")
    stepped = await client.stub.StepOptimizer(stepping)
    assert await client.stub.StepOptimizer(stepping) == stepped
    assert (await client.get()).step == step + 1
    publication = pb.PublishWeightsRequest(request_id="publish-1")
    started = await client.stub.PublishWeights(publication)
    assert (await client.stub.PublishWeights(publication)).name == started.name
    once = await client.publish_weights()
    assert once.weights.version == (await client.get()).weights.version
    await client.load_checkpoint("checkpoints/lost")
    batch = await upload(client, "lost", group)
    await client.forward_backward(batch, PPO, expected_step=step, part_id="a")
    assert (await client.step_optimizer(step, ["a"])).grad_norm == stepped.grad_norm


async def test_an_upload_can_be_repeated_by_its_request_id(client: TrainerClient) -> None:
    rows = [pb.UploadBatchRequest(sample=sample_to_proto(s)) for s in make_group("again")]

    async def stream(count: int) -> AsyncIterator[pb.UploadBatchRequest]:
        header = pb.BatchHeader(batch_id="again", sample_count=count, request_id="upload-1")
        yield pb.UploadBatchRequest(header=header)
        for row in rows[:count]:
            yield row

    first = await client.stub.UploadBatch(stream(4))
    assert await client.stub.UploadBatch(stream(4)) == first
    error = await refusal(client.stub.UploadBatch(stream(3)))
    assert_is(error, INVALID, "REQUEST_ID_REUSED")
    assert list((await client.get()).batches) == ["batches/again"]


async def test_columns_that_do_not_fit(client: TrainerClient) -> None:
    group = make_group("fit", seed=13)
    batch = await upload(client, "fit", group)

    async def put(sample_id: str, **columns: Any) -> Any:
        async def messages() -> AsyncIterator[pb.PutColumnsRequest]:
            row = pb.RowColumns(sample_id=sample_id, columns=columns)
            yield pb.PutColumnsRequest(batch=batch, rows=[row])

        return await client.stub.PutColumns(messages())

    short = {"floats": {"values": [1.0] * (group[0].response_length + 1)}}
    error = await refusal(put("fit/0", advantages=short))
    assert_is(error, INVALID, "INVALID_FIELD", sample_id="fit/0", column="advantages")
    error = await refusal(put("fit/0", advantages={"scalar": 1.0}))
    assert_is(error, INVALID, "INVALID_FIELD", sample_id="fit/0")
    assert_is(await refusal(put("fit/9", reward={"scalar": 1.0})), NOT_FOUND, "SAMPLE_NOT_FOUND")
    assert_is(await refusal(put("fit/0", reward={})), INVALID, "INVALID_FIELD")


async def test_rows_of_one_message_are_refused_when_too_large(client: TrainerClient) -> None:
    huge = pb.UploadBatchRequest(sample=sample_to_proto(make_group("huge")[0]))
    huge.sample.columns["rollout_logprobs"].floats.values.extend([0.0] * (20 << 20))

    async def stream() -> AsyncIterator[pb.UploadBatchRequest]:
        header = pb.BatchHeader(batch_id="huge", sample_count=1)
        yield pb.UploadBatchRequest(header=header)
        yield huge

    error = await refusal(client.stub.UploadBatch(stream()))
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await client.get()).batches == []


def test_every_loss_setting_is_known_here() -> None:
    """The wire carries every setting that the library has."""
    names = {field.name for field in loss_pb2.LossSpec.DESCRIPTOR.fields}
    assert names == set(LossSpec.model_fields)


NAN, INF = math.nan, math.inf


def spoil(row: Sample, name: str, value: float, **columns: Any) -> Sample:
    """The row with one value of a column, its last where it has one a token."""
    values: Any = value
    if name in ("advantages", "returns", "values", "old_logprobs"):
        values = np.full(row.response_length, -0.5, np.float32)
        values[-1] = value
    return replace(row, columns={**row.columns, **columns, name: values})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", NAN),
        ("reward", -INF),
        ("reward", 1e300),
        ("raw_reward", INF),
        ("score/own", NAN),
        ("weight", NAN),
        ("weight", INF),
        ("episode", NAN),
        ("episode", -1.0),
        ("episode", 0.5),
        ("episode", 1e19),
        ("advantages", NAN),
        ("advantages", INF),
        ("returns", NAN),
        ("values", -INF),
    ],
)
async def test_numbers_that_are_none_are_refused_with_their_row(
    client: TrainerClient, name: str, value: float
) -> None:
    rows = make_group("wrong", size=3)
    rows[1] = spoil(rows[1], name, value)
    error = await refusal(client.upload_batch("wrong", 3, samples=rows))
    assert_is(error, INVALID, "INVALID_FIELD", sample_id="wrong/1")
    assert name in error.metadata["field"]
    answer = await client.upload_batch("wrong", 3, samples=make_group("wrong", size=3))
    column = spoil(make_group("wrong", size=3)[1], name, value).columns[name]
    error = await refusal(client.put_columns(answer.batch, {"wrong/1": {name: column}}))
    assert_is(error, INVALID, "INVALID_FIELD", sample_id="wrong/1")
    await client.delete_batch(answer.batch)


async def test_log_probs_that_are_put_are_numbers_where_they_would_be_trained_on(
    client: TrainerClient,
) -> None:
    rows = make_group("put", size=3, seed=3)
    answer = await client.upload_batch("put", 3, samples=rows)
    column = spoil(rows[1], "old_logprobs", NAN).columns["old_logprobs"]
    error = await refusal(client.put_columns(answer.batch, {"put/1": {"old_logprobs": column}}))
    assert_is(error, INVALID, "INVALID_FIELD", sample_id="put/1", column="old_logprobs")
    mask = np.arange(rows[1].response_length) < rows[1].response_length - 1
    masked = {"old_logprobs": column, "loss_mask": mask}
    assert await client.put_columns(answer.batch, {"put/1": masked}) == 1
    await client.delete_batch(answer.batch)
