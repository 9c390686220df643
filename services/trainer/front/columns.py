"""Columns that callers put and get: they travel between front and ranks as blobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from services.trainer.front.batches import Batch, check_row, count_trained
from services.trainer.front.generation import Build
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError, NotFoundError
from sluice.runtime.wire import blob_to_proto
from sluice.samples.arrow import encode_group
from sluice.samples.blobs import BlobReference, BlobStore
from sluice.samples.columns import COLUMNS, find_column
from sluice.samples.sample import Sample

ROWS_PER_BLOB = 4096

Columns = Mapping[str, np.ndarray | float]


class ColumnUpdate:
    """New columns of some rows of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._samples: dict[int, Sample] = {}

    def add(self, sample_id: str, columns: Columns) -> None:
        """Take columns of a row. Raises NotFoundError and InvalidFieldError."""
        row = self.batch.rows.get(sample_id)
        if row is None:
            raise NotFoundError("sample", sample_id)
        if row in self._samples:
            raise InvalidFieldError("rows", f"name sample {sample_id!r} twice", sample_id=sample_id)
        facts = self.batch.facts
        sample = Sample(
            sample_id=sample_id,
            group_id=facts.group_ids[row],
            token_ids=np.zeros(facts.lengths[row], dtype=np.int32),
            prompt_length=int(facts.prompt_lengths[row]),
            columns=columns,
        )
        check_row(sample)
        self._samples[row] = sample

    def spool(self, blobs: BlobStore) -> list[tuple[BlobReference, list[int]]]:
        """Blobs with the rows in each, tokens left out."""
        rows = sorted(self._samples)
        parts = [
            rows[start : start + ROWS_PER_BLOB] for start in range(0, len(rows), ROWS_PER_BLOB)
        ]
        return [
            (blobs.put(encode_group([bare(self._samples[row]) for row in part])), part)
            for part in parts
        ]

    def apply(self) -> int:
        """Note in the batch what the ranks have now; returns the rows changed."""
        batch = self.batch
        for row, sample in self._samples.items():
            for name in sample.columns:
                batch.mark(name, [row])
            if "loss_mask" in sample.columns:
                batch.mask_counts[row] = count_trained(sample)
            if "advantages" in sample.columns:
                batch.silent[row] = not np.any(sample.columns["advantages"])
        return len(self._samples)


def bare(sample: Sample) -> Sample:
    """The sample without its tokens, to send columns alone."""
    return Sample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        token_ids=np.empty(0, dtype=np.int32),
        prompt_length=0,
        columns=sample.columns,
    )


def set_columns(batch: Batch, blob: BlobReference, rows: Sequence[int]) -> Build:
    """The command that gives every rank the new columns of its rows."""
    rows_N = np.asarray(rows, dtype=np.int64)

    def build(data_rank: int) -> pb.FollowResponse:
        indices = np.flatnonzero(batch.owners[rows_N] == data_rank)
        owned = pb.BlobRows(
            blob=blob_to_proto(blob), indices=indices.tolist(), rows=rows_N[indices].tolist()
        )
        return pb.FollowResponse(set_columns=pb.SetColumns(batch_id=batch.batch_id, rows=owned))

    return build


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidFieldError for a column that does not exist."""
    for index, name in enumerate(names):
        if find_column(name) is None:
            raise InvalidFieldError(
                f"columns[{index}]", f"{name!r} is unknown; known: {', '.join(COLUMNS)}, score/*"
            )


def in_upload_order(batch: Batch, parts: Sequence[Sequence[Sample]]) -> Iterator[Sample]:
    """Rows that the ranks answered with, as the batch has them."""
    samples = {sample.sample_id: sample for part in parts for sample in part}
    for sample_id in batch.facts.sample_ids:
        yield samples[sample_id]
