"""A group of samples as one Arrow IPC file, which pandas, polars and duckdb open as well.

Blobs that were stored together share a file: `BlobStore.get` has the bytes of one.

One record batch, one row a sample. Only columns that a row has are in the file; a row without
one has null there. https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format

The schema's metadata holds the facts about the rows under a digest of their own, so that who
plans with them reads neither the rows nor the whole file. Files of older versions lack them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from sluice.samples.blobs import BlobFile
from sluice.samples.sample import (
    COLUMNS,
    Column,
    InvalidFactsError,
    MediaSpan,
    RowFacts,
    Sample,
    UnknownColumnError,
    VersionSpan,
    describe_rows,
    find_column,
)

FORMAT_KEY, FORMAT = b"sluice.format", b"1"
FACTS_KEY, FACTS_DIGEST_KEY = b"sluice.row_facts", b"sluice.facts_digest"
OLD_FACTS_KEY = b"sluice.facts"  # numbers as text; who knows no other key reads the rows instead
_MAX_TOKENS = np.iinfo(np.int32).max
_RESERVED = (FORMAT_KEY, FACTS_KEY, OLD_FACTS_KEY, FACTS_DIGEST_KEY)
_OPTIONS = pa.ipc.IpcWriteOptions()  # no older format, whatever the environment asks for
HEAD_BYTES = 8192  # hold the schema of most files
TOKENS_TOGETHER = 1 << 18  # of groups that are encoded together: 2 to 4 MB

SPAN_TYPE = pa.struct(
    [
        ("version", pa.int64()),
        ("digest", pa.string()),
        ("first_token", pa.int32()),
        ("last_token", pa.int32()),
    ]
)
# of groups that adapters had a part in
ADAPTER_SPAN_TYPE = pa.struct([*SPAN_TYPE, pa.field("base_digest", pa.string())])
SPANS = pa.list_(SPAN_TYPE)
ADAPTER_SPANS = pa.list_(ADAPTER_SPAN_TYPE)
FIXED = (
    pa.field("sample_id", pa.string(), nullable=False),
    pa.field("group_id", pa.string(), nullable=False),
    pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("prompt_length", pa.int32(), nullable=False),
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("spans", SPANS, nullable=False),
)
EXPERTS = "routed_experts"  # list of tokens, each layers x choices of fixed size
MEDIA = "media"
MEDIA_TYPE = pa.struct(
    [
        ("digest", pa.string()),
        ("size", pa.int64()),
        ("kind", pa.string()),
        ("first_token", pa.int32()),
        ("token_count", pa.int32()),
        ("grid_thw", pa.list_(pa.int32())),
        ("turn", pa.int32()),
    ]
)
_FIXED_NAMES = frozenset([*(field.name for field in FIXED), EXPERTS, MEDIA])


class InvalidGroupError(ValueError):
    """Bytes that are no group of samples of this format."""


def encode_group(samples: Sequence[Sample], metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode the samples, in order, and string metadata (prompt text, answer ...) of the group.

    Samples are expected to be valid (`validate_sample`).
    """
    return encode_view(samples, metadata).tobytes()


def encode_view(samples: Sequence[Sample], metadata: Mapping[str, str] | None = None) -> memoryview:
    """Encode as `encode_group` does, without a copy: of a long group that costs more than the rest.

    (The allocator gives so much memory back each time, and the system clears it anew.)
    """
    facts = describe_rows(samples)
    return _file(_table(samples, facts), facts, metadata)


def encode_groups(
    groups: Sequence[tuple[Sequence[Sample], Mapping[str, str]]],
) -> Iterator[memoryview]:
    """Encode each group as `encode_view` does, to the same bytes, at less cost for each."""
    for together in _alike(groups):
        if len(together) == 1:
            yield encode_view(*together[0])
            continue
        samples = [sample for group, _ in together for sample in group]
        facts = describe_rows(samples)
        table, first = _table(samples, facts), 0
        for group, metadata in together:
            rows = slice(first, first + len(group))
            # copied: a file of a view pads with what lies behind it, which is the neighbours'
            part = pa.concat_batches([table.slice(first, len(group))])
            yield _file(part, facts.part(rows), metadata)
            first = rows.stop


def _alike(
    groups: Sequence[tuple[Sequence[Sample], Mapping[str, str]]],
) -> Iterator[list[tuple[Sequence[Sample], Mapping[str, str]]]]:
    """Neighbours that have the same columns, up to so many tokens; groups with images or experts,
    whose types may differ, alone."""
    together, names, tokens = list[tuple[Sequence[Sample], Mapping[str, str]]](), None, 0
    for entry in groups:
        group = entry[0]
        own = frozenset().union(*(sample.columns for sample in group))
        has_more = any(sample.media or sample.routed_experts is not None for sample in group)
        count = sum(len(sample.token_ids) for sample in group)
        if together and (own != names or has_more or tokens + count > TOKENS_TOGETHER):
            yield together
            together, tokens = [], 0
        together.append(entry)
        tokens += count
        names = None if has_more else own
    if together:
        yield together


def _table(samples: Sequence[Sample], facts: RowFacts) -> pa.RecordBatch:
    used, schema = _layout(frozenset(facts.present))
    if len(used) < len(facts.present):
        raise _unknown_column(samples)
    spans = _encode_spans(samples)
    if spans.type != SPANS:
        place = schema.get_field_index("spans")
        schema = schema.set(place, pa.field("spans", spans.type, nullable=False))
    arrays = [
        pa.array(facts.sample_ids, pa.string()),
        pa.array(facts.group_ids, pa.string()),
        _lists([sample.token_ids for sample in samples], np.dtype(np.int32)),
        pa.array(facts.prompt_lengths.astype(np.int32)),
        pa.array([sample.finish_reason for sample in samples], pa.string()),
        spans,
        *(_encode_column(samples, column) for column in used),
    ]
    if any([sample.routed_experts is not None for sample in samples]):
        arrays.append(_encode_experts(samples))
        schema = schema.append(pa.field(EXPERTS, arrays[-1].type))
    if any([sample.media for sample in samples]):
        media = [[vars(span) for span in sample.media] for sample in samples]
        arrays.append(pa.array(media, pa.list_(MEDIA_TYPE)))
        schema = schema.append(pa.field(MEDIA, arrays[-1].type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _file(table: pa.RecordBatch, facts: RowFacts, metadata: Mapping[str, str] | None) -> memoryview:
    texts = {key.encode(): value.encode() for key, value in (metadata or {}).items()}
    for key in _RESERVED:
        if key in texts:
            raise ValueError(f"metadata key {key.decode()!r} is reserved")
    text = facts.to_json().encode()
    digest = xxhash.xxh3_128_hexdigest(text).encode()
    own = {FORMAT_KEY: FORMAT, FACTS_KEY: text, FACTS_DIGEST_KEY: digest}
    table = table.replace_schema_metadata({**texts, **own})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=_OPTIONS) as writer:
        writer.write_batch(table)
    return memoryview(sink.getvalue()).cast("B")  # signed ones are unequal to bytes


def decode_group(data: bytes | memoryview, rows: Sequence[int] | None = None) -> list[Sample]:
    """Decode the samples at `rows` (default: all), in that order.

    Arrays of numbers are read-only views of `data`; of other rows no per-token value is read.
    Raises InvalidGroupError for other bytes and IndexError for a row that is not there.
    """
    return decode_rows(_open(data)[1], rows)


def open_group(data: bytes | memoryview) -> tuple[RowFacts | None, pa.RecordBatch]:
    """Return what `read_facts` does of whole content, and the rows for `decode_rows`."""
    metadata, batch = _open(data)
    return _facts_of(metadata), batch


def decode_rows(batch: pa.RecordBatch, rows: Sequence[int] | None = None) -> list[Sample]:
    """Decode samples as `decode_group` does."""
    count = batch.num_rows
    rows = range(count) if rows is None else rows
    for row in rows:
        if not 0 <= row < count:
            raise IndexError(f"row {row} of a group of {count}")
    _check_fixed(batch)
    names = [name for name in batch.schema.names if name not in _FIXED_NAMES]
    if unknown := {name for name in names if find_column(name) is None}:
        raise InvalidGroupError(f"unknown columns: {', '.join(sorted(unknown))}")
    columns = [
        (column.name, _decode_column(batch, column, rows))
        for name in _in_order(names)
        if (column := find_column(name)) is not None
    ]
    fixed = zip(
        _scalars(batch, "sample_id", rows),
        _scalars(batch, "group_id", rows),
        _arrays(batch, "token_ids", rows),
        _scalars(batch, "prompt_length", rows),
        _scalars(batch, "finish_reason", rows),
        _decode_spans(batch, rows),
        _decode_experts(batch, rows),
        _decode_media(batch, rows),
        strict=True,
    )
    return [
        _sample(values, {name: found for name, each in columns if (found := each[i]) is not None})
        for i, values in enumerate(fixed)
    ]


def _check_fixed(batch: pa.RecordBatch) -> None:
    """Raises InvalidGroupError for a column twice, and where those of every row lack or are others.

    Spans are looked at where they are read, and numbers of tokens.
    """
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise InvalidGroupError(f"columns of one name: {max(names, key=names.count)}")
    kinds = {"token_ids": _is_list, "prompt_length": pa.types.is_integer, "spans": _is_list}
    for name in (field.name for field in FIXED):
        if name not in names:
            raise InvalidGroupError(f"no column {name}")
        array = batch.column(name)
        if not kinds.get(name, _is_text)(array.type):
            raise InvalidGroupError(f"{name} is {array.type}")
        if array.null_count:
            raise InvalidGroupError(f"{name} has holes")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _sample(fixed: tuple[Any, ...], columns: Mapping[str, np.ndarray | float]) -> Sample:
    sample_id, group_id, tokens, prompt_length, finish_reason, spans, experts, media = fixed
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        token_ids=tokens,
        prompt_length=prompt_length,
        finish_reason=finish_reason,
        columns=columns,
        spans=spans,
        routed_experts=experts,
        media=media,
    )


def read_metadata(data: bytes | memoryview) -> dict[str, str]:
    """Return the metadata given to `encode_group`; reads no rows."""
    pairs = _open(data)[0].items()
    return {key.decode(): value.decode() for key, value in pairs if key not in _RESERVED}


def read_facts(source: bytes | memoryview | BlobFile) -> RowFacts | None:
    """Return the facts about the rows, None where the file has none; reads no rows.

    The source, content or a blob, need not be verified: facts have a digest of their own.
    Raises InvalidGroupError.
    """
    try:
        head = _read_head(source) if isinstance(source, BlobFile) else source
        schema = pa.ipc.read_schema(pa.py_buffer(head)[_MAGIC_BYTES:])
    except (pa.ArrowException, OSError) as error:
        raise InvalidGroupError(f"not an Arrow file: {error}") from error
    return _facts_of(_metadata_of(schema))


def _facts_of(metadata: Mapping[bytes, bytes]) -> RowFacts | None:
    facts = metadata.get(FACTS_KEY) or metadata.get(OLD_FACTS_KEY)
    if facts is None:
        return None
    if xxhash.xxh3_128_hexdigest(facts).encode() != metadata.get(FACTS_DIGEST_KEY):
        raise InvalidGroupError("the facts about the rows are damaged")
    try:
        return RowFacts.from_json(facts)
    except InvalidFactsError as error:
        raise InvalidGroupError(str(error)) from error


_MAGIC_BYTES = 8  # of the format's name, padded; then a marker, a length of 4 bytes, the schema


def _read_head(file: BlobFile) -> bytes:
    """Return what precedes the rows. The footer says it too, and is slower to read."""
    head = file.read(0, HEAD_BYTES)
    length = int.from_bytes(head[_MAGIC_BYTES + 4 : _MAGIC_BYTES + 8], "little")
    end = _MAGIC_BYTES + 8 + length
    return head + file.read(len(head), end - len(head)) if end > len(head) else head


def _open(source: bytes | memoryview) -> tuple[dict[bytes, bytes], pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.py_buffer(source))
    except (pa.ArrowException, OSError) as error:
        raise InvalidGroupError(f"not an Arrow file: {error}") from error
    metadata = _metadata_of(reader.schema)
    if reader.num_record_batches != 1:
        raise InvalidGroupError(f"{reader.num_record_batches} record batches, not one")
    try:
        batch = reader.get_batch(0)
        batch.validate(full=True)  # what leads out of the file would end the process
    except (pa.ArrowException, OSError) as error:
        raise InvalidGroupError(f"its rows make no sense: {error}") from error
    return metadata, batch


def _metadata_of(schema: pa.Schema) -> dict[bytes, bytes]:
    metadata: dict[bytes, bytes] = schema.metadata or {}
    if metadata.get(FORMAT_KEY) != FORMAT:
        raise InvalidGroupError("not a group of samples, or of another format")
    return metadata


def _in_order(names: Iterable[str]) -> list[str]:
    """Known columns as COLUMNS has them, then scores by name."""
    found = set(names)
    known = [name for name in COLUMNS if name in found]
    return known + sorted(found - set(known))


@lru_cache(maxsize=64)  # groups of a task have the same columns
def _layout(names: frozenset[str]) -> tuple[Sequence[Column], pa.Schema]:
    """Return the columns in the order of the file, less those unknown, and the schema with them."""
    columns = tuple(column for name in _in_order(names) if (column := find_column(name)))
    fields = [pa.field(column.name, arrow_type(column)) for column in columns]
    return columns, pa.schema([*FIXED, *fields])


def _unknown_column(samples: Sequence[Sample]) -> UnknownColumnError:
    return next(
        UnknownColumnError(sample.sample_id, name)
        for sample in samples
        for name in sample.columns
        if find_column(name) is None
    )


def arrow_type(column: Column) -> pa.DataType:
    kind = pa.from_numpy_dtype(column.dtype)
    if column.width:
        kind = pa.list_(pa.field("item", kind), column.width)
    return pa.list_(kind) if column.per_token else kind


def _lists(values: Sequence[np.ndarray | None], dtype: np.dtype) -> pa.Array:
    present = [value for value in values if value is not None]
    flat = np.concatenate(present).astype(dtype, copy=False) if present else np.empty(0, dtype)
    return _list_array(values, pa.array(flat))


def _list_array(values: Sequence[np.ndarray | None], flat: pa.Array) -> pa.ListArray:
    """Return the entries of `flat`, as many for each value as it is long."""
    absent = [value is None for value in values]
    offsets = [0, *accumulate([0 if value is None else len(value) for value in values])]
    if offsets[-1] > _MAX_TOKENS:
        raise InvalidGroupError(f"a group of {offsets[-1]} tokens; 2^31 - 1 fit")
    mask = pa.array(absent) if True in absent else None
    return pa.ListArray.from_arrays(np.array(offsets, np.int32), flat, mask=mask)


def _encode_column(samples: Sequence[Sample], column: Column) -> pa.Array:
    values: list[Any] = [sample.columns.get(column.name) for sample in samples]
    if column.width:
        return _encode_wide(values, column)
    return _lists(values, column.dtype) if column.per_token else pa.array(values, pa.float64())


def _encode_wide(values: Sequence[np.ndarray | None], column: Column) -> pa.ListArray:
    present = [value.reshape(-1) for value in values if value is not None]
    flat = np.concatenate(present).astype(column.dtype, copy=False)
    kind = arrow_type(column).value_type
    return _list_array(values, pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind))


def _encode_spans(samples: Sequence[Sample]) -> pa.Array:
    if any([span.base_digest for sample in samples for span in sample.spans]):
        each = [[vars(span) for span in sample.spans] for sample in samples]
        return pa.array(each, ADAPTER_SPANS)
    spans = [
        [(span.version, span.digest, span.first_token, span.last_token) for span in sample.spans]
        for sample in samples
    ]
    return pa.array(spans, SPANS)


def _encode_experts(samples: Sequence[Sample]) -> pa.ListArray:
    """Raises InvalidGroupError when samples differ in layers or choices."""
    values = [sample.routed_experts for sample in samples]
    shapes = {value.shape[1:] for value in values if value is not None}
    if len(shapes) > 1:
        raise InvalidGroupError(f"routed_experts of several shapes: {sorted(shapes)}")
    ((layers, choices),) = shapes
    flat = np.concatenate([value for value in values if value is not None]).reshape(-1)
    chosen = pa.FixedSizeListArray.from_arrays(pa.array(flat), choices)
    return _list_array(values, pa.FixedSizeListArray.from_arrays(chosen, layers))


def _decode_spans(batch: pa.RecordBatch, rows: Sequence[int]) -> list[tuple[VersionSpan, ...]]:
    """Raises InvalidGroupError for a column of another type, or with holes."""
    array = batch.column("spans")
    if array.type not in (SPANS, ADAPTER_SPANS):
        raise InvalidGroupError(f"spans is {array.type}")
    if any(part.null_count for part in (array, array.values, *array.values.flatten())):
        raise InvalidGroupError("spans has holes")
    names = array.values.type.names
    values = list(zip(*(part.to_pylist() for part in array.values.flatten()), strict=True))
    spans = {each: VersionSpan(**dict(zip(names, each, strict=True))) for each in set(values)}
    offsets = array.offsets.to_pylist()
    return [
        tuple([spans[each] for each in values[offsets[row] : offsets[row + 1]]]) for row in rows
    ]


def _decode_experts(batch: pa.RecordBatch, rows: Sequence[int]) -> list[np.ndarray | None]:
    if EXPERTS not in batch.schema.names:
        return [None] * len(rows)
    array = batch.column(EXPERTS)
    kind = array.type
    for each in (_is_list, pa.types.is_fixed_size_list, pa.types.is_fixed_size_list):
        if not each(kind):
            raise InvalidGroupError(f"{EXPERTS} is {array.type}")
        kind = kind.value_type
    layers, choices = array.values.type.list_size, array.values.values.type.list_size
    flat = array.values.values.values.to_numpy().reshape(-1, layers, choices)
    offsets, valid = array.offsets.to_numpy(), array.is_valid().to_numpy(zero_copy_only=False)
    return [flat[offsets[row] : offsets[row + 1]] if valid[row] else None for row in rows]


def _decode_media(batch: pa.RecordBatch, rows: Sequence[int]) -> Sequence[tuple[MediaSpan, ...]]:
    """Raises InvalidGroupError for a column of another type, or with holes."""
    if MEDIA not in batch.schema.names:
        return [()] * len(rows)
    if batch.schema.field(MEDIA).type != pa.list_(MEDIA_TYPE):
        raise InvalidGroupError(f"{MEDIA} is {batch.schema.field(MEDIA).type}")
    spans = batch.column(MEDIA).flatten()
    if any(
        part.null_count for part in (spans, *spans.flatten(), spans.field("grid_thw").flatten())
    ):
        raise InvalidGroupError(f"{MEDIA} has holes")
    return [
        tuple(MediaSpan(**{**span, "grid_thw": tuple(span["grid_thw"])}) for span in row or ())
        for row in _scalars(batch, MEDIA, rows)
    ]


def _scalars(batch: pa.RecordBatch, name: str, rows: Sequence[int]) -> list[Any]:
    values = batch.column(name).to_pylist()  # cheaper than a few values one by one
    return [values[row] for row in rows]


def _arrays(batch: pa.RecordBatch, name: str, rows: Sequence[int]) -> list[np.ndarray | None]:
    """Raises InvalidGroupError for a column of no numbers, or with holes."""
    array = batch.column(name)
    if not (_is_list(array.type) and pa.types.is_primitive(array.type.value_type)):
        raise InvalidGroupError(f"{name} is {array.type}")
    offsets = array.offsets.to_pylist()
    flat = array.values
    if flat.null_count:
        raise InvalidGroupError(f"{name} has holes")
    # Booleans are packed to bits, so that only they are copied, and of the chosen rows alone.
    numbers = None if pa.types.is_boolean(flat.type) else flat.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    found: list[np.ndarray | None] = []
    for row in rows:
        first, last = offsets[row], offsets[row + 1]
        if valid is not None and not valid[row]:
            found.append(None)
        elif numbers is None:
            found.append(flat.slice(first, last - first).to_numpy(zero_copy_only=False))
        else:
            found.append(numbers[first:last])
    return found


def _decode_column(batch: pa.RecordBatch, column: Column, rows: Sequence[int]) -> list[Any]:
    if column.width:
        return _decode_wide(batch, column, rows)
    read = _arrays if column.per_token else _scalars
    return read(batch, column.name, rows)


def _decode_wide(batch: pa.RecordBatch, column: Column, rows: Sequence[int]) -> list[Any]:
    """Raises InvalidGroupError for a column of another type, or with holes."""
    array = batch.column(column.name)
    if array.type != arrow_type(column):
        raise InvalidGroupError(f"{column.name} is {array.type}")
    places = array.values
    if places.null_count or places.values.null_count:
        raise InvalidGroupError(f"{column.name} has holes")
    flat = places.values.to_numpy().reshape(-1, column.width)
    offsets, valid = array.offsets.to_numpy(), array.is_valid().to_numpy(zero_copy_only=False)
    return [flat[offsets[row] : offsets[row + 1]] if valid[row] else None for row in rows]
