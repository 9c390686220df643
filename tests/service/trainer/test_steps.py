"""A step of training over the wire: rows in, columns, gradients, a step, new weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient, new_request_id
from sluice.loop import training as loop
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    GRPO,
    PPO,
    RunningTrainer,
    make_group,
    make_groups,
    train_step,
    upload,
)


async def test_a_step_changes_what_is_published(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    samples = make_groups("step")
    before = await client.publish_weights()
    batch = await upload(client, "step", samples)
    started = await client.get()
    outcome = await train_step(client, batch)
    after = await client.get()
    assert after.step == started.step + 1
    assert after.weights.version == before.weights.version + 1
    assert after.weights.digest == outcome.digest != before.weights.digest
    record = WeightStore(trainer.store / "weights").get(after.weights.version)
    assert record.parent == before.weights.version
    assert record.step == after.step
    model = AutoModelForCausalLM.from_pretrained(record.directory, dtype=torch.float32)
    # The published model scores as the trainer does.
    await client.compute_logprobs(batch)
    columns = await client.get_columns(batch, ["old_logprobs"])
    chosen = [samples[2].sample_id, samples[0].sample_id]
    some = await client.get_columns(batch, ["old_logprobs"], sample_ids=chosen)
    assert list(some) == sorted(chosen)  # in the order of the upload
    assert some[chosen[0]]["old_logprobs"] == pytest.approx(columns[chosen[0]]["old_logprobs"])
    for sample in samples[:3]:
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = model(tokens[None]).logits[0, sample.prompt_length - 1 : -1]
        targets = tokens[sample.prompt_length :, None]
        expected = logits.log_softmax(-1).gather(1, targets)[:, 0].detach().numpy()
        found = columns[sample.sample_id]["old_logprobs"]
        np.testing.assert_allclose(found, expected, atol=1e-5)


async def test_equal_weights_are_two_versions_of_one_digest(client: TrainerClient) -> None:
    first, second = await client.publish_weights(), await client.publish_weights()
    assert second.weights.version == first.weights.version + 1
    assert second.weights.digest == first.weights.digest
    assert second.byte_count > 100_000 * 4


async def test_where_a_version_takes_no_time_its_publication_is_answered_by_its_end(
    client: TrainerClient,
) -> None:
    """As soon as one before it has not: nobody asks then how it ends, or reads it ahead."""
    async with asyncio.timeout(PATIENCE):
        while True:  # a busy machine may take its time for some
            request = pb.PublishWeightsRequest(request_id=new_request_id())
            answer = await client.stub.PublishWeights(request, timeout=PATIENCE)
            if answer.done:
                break
    published = pb.PublishWeightsResponse()
    assert answer.response.Unpack(published)
    assert (await client.get()).weights == published.weights


async def test_inline_rows_and_blobs_are_the_same_batch(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    groups = [make_group(f"blob-{index}", seed=index) for index in range(3)]
    samples = [sample for group in groups for sample in group]
    blobs = BlobStore(trainer.store, sync=False)
    references = [blobs.put(encode_group(group)) for group in groups]
    inline = await client.upload_batch("inline", len(samples), samples=samples)
    stored = await client.upload_batch("stored", len(samples), blobs=references)
    assert inline.token_count == stored.token_count == sum(len(s.token_ids) for s in samples)
    assert inline.group_count == stored.group_count == 3
    outcomes = []
    for response in (inline, stored):
        scalars = await client.compute_advantages(response.batch, GRPO)
        step = (await client.get()).step
        passed = await client.forward_backward(
            response.batch, PPO, expected_step=step, part_id=response.batch
        )
        outcomes.append((scalars.reward_mean, passed.loss, passed.token_count))
        await client.discard_gradients()
    assert outcomes[0] == outcomes[1]
    rewards = [float(sample.columns["reward"]) for sample in samples]
    assert outcomes[0][0] == pytest.approx(np.mean(rewards))


async def test_blobs_of_a_live_batch_are_pinned(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    blobs = BlobStore(trainer.store, sync=False)
    group = make_group("pinned", seed=41)
    reference = blobs.put(encode_group(group))
    first = await client.upload_batch("pin-1", len(group), blobs=[reference])
    second = await client.upload_batch("pin-2", len(group), blobs=[reference])
    await client.delete_batch(first.batch)
    blobs.collect(0.0)
    assert blobs.exists(reference), "another batch still names it"
    await client.delete_batch(second.batch)
    blobs.collect(0.0)
    assert not blobs.exists(reference)


async def test_mismatch_is_measured_over_trained_tokens(client: TrainerClient) -> None:
    samples = make_groups("mismatch")
    response = await client.upload_batch("mismatch", len(samples), samples=samples)
    scalars = await client.compute_logprobs(response.batch)
    columns = await client.get_columns(response.batch, ["old_logprobs", "rollout_logprobs"])
    gaps = np.concatenate(
        [abs(row["old_logprobs"] - row["rollout_logprobs"]) for row in columns.values()]
    )
    assert scalars.column == "old_logprobs"
    assert scalars.token_count == len(gaps)
    assert scalars.rollout_mismatch_mean == pytest.approx(gaps.mean(), rel=1e-5)
    assert scalars.rollout_mismatch_max == pytest.approx(gaps.max(), rel=1e-5)
    stale = [
        replace(s, columns={**s.columns, "rollout_logprobs": s.columns["rollout_logprobs"] - 1})
        for s in samples
    ]
    response = await client.upload_batch("stale", len(samples), samples=stale)
    assert (await client.compute_logprobs(response.batch)).rollout_mismatch_mean > 0.5


async def test_kl_to_the_reference_model(client: TrainerClient) -> None:
    """The reference is the model that the trainer started with, whatever the policy learned."""
    samples = make_groups("reference", seed=3)
    batch = await upload(client, "reference", samples)
    await train_step(client, batch)
    await client.compute_logprobs(batch, reference=True)
    policy = await client.compute_logprobs(batch)
    columns = await client.get_columns(batch, ["old_logprobs", "reference_logprobs"])
    assert policy.column == "old_logprobs"
    moved = [row["old_logprobs"] - row["reference_logprobs"] for row in columns.values()]
    assert np.abs(np.concatenate(moved)).max() > 1e-3
    loss = LossSpec(name="ppo_clip", clip_low=0.2, kl_coefficient=0.1)
    step = (await client.get()).step
    passed = await client.forward_backward(batch, loss, expected_step=step, part_id="kl")
    assert passed.metrics["kl_reference"] > 0


async def test_columns_that_callers_put_are_used(client: TrainerClient) -> None:
    samples = make_groups("put", seed=11)
    response = await client.upload_batch("put", len(samples), samples=samples)
    rows = [
        pb.RowColumns(
            sample_id=sample.sample_id,
            columns={
                "advantages": {"floats": {"values": [float(index)] * sample.response_length}},
                "reward": {"scalar": index / 2},
                "loss_mask": {"bools": {"values": [True] + [False] * (sample.response_length - 1)}},
            },
        )
        for index, sample in enumerate(samples)
    ]

    async def messages():  # type: ignore[no-untyped-def]
        yield pb.PutColumnsRequest(batch=response.batch, rows=rows[:5])
        yield pb.PutColumnsRequest(batch=response.batch, rows=rows[5:])

    put = await client.stub.PutColumns(messages())
    assert put.row_count == len(samples)
    columns = await client.get_columns(response.batch, ["advantages", "reward", "loss_mask"])
    assert list(columns) == [sample.sample_id for sample in samples], "in the order of the upload"
    assert (
        columns[samples[4].sample_id]["advantages"].tolist() == [4.0] * samples[4].response_length
    )
    assert columns[samples[4].sample_id]["reward"] == 2.0
    assert sum(int(row["loss_mask"].sum()) for row in columns.values()) == len(samples)
    step = (await client.get()).step
    passed = await client.forward_backward(response.batch, PPO, expected_step=step, part_id="p")
    assert passed.token_count == len(samples), "one token a row by the new mask"
    assert passed.silent_row_count == 1, "the row whose advantages are 0"


async def test_a_pass_keeps_log_probs_in_the_place_of_another(client: TrainerClient) -> None:
    loud = make_group("kept", seed=5, rewards=[0.0, 1.0, 0.0, 1.0])
    silent = make_group("unkept", seed=6, rewards=[1.0, 1.0, 1.0, 1.0])
    batch = await upload(client, "kept", [*loud, *silent])
    await client.compute_logprobs(batch)
    scored = await client.get_columns(batch, ["old_logprobs"])
    await client.delete_batch(batch)
    batch = await upload(client, "kept", [*loud, *silent])
    step = (await client.get()).step
    some = [loud[2].sample_id, silent[1].sample_id]
    options: Any = {"expected_step": step, "keep_logprobs": True}
    passed = await client.forward_backward(batch, PPO, part_id="a", sample_ids=some, **options)
    assert passed.silent_row_count == 0, "all rows of the part are computed"
    kept = await client.get_columns(batch, ["old_logprobs"])
    assert {name for name, columns in kept.items() if columns} == set(some)
    compared = LossSpec(name="ppo_clip", clip_low=0.2, old_logprobs="old")
    with pytest.raises(RemoteError, match=loud[0].sample_id):  # it has none yet
        await client.forward_backward(batch, compared, expected_step=step, part_id="b")
    await client.forward_backward(batch, PPO, part_id="c", **options)
    kept = await client.get_columns(batch, ["old_logprobs"])
    for name, columns in scored.items():
        np.testing.assert_allclose(
            kept[name]["old_logprobs"], columns["old_logprobs"], atol=1e-6, err_msg=name
        )
    cooler = LossSpec(name="ppo_clip", clip_low=0.2, temperature=0.5)
    options["allow_other_temperature"] = True
    with pytest.raises(RemoteError, match="TEMPERATURE_MISMATCH"):  # the others' stay as they are
        await client.forward_backward(batch, cooler, part_id="d", sample_ids=some, **options)
    await client.forward_backward(batch, cooler, part_id="d", **options)
    cold = await client.get_columns(batch, ["old_logprobs"])
    assert all((cold[name]["old_logprobs"] != kept[name]["old_logprobs"]).any() for name in kept)
    await client.discard_gradients()


async def test_rows_without_signal_are_left_out_but_counted(client: TrainerClient) -> None:
    loud = make_group("loud", seed=5, rewards=[0.0, 1.0, 0.0, 1.0])
    silent = make_group("silent", seed=6, rewards=[1.0, 1.0, 1.0, 1.0])
    response = await client.upload_batch("silent", 8, samples=[*loud, *silent])
    scalars = await client.compute_advantages(response.batch, GRPO)
    assert (scalars.silent_group_count, scalars.group_count) == (1, 2)
    step = (await client.get()).step
    passed = await client.forward_backward(response.batch, PPO, expected_step=step, part_id="a")
    assert passed.silent_row_count == 4
    assert passed.token_count == sum(sample.response_length for sample in [*loud, *silent])
    await client.step_optimizer(step, ["a"])
    # With an entropy bonus these rows do have a gradient, and are computed.
    bonus = LossSpec(name="ppo_clip", clip_low=0.2, entropy_coefficient=0.01)
    passed = await client.forward_backward(
        response.batch, bonus, expected_step=step + 1, part_id="b"
    )
    assert passed.silent_row_count == 0


async def test_a_part_without_signal_leaves_the_means_of_a_step_alone(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    """Its rows are not computed, so that nothing is measured of them."""
    blobs, groups = BlobStore(trainer.store), []
    for index, rewards in enumerate(([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0])):
        samples = make_group(f"means-{index}", seed=7 + index, rewards=rewards)
        group = LedgerGroup(
            position=index,
            group_id=f"means-{index}",
            state="generated",
            issue_step=0,
            blob=blobs.put(encode_group(samples)),
            sample_count=len(samples),
        )
        groups.append(group)
    loud = await client.upload_batch("loud", 4, blobs=[groups[0].blob])
    await client.compute_advantages(loud.batch, GRPO)
    step = (await client.get()).step
    passed = await client.forward_backward(loud.batch, PPO, expected_step=step, part_id="a")
    await client.discard_gradients()
    assert min(passed.metrics["entropy"], passed.metrics["rollout_mismatch"]) > 0
    algorithm = AlgorithmConfig(advantage=GRPO, loss=PPO, mini_batches=2)
    report = await loop.train_step(client, algorithm, groups, optimizer_step=step, name="means")
    assert {name: report.metrics[name] for name in passed.metrics} == pytest.approx(
        dict(passed.metrics)
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "group_mean", "constant"])
async def test_calls_of_one_row_equal_one_call(client: TrainerClient, aggregation: str) -> None:
    samples = make_groups("split", seed=21)
    batch = await upload(client, "split", samples)
    length = 16.0 if aggregation == "constant" else None
    loss = PPO.model_copy(update={"aggregation": aggregation, "constant_length": length})
    await client.save_checkpoint(f"split-{aggregation}")
    whole = await train_step(client, batch, loss)
    await client.load_checkpoint(f"checkpoints/split-{aggregation}")
    batch = await upload(client, "split", samples)
    step = (await client.get()).step
    parts = [sample.sample_id for sample in samples]
    for part in parts:
        await client.forward_backward(
            batch, loss, expected_step=step, part_id=part, sample_ids=[part]
        )
    stepped = await client.step_optimizer(step, parts)
    # float32 sums in another order, of whatever weights the tests before have left
    assert stepped.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)


async def test_whitened_advantages(client: TrainerClient) -> None:
    samples = make_groups("white", seed=31)
    response = await client.upload_batch("white", len(samples), samples=samples)
    spec = AdvantageSpec(name="reinforce_plus_plus")
    await client.compute_advantages(response.batch, spec)
    columns = await client.get_columns(response.batch, ["advantages"])
    values = np.concatenate([row["advantages"] for row in columns.values()])
    assert values.mean() == pytest.approx(0.0, abs=1e-5)
    assert values.std(ddof=1) == pytest.approx(1.0, abs=1e-4)


async def test_a_resumed_run_equals_one_that_never_stopped(client: TrainerClient) -> None:
    samples = make_groups("resume", seed=51)
    batch = await upload(client, "resume", samples)
    await train_step(client, batch)
    saved = await client.save_checkpoint("resume")
    version = (await client.get()).weights.version
    straight = [await train_step(client, batch) for _ in range(2)]
    loaded = await client.load_checkpoint(saved.checkpoint)
    now = await client.get()
    assert loaded.step == saved.step == now.step
    assert list(now.batches) == [], "loading drops batches"
    assert now.weights.version == version, "the next version descends from the checkpoint's"
    batch = await upload(client, "resume", samples)
    assert [await train_step(client, batch) for _ in range(2)] == straight


async def test_learning_rate_and_skipped_steps(client: TrainerClient) -> None:
    samples = make_groups("skip", seed=61)
    batch = await upload(client, "skip", samples)
    before = await client.publish_weights()
    start = await client.get()
    spoiled = pb.RowColumns(
        sample_id=samples[0].sample_id,
        columns={"advantages": {"floats": {"values": [3e38] * samples[0].response_length}}},
    )

    async def messages():  # type: ignore[no-untyped-def]
        yield pb.PutColumnsRequest(batch=batch, rows=[spoiled])

    await client.stub.PutColumns(messages())
    await client.forward_backward(batch, PPO, expected_step=start.step, part_id="bad")
    stepped = await client.step_optimizer(start.step, ["bad"], learning_rate=0.5)
    assert stepped.outcome == pb.StepOptimizerResponse.OUTCOME_SKIPPED
    assert stepped.skipped_reason == "non-finite gradient norm"
    assert stepped.step == start.step + 1
    assert stepped.skipped_count == start.skipped_count + 1
    assert stepped.consecutive_skipped_count == 1
    assert stepped.learning_rate == 0.5
    assert (await client.publish_weights()).weights.digest == before.weights.digest


async def test_no_trained_token_skips_the_step(client: TrainerClient) -> None:
    group = make_group("masked", seed=71)
    masked = [
        replace(s, columns={**s.columns, "loss_mask": np.zeros(s.response_length, dtype=np.bool_)})
        for s in group
    ]
    batch = await upload(client, "masked", masked)
    step = (await client.get()).step
    passed = await client.forward_backward(batch, PPO, expected_step=step, part_id="none")
    assert (passed.token_count, passed.loss) == (0, 0.0)
    stepped = await client.step_optimizer(step, ["none"])
    assert stepped.skipped_reason == "no trained tokens"
    assert stepped.step == step + 1


def test_the_front_imports_no_torch(client: TrainerClient, trainer: RunningTrainer) -> None:
    """The running controller has no torch library mapped; its rank, which is active, has."""
    controller = Path(f"/proc/{trainer.process.pid}/maps").read_text()
    children = Path(f"/proc/{trainer.process.pid}/task/{trainer.process.pid}/children").read_text()
    assert "libtorch" not in controller
    maps = [Path(f"/proc/{child}/maps").read_text() for child in children.split()]
    assert any("libtorch" in each for each in maps), "negative control"


@pytest.mark.parametrize("aggregation", [{"aggregation": "sample_mean"},
    {"aggregation": "constant", "constant_length": 9.0}])  # fmt: skip
async def test_an_episode_counts_once_also_where_it_is_told_after_the_upload(
    client: TrainerClient, aggregation: dict[str, Any]
) -> None:
    plain = make_groups("episodes", count=2, seed=3)
    told = {row.sample_id: {"episode": float(index // 2)} for index, row in enumerate(plain)}
    rows = [replace(row, columns={**row.columns, **told[row.sample_id]}) for row in plain]
    loss, step = PPO.model_copy(update=aggregation), (await client.get()).step
    found = []
    for name, samples in (("plain", plain), ("told", rows), ("later", plain)):
        batch = (await client.upload_batch(name, len(samples), samples=samples)).batch
        if name == "later":
            await client.put_columns(batch, told)
        await client.compute_advantages(batch, AdvantageSpec(name="rloo"))
        passed = await client.forward_backward(batch, loss, expected_step=step, part_id=name)
        await client.discard_gradients()
        found.append(passed.loss)
    assert found[2] == pytest.approx(found[1]) != pytest.approx(found[0])
