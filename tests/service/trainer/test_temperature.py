"""Rows say at what temperature they were sampled; a pass at another one is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sluice.client import TrainerClient
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import SEVERAL, Sample
from tests.service.trainer.harness import PPO, RunningTrainer, make_group, upload
from tests.service.trainer.test_errors import INVALID, PRECONDITION, assert_is, refusal

AT_07 = PPO.model_copy(update={"temperature": 0.7})


def sampled(name: str, **columns: float) -> list[Sample]:
    return [replace(sample, columns={**sample.columns, **columns}) for sample in make_group(name)]


async def test_another_temperature_is_refused_unless_it_is_allowed(client: TrainerClient) -> None:
    batch = await upload(client, "at07", sampled("at07", temperature=float(np.float32(0.7))))
    step = (await client.get()).step
    mistaken = {"expected_step": step, "part_id": "mistaken"}
    for call in (
        client.compute_logprobs(batch),
        client.compute_logprobs(batch, temperature=0.6999),
        client.compute_logprobs(batch, reference=True, temperature=1.0),
        client.forward_backward(batch, PPO, **mistaken),
        client.forward_backward(batch, PPO, **mistaken, sample_ids=["at07/3"]),
    ):
        error = await refusal(call)
        assert_is(error, PRECONDITION, "TEMPERATURE_MISMATCH", sampled="0.7")
        assert "temperature 0.7" in str(error) and "allow_other_temperature" in str(error)
    assert error.metadata["sample_id"] == "at07/3"
    assert not (await client.get()).part_ids
    assert (await client.compute_logprobs(batch, temperature=0.7)).column == "old_logprobs"
    right = await client.forward_backward(batch, AT_07, expected_step=step, part_id="right")
    other = await client.forward_backward(
        batch, PPO, expected_step=step, part_id="other", allow_other_temperature=True
    )
    assert right.metrics["ratio"] != other.metrics["ratio"]
    await client.compute_logprobs(batch, allow_other_temperature=True)


async def test_several_temperatures_are_no_temperature(client: TrainerClient) -> None:
    rows = sampled("mixed", temperature=1.0)
    rows[2] = replace(rows[2], columns={**rows[2].columns, "temperature": SEVERAL})
    batch = await upload(client, "mixed", rows)
    error = await refusal(client.compute_logprobs(batch))
    assert_is(error, PRECONDITION, "TEMPERATURE_MISMATCH", sample_id="mixed/2")
    assert "several temperatures" in str(error)
    step = (await client.get()).step
    await client.forward_backward(
        batch, PPO, expected_step=step, part_id="p", sample_ids=["mixed/0", "mixed/1"]
    )


async def test_a_row_that_says_nothing_is_taken_and_a_column_may_say_it_later(
    client: TrainerClient,
) -> None:
    batch = await upload(client, "silent", make_group("silent"))
    await client.compute_logprobs(batch, temperature=0.3)
    await client.put_columns(batch, {"silent/1": {"temperature": 0.5}})
    error = await refusal(client.compute_logprobs(batch, temperature=0.3))
    assert_is(error, PRECONDITION, "TEMPERATURE_MISMATCH", sample_id="silent/1", sampled="0.5")


async def test_log_probs_of_one_temperature_are_not_compared_with_those_of_another(
    client: TrainerClient,
) -> None:
    """Also of rows that do not say at which they were sampled."""
    batch = await upload(client, "scored", make_group("scored"))
    step = (await client.get()).step
    old = AT_07.model_copy(update={"old_logprobs": "old"})
    await client.compute_logprobs(batch)
    error = await refusal(client.forward_backward(batch, old, expected_step=step, part_id="p"))
    assert_is(error, PRECONDITION, "TEMPERATURE_MISMATCH", column="old_logprobs", sampled="1")
    await client.forward_backward(batch, AT_07, expected_step=step, part_id="reads no such column")
    await client.compute_logprobs(batch, temperature=0.7)
    found = await client.forward_backward(batch, old, expected_step=step, part_id="agrees")
    assert found.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    await client.compute_logprobs(batch, temperature=1.0)
    await client.forward_backward(
        batch, old, expected_step=step, part_id="allowed", allow_other_temperature=True
    )
    columns = await client.get_columns(batch, ["old_logprobs"])
    await client.put_columns(batch, columns)  # the caller's own are what the caller says
    await client.forward_backward(batch, old, expected_step=step, part_id="own")


async def test_the_temperature_of_a_blob_is_read_from_its_facts(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    rows = sampled("stored", temperature=0.7, top_p=0.9)
    blob = BlobStore(trainer.store).put(encode_group(rows))
    batch = (await client.upload_batch("stored", len(rows), blobs=[blob])).batch
    assert_is(await refusal(client.compute_logprobs(batch)), PRECONDITION, "TEMPERATURE_MISMATCH")
    plain = (await client.upload_batch("plain", 4, samples=make_group("plain"))).batch
    step = (await client.get()).step
    sft = AT_07.model_copy(update={"name": "sft", "clip_low": None})
    found = {}
    for name in (batch, plain):
        answer = await client.forward_backward(name, sft, expected_step=step, part_id=name)
        found[name] = answer.metrics.get("sampling_truncated")
    assert found == {batch: 1.0, plain: None}  # which biases gradients, and so is told


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf"), float("-inf")])
async def test_a_temperature_that_is_none_is_refused(client: TrainerClient, value: float) -> None:
    error = await refusal(client.upload_batch("bad", 4, samples=sampled("bad", temperature=value)))
    assert_is(error, INVALID, "INVALID_FIELD", sample_id="bad/0")
    assert "temperature" in error.metadata["field"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [True, False])
async def test_log_probs_that_are_no_numbers_are_refused_where_they_would_be_trained_on(
    client: TrainerClient, trainer: RunningTrainer, value: float, stored: bool
) -> None:
    def spoiled(**mask: Any) -> list[Sample]:
        rows = make_group(f"spoiled{value}", size=3, seed=7)
        logprobs = np.array(rows[1].columns["rollout_logprobs"])
        logprobs[-1] = value
        mask = {name: np.arange(len(logprobs)) < len(logprobs) - 1 for name in mask}
        rows[1] = replace(
            rows[1], columns={**rows[1].columns, "rollout_logprobs": logprobs, **mask}
        )
        return rows

    async def send(name: str, rows: list[Sample]) -> Any:
        if not stored:
            return await client.upload_batch(name, len(rows), samples=rows)
        blob = BlobStore(trainer.store).put(encode_group(rows))
        return await client.upload_batch(name, len(rows), blobs=[blob])

    error = await refusal(send("spoiled", spoiled()))
    assert_is(error, INVALID, "INVALID_FIELD", sample_id=f"spoiled{value}/1")
    assert error.metadata["column"] == "rollout_logprobs"
    assert await send("masked", spoiled(loss_mask=True))
