"""Takes in rows: inline ones are spooled to the blob store, blobs are read for their facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from services.trainer.controller.batches import (
    Batch,
    RowLimits,
    StoredRows,
    check_row,
    check_sample,
    count_trained,
    describe_rows,
)
from services.trainer.controller.planning import Planner
from services.trainer.controller.rank_incarnation import Build
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import DataLossError, InvalidFieldError, NotFoundError
from sluice.runtime.wire import blob_to_proto
from sluice.samples.arrow import InvalidGroupError, decode_group, encode_group
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobReference, BlobStore
from sluice.samples.sample import COLUMNS, Sample, find_column

SPOOL_TOKENS = 1 << 20  # tokens of one spooled blob
SPOOL_ROWS = 4096  # rows of one spooled blob


class Upload:
    """The rows of one batch on their way in, in order.

    `spool`, `add_blob` and `finish` write to the store, so they are for a thread of their own:
    on a slow disk the front would hear nobody meanwhile.
    """

    def __init__(self, blobs: BlobStore, limits: RowLimits) -> None:
        self._blobs, self._limits = blobs, limits
        self._references: list[BlobReference] = []
        self._inline: list[Sample] = []
        self._inline_tokens = 0

    def add_sample(self, sample: Sample) -> None:
        """Take a row. Raises InvalidFieldError naming what is wrong with it."""
        check_sample(sample, self._limits)
        self._inline.append(sample)
        self._inline_tokens += len(sample.token_ids)

    @property
    def full(self) -> bool:
        """Whether the rows in memory are enough for a blob: call `spool`."""
        return self._inline_tokens >= SPOOL_TOKENS or len(self._inline) >= SPOOL_ROWS

    def add_blob(self, reference: BlobReference) -> None:
        """Take the rows of a blob, behind those that came before."""
        self.spool()
        self._references.append(reference)

    def finish(self) -> list[BlobReference]:
        """The blobs that hold all rows, in order."""
        self.spool()
        return list(self._references)

    def spool(self) -> None:
        """Write the rows that are in memory as one blob."""
        if self._inline:
            self._references.append(self._blobs.put(encode_group(self._inline)))
            self._inline, self._inline_tokens = [], 0


def read_batch(
    batch_id: str,
    references: list[BlobReference],
    blobs: BlobStore,
    limits: RowLimits,
    planner: Planner,
) -> Batch:
    """A batch of the rows of these blobs.

    Raises NotFoundError, DataLossError or InvalidFieldError for what is wrong with a blob.
    """
    stored: list[StoredRows] = []
    samples: list[Sample] = []
    for reference in references:
        found = read_samples(blobs, reference)
        for first in range(0, len(found), SPOOL_ROWS):
            count = min(SPOOL_ROWS, len(found) - first)
            stored.append(StoredRows(reference, len(samples) + first, count, first))
        samples += found
    facts = describe_rows(samples, limits)
    return Batch(batch_id=batch_id, stored=tuple(stored), facts=facts, owners=planner.own(facts))


def read_samples(blobs: BlobStore, reference: BlobReference) -> list[Sample]:
    """All rows of a blob, with the errors that clients see."""
    with blob_errors(reference):
        return decode_group(blobs.get(reference))


@contextmanager
def blob_errors(reference: BlobReference) -> Iterator[None]:
    """Turn what can be wrong with a blob into typed errors."""
    try:
        yield
    except BlobNotFoundError as error:
        raise NotFoundError("blob", error.digest) from None
    except BlobDigestError as error:
        raise DataLossError(str(error), blob=reference.digest, actual=error.actual) from None
    except InvalidGroupError as error:
        raise InvalidFieldError("blob", str(error), blob=reference.digest) from None


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
