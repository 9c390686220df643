"""A group of samples as one Arrow IPC file, which pandas, polars and duckdb open as well.

One record batch, one row a sample. Only columns that a row has are in the file; a row without
one has null there. https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    names = {name for sample in samples for name in sample.columns}
    if unknown := names - set(COLUMNS):
        raise UnknownColumnError(samples[0].sample_id, min(unknown))
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
    schema = pa.schema(fields, metadata={**texts, FORMAT_KEY: FORMAT})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue().to_pybytes()


def decode_group(data: bytes | memoryview, rows: Sequence[int] | None = None) -> list[Sample]:
    """The samples at `rows` (default: all), in that order; numeric arrays are views of `data`.

    Raises InvalidGroupError for other bytes and IndexError for a row that is not there.
    """
    batch, _ = _open(data)
    count = batch.num_rows
    for row in rows or ():
        if not 0 <= row < count:
            raise IndexError(f"row {row} of a group of {count}")
    rows = range(count) if rows is None else rows
    tokens = _lists_at(batch, "token_ids", rows)
    known = [COLUMNS[name] for name in batch.schema.names if name in COLUMNS]
    columns = {column.name: _decode_column(batch, column, rows) for column in known}
    spans = batch.column("spans")
    strings = {name: batch.column(name) for name in ("sample_id", "group_id", "finish_reason")}
    prompts = batch.column("prompt_length")
    return [
        Sample(
            sample_id=strings["sample_id"][row].as_py(),
            group_id=strings["group_id"][row].as_py(),
            token_ids=tokens[index],
            prompt_length=prompts[row].as_py(),
            finish_reason=strings["finish_reason"][row].as_py(),
            columns={
                name: values[index] for name, values in columns.items() if values[index] is not None
            },
            spans=tuple(VersionSpan(**span) for span in spans[row].as_py()),
        )
        for index, row in enumerate(rows)
    ]


def read_metadata(data: bytes | memoryview) -> dict[str, str]:
    """The metadata given to `encode_group`; reads no rows."""
    _, schema = _open(data)
    pairs = (schema.metadata or {}).items()
    return {key.decode(): value.decode() for key, value in pairs if key != FORMAT_KEY}


def _open(data: bytes | memoryview) -> tuple[pa.RecordBatch, pa.Schema]:
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        if (reader.schema.metadata or {}).get(FORMAT_KEY) != FORMAT:
            raise InvalidGroupError("not a group of samples, or of another format")
        if reader.num_record_batches != 1:
            raise InvalidGroupError(f"{reader.num_record_batches} record batches, not one")
        return reader.get_batch(0), reader.schema
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidGroupError(f"not an Arrow file: {error}") from error


def _arrow_type(column: Column) -> pa.DataType:
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.list_(kind) if column.per_token else kind


def _lists(values: Sequence[np.ndarray | None], dtype: np.dtype) -> pa.Array:
    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    present = [value for value in values if value is not None]
    flat = np.concatenate(present) if present else np.empty(0, dtype)
    absent = [value is None for value in values]
    mask = pa.array(absent) if any(absent) else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, from_pandas=False), mask=mask)


def _encode_column(samples: Sequence[Sample], column: Column) -> pa.Array:
    values = [sample.columns.get(column.name) for sample in samples]
    if column.per_token:
        return _lists(values, column.dtype)
    return pa.array(values, pa.float64(), from_pandas=False)


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


def _lists_at(batch: pa.RecordBatch, name: str, rows: Sequence[int]) -> list[np.ndarray | None]:
    array = batch.column(name)
    offsets = array.offsets.to_numpy()
    flat = array.values
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [
        flat.slice(offsets[row], offsets[row + 1] - offsets[row]).to_numpy(zero_copy_only=False)
        if valid[row]
        else None
        for row in rows
    ]


def _decode_column(
    batch: pa.RecordBatch, column: Column, rows: Sequence[int]
) -> list[np.ndarray | float | None]:
    if column.per_token:
        return list(_lists_at(batch, column.name, rows))
    array = batch.column(column.name)
    return [array[row].as_py() for row in rows]
