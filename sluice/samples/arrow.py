"""A group of samples as one Arrow IPC file, which pandas, polars and duckdb open as well.

One record batch, one row a sample. Only columns that a row has are in the file; a row without
one has null there. https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.samples.columns import COLUMNS, Column, UnknownColumnError
from sluice.samples.sample import Sample, VersionSpan

FORMAT_KEY, FORMAT = b"sluice.format", b"1"

SPAN_TYPE = pa.struct(
    [
        ("version", pa.int64()),
        ("digest", pa.string()),
        ("first_token", pa.int32()),
        ("last_token", pa.int32()),
    ]
)
FIXED = (
    pa.field("sample_id", pa.string(), nullable=False),
    pa.field("group_id", pa.string(), nullable=False),
    pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("prompt_length", pa.int32(), nullable=False),
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("spans", pa.list_(SPAN_TYPE), nullable=False),
)


class InvalidGroupError(ValueError):
    """Bytes that are no group of samples of this format."""


def encode_group(samples: Sequence[Sample], metadata: Mapping[str, str] | None = None) -> bytes:
    """The samples, in order, and string metadata (prompt text, answer ...) of the group.

    Samples are expected to be valid (`validate_sample`).
    """
    names = {name: sample.sample_id for sample in samples for name in sample.columns}
    if unknown := set(names) - set(COLUMNS):
        raise UnknownColumnError(names[min(unknown)], min(unknown))
    used = [column for name, column in COLUMNS.items() if name in names]
    fields = [*FIXED, *(pa.field(column.name, _arrow_type(column)) for column in used)]
    arrays = [
        pa.array([sample.sample_id for sample in samples], pa.string()),
        pa.array([sample.group_id for sample in samples], pa.string()),
        _lists([sample.token_ids for sample in samples], np.dtype(np.int32)),
        pa.array([sample.prompt_length for sample in samples], pa.int32()),
        pa.array([sample.finish_reason for sample in samples], pa.string()),
        _encode_spans(samples),
        *(_encode_column(samples, column) for column in used),
    ]
    texts = {key.encode(): value.encode() for key, value in (metadata or {}).items()}
    if FORMAT_KEY in texts:
        raise ValueError(f"metadata key {FORMAT_KEY.decode()!r} is reserved")
    schema = pa.schema(fields, metadata={**texts, FORMAT_KEY: FORMAT})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue().to_pybytes()


def decode_group(data: bytes | memoryview, rows: Sequence[int] | None = None) -> list[Sample]:
    """The samples at `rows` (default: all), in that order.

    Arrays of numbers are read-only views of `data`; of other rows no per-token value is read.
    Raises InvalidGroupError for other bytes and IndexError for a row that is not there.
    """
    batch = _open(data).get_batch(0)
    count = batch.num_rows
    rows = range(count) if rows is None else rows
    for row in rows:
        if not 0 <= row < count:
            raise IndexError(f"row {row} of a group of {count}")
    if unknown := set(batch.schema.names) - set(COLUMNS) - {field.name for field in FIXED}:
        raise InvalidGroupError(f"unknown columns: {', '.join(sorted(unknown))}")
    columns = [
        (column.name, _decode_column(batch, column, rows))
        for column in COLUMNS.values()
        if column.name in batch.schema.names
    ]
    fixed = zip(
        _scalars(batch, "sample_id", rows),
        _scalars(batch, "group_id", rows),
        _arrays(batch, "token_ids", rows),
        _scalars(batch, "prompt_length", rows),
        _scalars(batch, "finish_reason", rows),
        _scalars(batch, "spans", rows),
        strict=True,
    )
    return [
        Sample(
            sample_id=sample_id,
            group_id=group_id,
            token_ids=tokens,
            prompt_length=prompt_length,
            finish_reason=finish_reason,
            columns={name: value for name, values in columns if (value := values[i]) is not None},
            spans=tuple(VersionSpan(**span) for span in spans),
        )
        for i, (sample_id, group_id, tokens, prompt_length, finish_reason, spans) in enumerate(
            fixed
        )
    ]


def read_metadata(data: bytes | memoryview) -> dict[str, str]:
    """The metadata given to `encode_group`; reads no rows."""
    pairs = _open(data).schema.metadata.items()
    return {key.decode(): value.decode() for key, value in pairs if key != FORMAT_KEY}


def count_rows(data: bytes | memoryview) -> int:
    """Number of samples; reads no rows."""
    count: int = _open(data).get_batch(0).num_rows
    return count


def _open(data: bytes | memoryview) -> pa.ipc.RecordBatchFileReader:
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidGroupError(f"not an Arrow file: {error}") from error
    if (reader.schema.metadata or {}).get(FORMAT_KEY) != FORMAT:
        raise InvalidGroupError("not a group of samples, or of another format")
    if reader.num_record_batches != 1:
        raise InvalidGroupError(f"{reader.num_record_batches} record batches, not one")
    return reader


def _arrow_type(column: Column) -> pa.DataType:
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.list_(kind) if column.per_token else kind


def _lists(values: Sequence[np.ndarray | None], dtype: np.dtype) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise InvalidGroupError(f"a group of {offsets[-1]} tokens; 2^31 - 1 fit")
    present = [value for value in values if value is not None]
    flat = np.concatenate(present).astype(dtype, copy=False) if present else np.empty(0, dtype)
    absent = [value is None for value in values]
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)),
        pa.array(flat),
        mask=pa.array(absent) if any(absent) else None,
    )


def _encode_column(samples: Sequence[Sample], column: Column) -> pa.Array:
    values: list[Any] = [sample.columns.get(column.name) for sample in samples]
    return _lists(values, column.dtype) if column.per_token else pa.array(values, pa.float64())


def _encode_spans(samples: Sequence[Sample]) -> pa.Array:
    spans = [
        [
            {
                "version": span.version,
                "digest": span.digest,
                "first_token": span.first_token,
                "last_token": span.last_token,
            }
            for span in sample.spans
        ]
        for sample in samples
    ]
    return pa.array(spans, pa.list_(SPAN_TYPE))


def _scalars(batch: pa.RecordBatch, name: str, rows: Sequence[int]) -> list[Any]:
    values = batch.column(name).to_pylist()  # cheaper than a few values one by one
    return [values[row] for row in rows]


def _arrays(batch: pa.RecordBatch, name: str, rows: Sequence[int]) -> list[np.ndarray | None]:
    array = batch.column(name)
    offsets = array.offsets.to_numpy()
    flat = array.values
    # Booleans are packed to bits, so that only they are copied, and of the chosen rows alone.
    numbers = None if pa.types.is_boolean(flat.type) else flat.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    found: list[np.ndarray | None] = []
    for row in rows:
        first, last = offsets[row], offsets[row + 1]
        if not valid[row]:
            found.append(None)
        elif numbers is None:
            found.append(flat.slice(first, last - first).to_numpy(zero_copy_only=False))
        else:
            found.append(numbers[first:last])
    return found


def _decode_column(batch: pa.RecordBatch, column: Column, rows: Sequence[int]) -> list[Any]:
    read = _arrays if column.per_token else _scalars
    return read(batch, column.name, rows)
