"""Rows of several groups as columns, for who reads rows by the thousand and needs no `Sample`.

A column is one array over all rows. What some rows have and others lack, images, experts and
several numbers a token are in none: such groups are read by `sluice.samples.arrow.decode_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from sluice.samples.arrow import ADAPTER_SPANS, FIXED, arrow_type
from sluice.samples.sample import (
    LARGEST_EPISODE,
    LARGEST_NUMBER,
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    SEVERAL,
    RowFacts,
    digest_prompt,
    find_column,
    seed_prompts,
)

_FIXED = {field.name: field.type for field in FIXED}


@dataclass(frozen=True, kw_only=True)
class RowColumns:
    """N rows, one behind the other; R response tokens in all.

    token_ids: int32, row i from offsets[i] to offsets[i + 1]; offsets: int64[N + 1].
    prompt_lengths: int64[N]. per_token: [R] by name, as the column's type is. per_sample:
    float64[N] by name. span_counts: int64[N]; span_firsts, span_lasts and span_versions are of
    all spans, rows in order.
    """

    sample_ids: Sequence[str]
    group_ids: Sequence[str]
    token_ids: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    per_token: Mapping[str, np.ndarray]
    per_sample: Mapping[str, np.ndarray]
    span_counts: np.ndarray
    span_firsts: np.ndarray
    span_lasts: np.ndarray
    span_versions: np.ndarray

    @classmethod
    def read(
        cls, groups: Sequence[tuple[pa.RecordBatch, Sequence[int] | None]]
    ) -> RowColumns | None:
        """Take rows (None: all) of groups of one schema.

        None where a column is no such column, or its values are not one for each response token.
        Raises IndexError for a row that is not there.
        """
        names = groups[0][0].schema.names
        columns = {name: find_column(name) for name in names if name not in _FIXED}
        types, schema = dict(_FIXED), groups[0][0].schema
        if {*types} - {*schema.names}:
            return None
        if schema.field("spans").type == ADAPTER_SPANS:
            types["spans"] = ADAPTER_SPANS
        for name, column in columns.items():
            if column is None or column.width:
                return None
            types[name] = arrow_type(column)
        if {field.name: field.type for field in schema} != types:
            return None
        parts = []
        for batch, rows in groups:
            batch.validate(full=True)
            parts.append(_chosen(batch, rows).replace_schema_metadata(None))
        joined = pa.concat_batches(parts)
        spans = joined.column("spans")
        places = spans.flatten()
        if any(each.null_count for each in (*joined.columns, places, *places.flatten())):
            return None
        tokens = joined.column("token_ids")
        lengths = np.diff(tokens.offsets.to_numpy())
        prompts = joined.column("prompt_length").to_numpy().astype(np.int64)
        per_token, per_sample = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for name, column in columns.items():
            values = joined.column(name)
            assert column is not None
            if not column.per_token:
                per_sample[name] = values.to_numpy()
                continue
            flat = values.flatten()
            if flat.null_count or (np.diff(values.offsets.to_numpy()) != lengths - prompts).any():
                return None
            per_token[name] = flat.to_numpy(zero_copy_only=False)
        token_ids = tokens.flatten()
        if token_ids.null_count:
            return None
        return cls(
            sample_ids=joined.column("sample_id").to_pylist(),
            group_ids=joined.column("group_id").to_pylist(),
            token_ids=token_ids.to_numpy(),
            offsets=np.concatenate(([0], np.cumsum(lengths))),
            prompt_lengths=prompts,
            per_token=per_token,
            per_sample=per_sample,
            span_counts=np.diff(spans.offsets.to_numpy()),
            span_firsts=places.field("first_token").to_numpy(),
            span_lasts=places.field("last_token").to_numpy(),
            span_versions=places.field("version").to_numpy(),
        )

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64[N]."""
        return np.diff(self.offsets)

    @cached_property
    def response_lengths(self) -> np.ndarray:
        """int64[N]."""
        return self.lengths - self.prompt_lengths

    def are_right(self) -> bool:
        """Tell whether all rows surely are what `validate_sample` takes, and all numbers finite."""
        return (
            bool((self.prompt_lengths >= 1).all())
            and bool((self.response_lengths >= 0).all())
            and bool((self.token_ids >= 0).all())
            and self._spans_are_right()
            and all(bool(np.isfinite(values).all()) for values in self.per_token.values())
            and all(_are_numbers(name, values) for name, values in self.per_sample.items())
        )

    def facts(self) -> RowFacts:
        """Gather the facts of the rows, as `describe_rows` does those of samples."""
        count = len(self.sample_ids)
        seeds = seed_prompts(self.group_ids)
        prompts = [
            digest_prompt(self.token_ids[first : first + length], seeds[group])
            for first, length, group in zip(
                self.offsets.tolist(), self.prompt_lengths.tolist(), self.group_ids, strict=False
            )
        ]
        trained = self.response_lengths
        if (mask := self.per_token.get("loss_mask")) is not None:
            sums = np.concatenate(([0], np.cumsum(mask)))
            ends = np.cumsum(trained)
            trained = sums[ends] - sums[ends - trained]
        oldest = np.full(count, -1, dtype=np.int64)
        sampled = np.flatnonzero(self.span_counts)
        if len(sampled):
            firsts = (np.cumsum(self.span_counts) - self.span_counts)[sampled]
            oldest[sampled] = np.minimum.reduceat(self.span_versions, firsts)
        return RowFacts(
            sample_ids=self.sample_ids,
            group_ids=self.group_ids,
            lengths=self.lengths,
            prompt_lengths=self.prompt_lengths,
            prompts=np.array(prompts, dtype=np.int64),
            mask_counts=trained,
            oldest_versions=oldest,
            temperatures=self.per_sample.get("temperature", np.full(count, np.nan)),
            episodes=self.per_sample.get("episode", np.zeros(count)),
            present={
                name: np.ones(count, dtype=np.bool_) for name in (*self.per_token, *self.per_sample)
            },
        )

    def _spans_are_right(self) -> bool:
        """Those of a row follow one another within its response."""
        row_of = np.repeat(np.arange(len(self.sample_ids)), self.span_counts)
        covered = np.full(len(row_of), -1, dtype=np.int64)
        goes_on = np.flatnonzero(row_of[1:] == row_of[:-1]) + 1
        covered[goes_on] = self.span_lasts[goes_on - 1]
        right = (covered < self.span_firsts) & (self.span_firsts <= self.span_lasts)
        return bool((right & (self.span_lasts < self.response_lengths[row_of])).all())


def _are_numbers(name: str, values: np.ndarray) -> bool:
    right = np.abs(values) <= LARGEST_NUMBER  # NaN neither
    if name == "temperature":
        within = (values >= LEAST_TEMPERATURE) & (values <= MOST_TEMPERATURE)
        right &= within | (values == SEVERAL)
    elif name == "episode":
        right &= (values >= 0) & (values <= LARGEST_EPISODE) & (values == np.trunc(values))
    return bool(right.all())


def _chosen(batch: pa.RecordBatch, rows: Sequence[int] | None) -> pa.RecordBatch:
    count = batch.num_rows
    if rows is None or list(rows) == list(range(count)):
        return batch
    for row in rows:
        if not 0 <= row < count:
            raise IndexError(f"row {row} of a group of {count}")
    return batch.take(pa.array(list(rows), pa.int32()))
