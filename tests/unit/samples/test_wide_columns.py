"""Columns of several numbers a token: in files and messages, and refused where they are wrong."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.rows import RowLimits, check_numbers, check_top
from sluice.api.common.v1 import sample_pb2
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.wire import column_to_proto, columns_from_proto
from sluice.samples.arrow import (
    InvalidGroupError,
    decode_group,
    encode_group,
    encode_groups,
)
from sluice.samples.sample import (
    InvalidSampleError,
    Sample,
    find_column,
    truncate_sample,
    validate_sample,
)

IDS, LOGPROBS = "teacher_top_ids/3", "teacher_top_logprobs/3"


def taught(sample_id: str, length: int, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((length, 9)), 1)[:, :3].astype(np.int32)
    logprobs = np.log(rng.dirichlet(np.ones(4), length)[:, :3]).astype(np.float32)
    return Sample(
        sample_id=sample_id,
        group_id=sample_id.split("/")[0],
        token_ids=np.arange(length + 2, dtype=np.int32),
        prompt_length=2,
        columns={IDS: ids.reshape(-1, 3), LOGPROBS: logprobs.reshape(-1, 3)},
    )


def assert_same(found: Sample, wanted: Sample) -> None:
    assert found.columns.keys() == wanted.columns.keys()
    for name, values in wanted.columns.items():
        assert found.columns[name].dtype == values.dtype
        np.testing.assert_array_equal(found.columns[name], values)


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_file_holds_them_as_they_are(lengths, seed):
    samples = [taught(f"g/{i}", length, seed + i) for i, length in enumerate(lengths)]
    samples.append(replace(samples[0], sample_id="g/bare", columns={}))
    for sample in samples:
        validate_sample(sample)
    for found, wanted in zip(decode_group(encode_group(samples)), samples, strict=True):
        assert_same(found, wanted)
    (last,) = decode_group(encode_group(samples), [len(lengths) - 1])
    assert_same(last, samples[-2])


def test_groups_encoded_together_are_those_encoded_alone():
    groups = [([taught(f"{g}/{i}", g + i, g) for i in range(3)], {}) for g in range(4)]
    together = [bytes(view) for view in encode_groups(groups)]
    assert together == [encode_group(samples) for samples, _ in groups]


def test_a_shorter_sample_keeps_the_places_it_has():
    cut = truncate_sample(taught("g/0", 5), 4)
    assert [len(values) for values in cut.columns.values()] == [2, 2]


def test_messages_hold_them_too():
    columns = taught("g/0", 4).columns
    sent = {name: column_to_proto(values) for name, values in columns.items()}
    received = columns_from_proto(sent, "columns")
    for name, values in columns.items():
        assert received[name].dtype == values.dtype
        np.testing.assert_array_equal(received[name], values)


@pytest.mark.parametrize("packed", [b"1", b"1" * 16])
def test_a_message_that_was_cut_is_refused(packed):
    message = sample_pb2.Column(wide=sample_pb2.WideValues(values=packed))
    with pytest.raises(InvalidFieldError, match="not 3 numbers of 4 bytes"):
        columns_from_proto({IDS: message}, "columns")
    with pytest.raises(InvalidFieldError, match="no column of several"):
        columns_from_proto({"advantages": message}, "columns")


@pytest.mark.parametrize(
    "name",
    [
        *("teacher_top_ids", "teacher_top_ids/0", "teacher_top_ids/03", "teacher_top_ids/1025"),
        *(
            "teacher_top_ids/-1",
            "teacher_top_ids/3/../x",
            "teacher_top_ids/3\0",
            "teacher_top_ids/",
        ),
        "teacher_top_ids/" + "9" * 5000,
    ],
)
def test_no_other_name_is_one(name):
    assert find_column(name) is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (IDS, np.zeros((4, 2), np.int32)),
        (IDS, np.zeros(12, np.int32)),
        (IDS, np.zeros((4, 3), np.int64)),
        (IDS, np.zeros((3, 3), np.int32)),
        (LOGPROBS, np.zeros((4, 3), np.float64)),
        (LOGPROBS, 1.0),
    ],
)
def test_another_shape_or_type_is_refused(name, values):
    sample = taught("g/0", 4)
    with pytest.raises(InvalidSampleError, match="teacher_top"):
        validate_sample(replace(sample, columns={**sample.columns, name: values}))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (LOGPROBS, np.nan, "is no number at response token 1"),
        (LOGPROBS, -np.inf, "is no number at response token 1"),
        (LOGPROBS, 3e38, "is more than all at response token 1"),
        (LOGPROBS, 0.1, "is more than all at response token 1"),
        (IDS, 9, "not all within 0..8"),
        (IDS, -1, "not all within 0..8"),
        (IDS, 2**31 - 1, "not all within 0..8"),
        (IDS, None, "names a token twice at response token 1"),
    ],
)
def test_likeliest_tokens_that_are_none_are_refused_where_they_are_trained_on(name, value, problem):
    sample = taught("g/0", 4)
    values = sample.columns[name].copy()
    values[1, 2] = values[1, 0] if value is None else value
    wrong = replace(sample, columns={**sample.columns, name: values})
    masked = np.array([True, False, True, True])
    limits = RowLimits(9, 64)
    check_numbers(sample)
    with pytest.raises(InvalidFieldError, match=problem):
        check_numbers(wrong)
        limits.check_named(wrong)
    check_top(wrong, masked)
    check_numbers(replace(wrong, columns={**wrong.columns, "loss_mask": masked}))


def test_a_file_with_another_type_or_holes_is_refused():
    data = encode_group([taught("g/0", 2)])
    batch = pa.ipc.open_file(data).get_batch(0)
    place, metadata = batch.schema.get_field_index(IDS), batch.schema.metadata
    holes = pa.array([[[1, None, 2], [3, 4, 5]]], pa.list_(pa.list_(pa.int32(), 3)))
    gap = pa.array([[None, [3, 4, 5]]], pa.list_(pa.list_(pa.int32(), 3)))
    for column in (holes, gap, pa.array([[1, 2]], pa.list_(pa.int32()))):
        other = batch.set_column(place, pa.field(IDS, column.type), column)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, other.schema.with_metadata(metadata)) as writer:
            writer.write_batch(other)
        with pytest.raises(InvalidGroupError, match="teacher_top_ids/3"):
            decode_group(sink.getvalue().to_pybytes())
