"""Takes in rows: inline ones are spooled to the blob store, blobs are read for their facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from services.trainer.controller.batches import Batch, StoredRows
from services.trainer.controller.planning import Planner
from services.trainer.controller.rank_incarnation import Build
from services.trainer.rows import RowLimits, blob_errors, check_row, read_rows
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError, NotFoundError
from sluice.runtime.wire import blob_to_proto
from sluice.samples.arrow import InvalidGroupError, encode_group, read_facts
from sluice.samples.blobs import BlobReference, BlobStore
from sluice.samples.facts import RowFacts, count_trained, describe_rows
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
        check_row(sample)
        self._limits.check_tokens([self._limits.admit(sample)])
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
    """A batch of the rows of these blobs, of which only the facts are read.

    Raises NotFoundError, DataLossError, OversizeSampleError or InvalidFieldError.
    """
    stored: list[StoredRows] = []
    parts: list[RowFacts] = []
    row = 0
    for reference in references:
        parts.append(find_facts(blobs, reference, limits))
        count = len(parts[-1].lengths)
        for first in range(0, count, SPOOL_ROWS):
            rows = min(SPOOL_ROWS, count - first)
            stored.append(StoredRows(reference, row + first, rows, first))
        row += count
    facts = RowFacts.join(parts)
    if len(set(facts.sample_ids)) < len(facts.sample_ids):
        seen: set[str] = set()
        for sample_id in facts.sample_ids:
            if sample_id in seen:
                raise InvalidFieldError(
                    "sample_id", f"{sample_id!r} comes twice", sample_id=sample_id
                )
            seen.add(sample_id)
    return Batch(batch_id=batch_id, stored=tuple(stored), facts=facts, owners=planner.own(facts))


def find_facts(blobs: BlobStore, reference: BlobReference, limits: RowLimits) -> RowFacts:
    """The facts about the rows of a blob, as the ranks hold those.

    They are read, without the rows. A blob is read whole, and so checked, where they are absent
    (older versions wrote none), damaged, or of rows that the ranks cut or refuse.
    """
    with blob_errors(reference), suppress(InvalidGroupError):
        facts = read_facts(blobs.map(reference))
        if facts is not None and limits.keep(facts):
            return facts
    return describe_rows(read_rows(blobs, reference, limits))


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
