"""Groups as Arrow files: nothing is lost, nothing absent becomes a number."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather

from sluice.samples import arrow
from sluice.samples.arrow import (
    MEDIA_TYPE,
    InvalidGroupError,
    decode_group,
    encode_group,
    encode_groups,
    encode_view,
    read_metadata,
)
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import (
    COLUMNS,
    MediaSpan,
    Sample,
    UnknownColumnError,
    VersionSpan,
)


def same(one: Sample, other: Sample) -> bool:
    """Bit for bit, so that NaN equals itself and -0.0 differs from 0.0."""
    if one.columns.keys() != other.columns.keys():
        return False
    pairs = [(one.token_ids, other.token_ids)]
    pairs += [(np.asarray(one.columns[n]), np.asarray(other.columns[n])) for n in one.columns]
    if any(
        a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes() for a, b in pairs
    ):
        return False
    experts = [one.routed_experts, other.routed_experts]
    if not np.array_equal(*(-1 if value is None else value for value in experts)):
        return False
    bare = {"token_ids": np.zeros(0, np.int32), "columns": {}, "routed_experts": None}
    return replace(one, **bare) == replace(other, **bare)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    columns: dict[str, np.ndarray | float] = {}
    for name in draw(st.sets(st.sampled_from(sorted(COLUMNS)))):
        column = COLUMNS[name]
        width = 64 if column.dtype == np.float64 else 32
        values = st.booleans() if column.dtype == np.bool_ else st.floats(width=width)
        if column.per_token:
            drawn = draw(st.lists(values, min_size=response, max_size=response))
            columns[name] = np.array(drawn, column.dtype)
        else:
            columns[name] = draw(values)
    ids = draw(
        st.lists(st.integers(0, 2**31 - 1), min_size=prompt + response, max_size=prompt + response)
    )
    group = draw(st.text(max_size=5))
    spans = tuple(
        VersionSpan(version=draw(st.integers(0, 2**40)), digest="d", first_token=i, last_token=i)
        for i in range(draw(st.integers(0, response)))
    )
    experts = draw(st.none() | st.integers(0, 2**15 - 1))
    media = tuple(
        MediaSpan(
            digest=f"{draw(st.integers(0, 2**128 - 1)):032x}",
            size=draw(st.integers(0, 2**40)),
            kind="image",
            first_token=first,
            token_count=1,
            grid_thw=(1, 2, draw(st.integers(1, 2**31 - 1))),
            turn=draw(st.integers(0, 9)),
        )
        for first in range(draw(st.integers(0, prompt)))
    )
    return Sample(
        sample_id=f"{group}/{draw(st.integers(0, 99))}",
        group_id=group,
        token_ids=np.array(ids, np.int32),
        prompt_length=prompt,
        finish_reason=draw(st.sampled_from(["", "stop", "length"])),
        columns=columns,
        spans=spans,
        routed_experts=None
        if experts is None
        else np.arange((prompt + response - 1) * 6, dtype=np.int16).reshape(-1, 3, 2) + experts,
        media=media,
    )


@settings(max_examples=80)
@given(data=st.data())
def test_groups_encoded_together_are_the_bytes_of_each(data: st.DataObject) -> None:
    some = data.draw(st.lists(st.lists(samples(), max_size=3), max_size=4))
    alike = data.draw(st.lists(samples(), min_size=1, max_size=3))
    groups = [*some, *data.draw(st.permutations([alike, alike[::-1], alike[:1], *some]))]
    texts = [{"number": str(number)} for number in range(len(groups))]
    encoded = list(encode_groups(list(zip(groups, texts, strict=True))))
    apart = [encode_view(*each) for each in zip(groups, texts, strict=True)]
    assert encoded == apart


@pytest.mark.parametrize(("limit", "count"), [(1, 8), (7, 8), (10, 4), (1 << 20, 1)])
def test_groups_of_a_task_are_encoded_together_up_to_a_size(
    limit: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = 0
    table = arrow._table

    def counted(*arguments: Any) -> pa.RecordBatch:
        nonlocal tables
        tables += 1
        return table(*arguments)

    monkeypatch.setattr(arrow, "_table", counted)
    monkeypatch.setattr(arrow, "TOKENS_TOGETHER", limit)
    groups = [([sample(i, old_logprobs=np.full(3, i, np.float32))], {}) for i in range(8)]
    encoded = list(encode_groups(groups))
    assert tables == count
    assert encoded == [encode_view(*each) for each in groups]


@settings(max_examples=50)
@given(group=st.lists(samples(), max_size=5), data=st.data())
def test_a_group_comes_back_whole_and_by_rows(group: list[Sample], data: st.DataObject) -> None:
    texts = data.draw(st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2))
    encoded = encode_group(group, texts)
    assert read_metadata(encoded) == texts
    decoded = decode_group(memoryview(encoded))
    assert len(decoded) == len(group)
    assert all(map(same, decoded, group))
    if group:
        rows = data.draw(st.lists(st.integers(0, len(group) - 1), max_size=4))
        chosen = decode_group(encoded, rows)
        assert len(chosen) == len(rows)
        assert all(same(sample, group[row]) for sample, row in zip(chosen, rows, strict=True))


def sample(index: int = 0, **columns: np.ndarray | float) -> Sample:
    return Sample(
        sample_id=f"g/{index}",
        group_id="g",
        token_ids=np.arange(5, dtype=np.int32),
        prompt_length=2,
        finish_reason="stop",
        columns=columns,
    )


def with_media(kind: pa.DataType, spans: list[object]) -> bytes:
    """A group of one row whose media column somebody else has written."""
    reader = pa.ipc.open_file(encode_group([sample()]))
    batch = reader.get_batch(0).append_column("media", pa.array([spans], kind))
    sink = pa.BufferOutputStream()
    schema = batch.schema.with_metadata(reader.schema.metadata)
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    return bytes(sink.getvalue())


def with_column(name: str, values: pa.Array | None) -> bytes:
    """A group of one row of which somebody else has written a column, or has left it out."""
    marks = {"loss_mask": np.ones(3, np.bool_), "values": np.ones(3, np.float32)}
    given = replace(sample(**marks), routed_experts=np.zeros((4, 2, 1), np.int16))
    reader = pa.ipc.open_file(encode_group([given]))
    columns = dict(zip(reader.schema.names, reader.get_batch(0).columns, strict=True))
    columns[name] = values
    if values is None:
        del columns[name]
    batch = pa.record_batch(columns).replace_schema_metadata(reader.schema.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sample_id", None),
        ("sample_id", pa.array([1])),
        ("group_id", pa.array([None], pa.string())),
        ("finish_reason", pa.nulls(1)),
        ("prompt_length", pa.array(["2"])),
        ("prompt_length", pa.array([None], pa.int32())),
        ("token_ids", None),
        ("token_ids", pa.array([5])),
        ("token_ids", pa.array([["a", "b"]])),
        ("token_ids", pa.array([[1, None, 2, 3, 4]], pa.list_(pa.int32()))),
        ("token_ids", pa.array([None], pa.list_(pa.int32()))),
        ("spans", None),
        ("loss_mask", pa.array([True])),
        ("loss_mask", pa.array([[True, None, True]])),
        ("values", pa.array([[[1.0], [2.0], [3.0]]])),
        ("values", pa.array([[1.0, None, 3.0]], pa.list_(pa.float32()))),
        ("routed_experts", pa.array([[0, 1, 2, 3]], pa.list_(pa.int16()))),
    ],
)
def test_a_column_that_somebody_wrote_otherwise_is_named(
    name: str, values: pa.Array | None
) -> None:
    with pytest.raises(InvalidGroupError, match=name):
        decode_group(with_column(name, values))


@pytest.mark.parametrize("end", [1 << 30, -1])
def test_a_text_that_leads_out_of_the_file_is_refused(end: int) -> None:
    """Whoever sends a group decides what is in it; read, it would end the process."""
    data = encode_group([sample(), sample(1)])
    offsets = np.array([0, 3, 6], np.int32).tobytes()  # of "g/0" and "g/1"
    assert data.count(offsets) == 1
    wrong = data.replace(offsets, np.array([0, 3, end], np.int32).tobytes())
    with pytest.raises(InvalidGroupError):
        decode_group(wrong)


def test_a_column_that_is_there_twice_is_named() -> None:
    reader = pa.ipc.open_file(encode_group([sample(reward=1.0)]))
    batch = reader.get_batch(0)
    twice = batch.append_column("reward", batch.column("reward"))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, twice.schema) as writer:
        writer.write_batch(twice)
    with pytest.raises(InvalidGroupError, match="reward"):
        decode_group(bytes(sink.getvalue()))


def test_media_of_another_type_or_with_holes_are_no_group() -> None:
    span = MediaSpan(
        digest="d", size=1, kind="image", first_token=0, token_count=1, grid_thw=(1, 2, 2)
    )
    kind, good = pa.list_(MEDIA_TYPE), vars(span)
    (row,) = decode_group(with_media(kind, [good]))
    assert row.media == (span,)
    assert not decode_group(with_media(kind, []))[0].media
    for spans in ([None], [{**good, "digest": None}], [{**good, "grid_thw": [1, None, 2]}]):
        with pytest.raises(InvalidGroupError, match="holes"):
            decode_group(with_media(kind, spans))
    for other, values in ((pa.list_(pa.int64()), [1]), (pa.list_(pa.string()), ["x"])):
        with pytest.raises(InvalidGroupError, match="media"):
            decode_group(with_media(other, values))


def test_absent_is_neither_zero_nor_empty() -> None:
    zeros, nan = np.zeros(3, np.float32), np.full(3, np.nan, np.float32)
    group = [sample(0), sample(1, reward=0.0, values=zeros), sample(2, reward=np.nan, values=nan)]
    group.append(replace(sample(3, values=zeros[:0]), prompt_length=5))
    none, zero, not_a_number, empty = decode_group(encode_group(group))
    assert not none.columns
    assert (zero.columns["reward"], list(zero.columns["values"])) == (0.0, [0.0] * 3)
    assert np.isnan(not_a_number.columns["reward"])
    assert np.isnan(not_a_number.columns["values"]).all()
    assert len(empty.columns["values"]) == 0


def test_a_view_is_put_as_its_copy_is(tmp_path: Path) -> None:
    group = [sample(i, old_logprobs=np.full(3, -1.5, np.float32)) for i in range(3)]
    copy, view = encode_group(group, {"answer": "\u00e4"}), encode_view(group, {"answer": "\u00e4"})
    assert copy == view
    store = BlobStore(tmp_path, sync=False)
    first = store.put(copy)
    inode = (tmp_path / "blobs" / first.digest).stat().st_ino
    assert store.put(view) == first
    assert (
        tmp_path / "blobs" / first.digest
    ).stat().st_ino == inode  # known as the same, not written anew


def test_numbers_are_views_of_the_blob(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, sync=False)
    group = [sample(i, old_logprobs=np.full(3, -1.5, np.float32)) for i in range(3)]
    reference = store.put(encode_group(group))
    view = store.get(reference)
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    second = decode_group(view, [1])[0]
    del view
    gc.collect()  # the samples keep the mapping alive
    for array in (second.token_ids, second.columns["old_logprobs"]):
        start = array.__array_interface__["data"][0]
        assert address <= start < address + reference.size
        assert not array.flags.writeable
    assert second.columns["old_logprobs"].tolist() == [-1.5] * 3


def test_other_tools_read_the_file(tmp_path: Path) -> None:
    group = [sample(0, reward=1.0, loss_mask=np.array([True, False, True])), sample(1)]
    path = tmp_path / "group.arrow"
    path.write_bytes(encode_group(group, {"prompt": "2+2?"}))
    table = feather.read_table(path)
    assert table.schema.field("loss_mask").type == pa.list_(pa.bool_())
    assert table.schema.metadata[b"prompt"] == b"2+2?"
    assert table.drop_columns(["spans"]).to_pylist() == [
        {
            "sample_id": "g/0", "group_id": "g", "token_ids": [0, 1, 2, 3, 4], "prompt_length": 2,
            "finish_reason": "stop", "loss_mask": [True, False, True], "reward": 1.0,
        },
        {
            "sample_id": "g/1", "group_id": "g", "token_ids": [0, 1, 2, 3, 4], "prompt_length": 2,
            "finish_reason": "stop", "loss_mask": None, "reward": None,
        },
    ]  # fmt: skip


def other_table(metadata: dict[str, str], batches: int) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"x": [1]})
    schema = batch.schema.with_metadata(metadata)
    with pa.ipc.new_file(sink, schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch.replace_schema_metadata(metadata))
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not arrow",
        encode_group([sample()])[:-20],
        other_table({}, 1),
        other_table({"sluice.format": "0"}, 1),
        other_table({"sluice.format": "1"}, 0),
        other_table({"sluice.format": "1"}, 2),
        other_table({"sluice.format": "1"}, 1),
    ],
)
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidGroupError):
        decode_group(content)


def test_faults_of_the_caller_are_named() -> None:
    with pytest.raises(UnknownColumnError, match=r"g/7.*'oops'"):
        encode_group([sample(0), sample(7, oops=1.0)])
    with pytest.raises(ValueError, match=r"sluice\.format"):
        encode_group([sample()], {"sluice.format": "x"})
    encoded = encode_group([sample()])
    for row in (1, -1):
        with pytest.raises(IndexError, match="of a group of 1"):
            decode_group(encoded, [row])


def test_routed_experts_of_one_group_have_one_shape() -> None:
    several = [
        replace(sample(index), routed_experts=np.zeros((4, 2, 1 + index), np.int16))
        for index in range(2)
    ]
    with pytest.raises(InvalidGroupError, match="several shapes"):
        encode_group(several)
