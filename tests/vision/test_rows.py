"""Rows with images on a trainer's rank: what is taken, and what is refused by name."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.config import TrainerConfig
from services.trainer.rank.table import RowTable
from services.trainer.rows import RowLimits, check_row
from sluice.api.common.v1 import sample_pb2
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import ConfigError, parse_config
from sluice.runtime.errors import DataLossError, InvalidFieldError, NotFoundError, ServiceError
from sluice.runtime.wire import blob_to_proto, sample_from_proto
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample, describe_rows
from tests.contract.training_backend.cases import build_model as build_text_model
from tests.vision.cases import IMAGE, Model, build_model, draw_image, make_row

pytestmark = pytest.mark.fast


def limits_of(model: Any) -> RowLimits:
    settings = {"model": str(model.directory), "store": "/tmp"}
    return RowLimits.from_config(parse_config(TrainerConfig, settings))


def sample_of(model: Model, blobs: BlobStore) -> Sample:
    """An image in the prompt and one in a later turn, both in the store."""
    images = [draw_image(model.rules, 1, 2, 3), draw_image(model.rules, 2, 1, 2)]
    for image in images:
        blobs.put(image.png)
    row = make_row("g/0", [2, images[0], 1], [4, images[1], 3], seed=1)
    return Sample(
        sample_id=row.sample_id,
        group_id=row.group_id,
        token_ids=row.token_ids.numpy().astype(np.int32),
        prompt_length=row.prompt_length,
        columns={"loss_mask": row.loss_mask.numpy()},
        media=tuple(row.media),
    )


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, sync=False)


def add(table: RowTable, blobs: BlobStore, sample: Sample, name: str = "b") -> None:
    rows = pb.BlobRows(blob=blob_to_proto(blobs.put(encode_group([sample]))), indices=[0], rows=[0])
    table.add(pb.AddRows(batch_id=name, blobs=[rows]))


def test_rows_are_given_to_the_backend_with_their_images(qwen3_vl: Model, blobs: BlobStore) -> None:
    sample = sample_of(qwen3_vl, blobs)
    table = RowTable(blobs, limits_of(qwen3_vl))
    add(table, blobs, sample)
    ((row,),) = table.micro_batches("b", [pb.MicroBatchRows(rows=[0])])
    assert row.media == sample.media
    for span in row.media:
        assert qwen3_vl.rules.grid_of(row.images[span.digest]) == span.grid_thw
    assert (row.token_ids[list(range(2, 8))] == IMAGE).all()


def changed(sample: Sample, **fields: Any) -> Sample:
    """With another second image."""
    return replace(sample, media=(sample.media[0], replace(sample.media[1], **fields)))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"digest": "0" * 32}, NotFoundError),
        ({"grid_thw": (1, 4, 2)}, InvalidFieldError),  # as many tokens, but lying otherwise
        ({"grid_thw": (1, 4, 4)}, InvalidFieldError),
        ({"grid_thw": (2**31 - 1,) * 3}, InvalidFieldError),
        ({"token_count": 1}, InvalidFieldError),
        ({"first_token": 14}, InvalidFieldError),
        ({"kind": "video"}, InvalidFieldError),
    ],
    ids=str,
)
def test_a_span_that_is_not_of_its_image_is_refused(
    qwen3_vl: Model, blobs: BlobStore, fields: dict[str, Any], kind: type[ServiceError]
) -> None:
    good = sample_of(qwen3_vl, blobs)
    table = RowTable(blobs, limits_of(qwen3_vl))
    add(table, blobs, good, "before")
    with pytest.raises(kind):
        add(table, blobs, changed(good, **fields))
    table.drop("b")
    add(table, blobs, good, "after")
    assert len(table.rows("before")) == len(table.rows("after")) == 1


def test_damaged_images_are_named(qwen3_vl: Model, blobs: BlobStore, tmp_path: Path) -> None:
    good = sample_of(qwen3_vl, blobs)
    png = bytes(draw_image(qwen3_vl.rules, 2, 1, 2).png)
    for data, reason in ((png[:-30], "IMAGE_BROKEN"), (b"", "IMAGE_BROKEN")):
        digest = blobs.put(data).digest
        with pytest.raises(InvalidFieldError) as caught:
            add(RowTable(blobs, limits_of(qwen3_vl)), blobs, changed(good, digest=digest))
        assert (caught.value.metadata["image"], caught.value.metadata["digest"]) == (reason, digest)
    (path,) = tmp_path.rglob(good.media[1].digest)
    path.chmod(0o644)
    path.write_bytes(png[:60] + bytes([png[60] ^ 1]) + png[61:])
    with pytest.raises(DataLossError):
        add(RowTable(blobs, limits_of(qwen3_vl)), blobs, good)


def test_images_stand_on_the_model_s_own_placeholder(qwen3_vl: Model, blobs: BlobStore) -> None:
    good = sample_of(qwen3_vl, blobs)
    tokens = np.where(good.token_ids == IMAGE, 3, good.token_ids).astype(np.int32)
    with pytest.raises(InvalidFieldError, match=f"not on {IMAGE}"):
        add(RowTable(blobs, limits_of(qwen3_vl)), blobs, replace(good, token_ids=tokens))


def test_a_model_of_text_is_shown_none(
    qwen3_vl: Model, blobs: BlobStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = build_text_model(tmp_path_factory.mktemp("text"), "qwen3")
    table = RowTable(blobs, limits_of(text))
    sample = sample_of(qwen3_vl, blobs)
    tokens = np.minimum(sample.token_ids, 50).astype(np.int32)
    with pytest.raises(InvalidFieldError, match="text only"):
        add(table, blobs, replace(sample, token_ids=tokens))
    add(table, blobs, replace(sample, token_ids=tokens, media=()), "text")


def test_a_model_without_image_rules_is_refused_at_the_start(tmp_path: Path) -> None:
    model = build_model(tmp_path, "qwen3_vl")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="preprocessor_config"):
        limits_of(model)


def test_no_new_mask_trains_on_an_image(qwen3_vl: Model, blobs: BlobStore) -> None:
    sample = sample_of(qwen3_vl, blobs)
    table = RowTable(blobs, limits_of(qwen3_vl))
    add(table, blobs, sample)
    before = table.rows("b")[0].loss_mask
    for mask, fits in ((np.ones(9, np.bool_), False), (np.arange(9) == 0, True)):
        bare = Sample(
            sample_id="g/0",
            group_id="g",
            token_ids=np.empty(0, np.int32),
            prompt_length=0,
            columns={"loss_mask": mask},
        )
        blob = blob_to_proto(blobs.put(encode_group([bare])))
        command = pb.SetColumns(batch_id="b", rows=pb.BlobRows(blob=blob, indices=[0], rows=[0]))
        if fits:
            table.set_columns(command)
            assert table.rows("b")[0].loss_mask.tolist() == mask.tolist()
        else:
            with pytest.raises(InvalidFieldError, match="leaves in"):
                table.set_columns(command)
            assert torch.equal(table.rows("b")[0].loss_mask, before)


EXTREMES = st.sampled_from([0, 1, -1, 2, 3, 4, 6, 8, 2**31 - 1, -(2**31), 2**30]) | st.integers(
    -(2**31), 2**31 - 1
)
SPANS = st.builds(
    sample_pb2.MediaSpan,
    blob=st.builds(
        sample_pb2.BlobReference,
        digest=st.sampled_from(["0" * 32, "", "../" * 9, "\0", "a" * 5000, "A" * 32]),
        size_bytes=st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    ),
    kind=st.sampled_from([0, 1, 2, 2**31 - 1, -(2**31)]),
    first_token=EXTREMES,
    token_count=EXTREMES,
    grid_thw=st.lists(EXTREMES, max_size=4),
    turn=EXTREMES,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=st.lists(SPANS, min_size=1, max_size=3))
def test_no_span_is_a_bug_of_the_trainer(
    qwen3_vl: Model, blobs: BlobStore, spans: list[sample_pb2.MediaSpan]
) -> None:
    """Whatever the numbers are: the row is refused, or its image is looked for in the store."""
    message = sample_pb2.Sample(
        sample_id="a",
        group_id="a",
        token_ids=[IMAGE] * 6 + [1] * 2 + [IMAGE] * 4 + [2],
        prompt_length=7,
        media=spans,
    )
    message.columns["loss_mask"].bools.values.extend([True] + [False] * 4 + [True])
    table = RowTable(blobs, limits_of(qwen3_vl))
    with contextlib.suppress(ServiceError):
        sample = sample_from_proto(message)
        check_row(sample)
        describe_rows([sample])
        add(table, blobs, sample)
        pytest.fail("no image of these is in the store")
