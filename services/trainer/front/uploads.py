"""Takes in rows: inline ones are spooled to the blob store, blobs are read for their facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.trainer.front.batches import Batch, RowLimits, StoredRows, check_sample, describe_rows
from services.trainer.front.planning import Planner
from sluice.runtime.errors import DataLossError, InvalidFieldError, NotFoundError
from sluice.samples.arrow import InvalidGroupError, decode_group, encode_group
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobReference, BlobStore
from sluice.samples.sample import Sample

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
