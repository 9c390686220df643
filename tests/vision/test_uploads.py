"""Rows with images at a trainer that runs: taken, planned, trained on, and refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample
from tests.service.trainer.harness import ACTIVE, GRPO, PPO, RunningTrainer, running_trainer, until
from tests.vision.cases import Model, build_model, draw_image, make_row


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


@pytest.fixture(scope="module", params=["one rank", "two ranks"])
def trainer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Model
) -> Iterator[RunningTrainer]:
    ranks = {"count": 2 if request.param == "two ranks" else 1}
    root = tmp_path_factory.mktemp("trainer")
    with running_trainer(root, model.directory, ranks=ranks) as running:
        yield running


def group_of(model: Model, blobs: BlobStore, name: str, *, shows: bool) -> list[Sample]:
    """Four samples of a prompt, with an image there and one behind it, or with none."""
    first, second = (draw_image(model.rules, seed, 2, 3) for seed in (1, 2))
    for image in (first, second):
        blobs.put(image.png)
    prompt, response = ([2, first, 1], [4, second, 3]) if shows else ([9], [7])
    samples = []
    for index in range(4):
        row = make_row(f"{name}/{index}", prompt, response, seed=index)
        samples.append(
            Sample(
                sample_id=row.sample_id,
                group_id=row.group_id,
                token_ids=row.token_ids.numpy().astype(np.int32),
                prompt_length=row.prompt_length,
                finish_reason="stop",
                columns={
                    "loss_mask": row.loss_mask.numpy(),
                    "rollout_logprobs": row.columns["rollout_logprobs"].numpy(),
                    "reward": float(index % 2),
                },
                media=tuple(row.media),
            )
        )
    return samples


async def refusal(call: Any) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await call
    return caught.value


@pytest.fixture(scope="module")
def norms() -> list[float]:
    """Of the gradients on one rank and on two: they are of the same rows."""
    return []


async def test_rows_with_and_without_images(
    trainer: RunningTrainer, model: Model, norms: list[float]
) -> None:
    """On two ranks the one without any image runs the same collectives."""
    blobs = BlobStore(trainer.store, sync=False)
    seeing = group_of(model, blobs, "seeing", shows=True)
    reading = group_of(model, blobs, "reading", shows=False)
    async with trainer.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        await check_refusals(client, model, blobs, seeing)
        await client.upload_batch("inline", 8, samples=[*seeing, *reading])
        blob = blobs.put(encode_group([*seeing, *reading]))
        await client.upload_batch("reference", 8, blobs=[blob])
        found = {}
        for name in ("inline", "reference"):
            batch = f"batches/{name}"
            await client.compute_logprobs(batch)
            found[name] = await client.get_columns(batch, ["old_logprobs", "loss_mask"])
            await client.compute_advantages(batch, GRPO)
        assert found["inline"].keys() == found["reference"].keys() and len(found["inline"]) == 8
        for sample in seeing:
            columns = found["inline"][sample.sample_id]
            mask = np.asarray(columns["loss_mask"])
            assert (mask == sample.columns["loss_mask"]).all()
        # A column of its own goes to rows with images, a mask that would train on one does not.
        length = seeing[0].response_length
        await client.put_columns("batches/inline", {"seeing/0": {"values": np.ones(length)}})
        error = await refusal(
            client.put_columns(
                "batches/inline", {"seeing/0": {"loss_mask": np.ones(length, np.bool_)}}
            )
        )
        assert error.reason == "INVALID_FIELD"
        plan = await client.plan_batch(pb.PlanBatchRequest(batch="batches/inline"))
        assert sum(len(m.rows) for rank in plan.ranks for m in rank.micro_batches) == 8
        before = await client.get_columns("batches/reference", ["old_logprobs"])
        step = (await client.get()).step
        await client.forward_backward("batches/reference", PPO, expected_step=step, part_id="a")
        outcome = await client.step_optimizer(step, ["a"])
        assert outcome.grad_norm > 0
        norms.append(outcome.grad_norm)
        assert norms == pytest.approx(norms[:1] * len(norms), rel=1e-5)
        await client.compute_logprobs("batches/reference")
        after = await client.get_columns("batches/reference", ["old_logprobs"])
        for name, columns in before.items():
            assert (columns["old_logprobs"] != after[name]["old_logprobs"]).any()
        for batch in (await client.get()).batches:
            await client.delete_batch(batch)


async def check_refusals(
    client: TrainerClient, model: Model, blobs: BlobStore, good: list[Sample]
) -> None:
    first, second = good[0].media
    cut = blobs.put(bytes(draw_image(model.rules, 5, 2, 3).png)[:-30]).digest
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "grid": ({"grid_thw": (1, 6, 4)}, "INVALID_FIELD"),
        "huge": ({"grid_thw": (2**31 - 1,) * 3}, "INVALID_FIELD"),
        "negative": ({"grid_thw": (-1, -4, -6)}, "INVALID_FIELD"),
        "flat": ({"grid_thw": ()}, "INVALID_FIELD"),
        "count": ({"token_count": 5}, "INVALID_FIELD"),
        "no count": ({"token_count": 0}, "INVALID_FIELD"),
        "least count": ({"token_count": -(2**31)}, "INVALID_FIELD"),
        "most count": ({"token_count": 2**31 - 1}, "INVALID_FIELD"),
        "place": ({"first_token": second.first_token - 1}, "INVALID_FIELD"),
        "most place": ({"first_token": 2**31 - 1}, "INVALID_FIELD"),
        "least place": ({"first_token": -(2**31)}, "INVALID_FIELD"),
        "turn": ({"turn": -1}, "INVALID_FIELD"),
        "digest": ({"digest": "../" * 8}, "INVALID_FIELD"),
        "long digest": ({"digest": "a" * 5000}, "INVALID_FIELD"),
        "NUL": ({"digest": "\0" * 32}, "INVALID_FIELD"),
        "gone": ({"digest": "0" * 32}, "BLOB_NOT_FOUND"),
        "cut": ({"digest": cut}, "INVALID_FIELD"),
    }
    for name, (fields, reason) in bad.items():
        sample = replace(good[0], media=(first, replace(second, **fields)))
        error = await refusal(client.upload_batch("bad", 1, samples=[sample]))
        assert error.reason == reason, (name, error)
        if name in ("negative", "turn", "least count", "least place", "most place", "most count"):
            continue  # no group is written of these
        blob = blobs.put(encode_group([sample]))
        error = await refusal(client.upload_batch("bad", 1, blobs=[blob]))
        assert error.reason == reason, (name, error)
    assert not [name for name in (await client.get()).batches if "bad" in name]
