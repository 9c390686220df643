"""Takes in batches and columns, reads and drops them: in the store and on the ranks.

Inline rows are spooled to the blob store, of blobs only the facts are read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from services.trainer import metrics
from services.trainer.config import TrainerConfig
from services.trainer.controller.incarnation import Build, RankIncarnation
from services.trainer.controller.passes import ROWS_PER_COMMAND
from services.trainer.controller.planning import Planner, find_missing
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import Batch, StoredRows, TrainerState, Turns, in_turn
from services.trainer.errors import ColumnMissingError, disk_errors
from services.trainer.rows import RowLimits, blob_errors, check_numbers, check_row, read_rows
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError, NotFoundError, QueueFullError, ServiceError
from sluice.runtime.metrics import observe_all
from sluice.runtime.wire import blob_from_proto, blob_to_proto
from sluice.samples.arrow import InvalidGroupError, decode_group, encode_group, read_facts
from sluice.samples.blob_store import open_blobs
from sluice.samples.blobs import BlobNotFoundError, BlobReads, BlobReference, Blobs
from sluice.samples.sample import (
    KNOWN_COLUMNS,
    RowFacts,
    Sample,
    count_trained,
    describe_rows,
    find_column,
)

SPOOL_TOKENS = 1 << 20  # tokens of one spooled blob
SPOOL_ROWS = 4096  # rows of one spooled blob
BLOBS_PER_COMMAND = 2_000  # a blob's name takes about 50
READ_BY_CONTROLLER = ("loss_mask", "advantages")  # which reads the values of no blob


class Upload:
    """The rows of one batch on their way in, in order.

    `spool` and `finish` write to the store, so they are for a thread of their own: on a slow
    disk the controller would hear nobody meanwhile.
    """

    def __init__(self, blobs: Blobs, limits: RowLimits) -> None:
        self._blobs, self._limits = blobs, limits
        self._references: list[BlobReference] = []
        self._inline: list[Sample] = []
        self._inline_tokens = 0

    def add_sample(self, sample: Sample) -> None:
        """Take a row. Raises InvalidFieldError naming what is wrong with it."""
        check_row(sample)
        check_numbers(sample)
        self._limits.check([self._limits.admit(sample)])
        self._inline.append(sample)
        self._inline_tokens += len(sample.token_ids)

    @property
    def pending(self) -> bool:
        """Tell whether rows are in memory: call `spool` before `add_blob`."""
        return bool(self._inline)

    @property
    def full(self) -> bool:
        """Tell whether the rows in memory are enough for a blob: call `spool`."""
        return self._inline_tokens >= SPOOL_TOKENS or len(self._inline) >= SPOOL_ROWS

    def add_blob(self, reference: BlobReference) -> None:
        """Take the rows of a blob, behind those that came before."""
        assert not self._inline
        self._references.append(reference)

    def finish(self) -> list[BlobReference]:
        """Return the blobs that hold all rows, in order."""
        self.spool()
        return list(self._references)

    @disk_errors()
    def spool(self) -> None:
        """Write the rows that are in memory as one blob."""
        if self._inline:
            self._references.append(self._blobs.put(encode_group(self._inline)))
            self._inline, self._inline_tokens = [], 0


def read_batch(
    batch_id: str,
    references: list[BlobReference],
    blobs: Blobs,
    limits: RowLimits,
    planner: Planner,
    adapter: str = "",
) -> Batch:
    """Make a batch of the rows of these blobs, of which only the facts are read.

    Raises NotFoundError, DataLossError, OversizeSampleError or InvalidFieldError.
    """
    with blobs.reads() as reads:
        parts = [read_known_facts(reads, reference) for reference in references]
    known = [each for each in parts if each is not None]
    facts = RowFacts.join(known)
    if len(known) < len(parts) or not limits.keep(facts):
        known = [find_facts(blobs, reference, limits) for reference in references]
        facts = RowFacts.join(known)
    stored: list[StoredRows] = []
    row = 0
    for reference, part in zip(references, known, strict=True):
        count = len(part.lengths)
        for first in range(0, count, SPOOL_ROWS):
            rows = min(SPOOL_ROWS, count - first)
            stored.append(StoredRows(reference, row + first, rows, first))
        row += count
    if len(set(facts.sample_ids)) < len(facts.sample_ids):
        seen: set[str] = set()
        for sample_id in facts.sample_ids:
            if sample_id in seen:
                raise InvalidFieldError(
                    "sample_id", f"{sample_id!r} comes twice", sample_id=sample_id
                )
            seen.add(sample_id)
    return Batch(
        batch_id=batch_id,
        stored=tuple(stored),
        facts=facts,
        owners=planner.own(facts),
        adapter=adapter,
    )


def find_facts(blobs: Blobs, reference: BlobReference, limits: RowLimits) -> RowFacts:
    """Return the facts about the rows of a blob, as the ranks hold those.

    A blob is read whole, and so checked, where none are known or rows are cut or refused.
    """
    with blobs.reads() as reads:
        facts = read_known_facts(reads, reference)
    if facts is not None and limits.keep(facts):
        return facts
    return describe_rows(read_rows(blobs, reference, limits))


def read_known_facts(reads: BlobReads, reference: BlobReference) -> RowFacts | None:
    """Read what a blob says about its rows, without those.

    None where that is absent (older versions wrote none) or damaged. Raises NotFoundError.
    """
    try:
        return read_facts(reads.open(reference))
    except InvalidGroupError:
        return None
    except BlobNotFoundError as error:
        raise NotFoundError("blob", error.digest) from None


Columns = Mapping[str, np.ndarray | float]


@dataclass(frozen=True)
class ColumnRows:
    """Columns that lie in a blob from its row `first` on, and which rows of a batch they are of."""

    blob: BlobReference
    rows: Sequence[int]
    first: int = 0


class ReferencedColumns:
    """New columns of rows of a batch that lie in blobs, whoever put them.

    columns: which of the blobs' to take, with the names that they get.
    """

    def __init__(
        self, batch: Batch, references: Sequence[BlobReference], columns: Mapping[str, str]
    ) -> None:
        """Raises InvalidFieldError for names of columns that are not taken so."""
        self.batch, self.columns = batch, dict(columns)
        self._references = list(references)
        if not columns:
            raise InvalidFieldError("columns", "must say which to take of the blobs")
        check_names(list(columns))
        for name in columns.values():
            column = find_column(name)
            if column is None or not column.per_token or name in READ_BY_CONTROLLER:
                raise InvalidFieldError(
                    "columns", f"{name!r} is not taken by reference; put it as rows"
                )
        if len(set(columns.values())) < len(columns):
            raise InvalidFieldError("columns", "give two columns one name")

    def find(self, blobs: Blobs) -> list[ColumnRows]:
        """Read of the blobs which rows they hold.

        Raises NotFoundError, DataLossError and InvalidFieldError.
        """
        found: list[ColumnRows] = []
        seen: set[int] = set()
        for reference in self._references:
            with blobs.reads() as reads:
                facts = read_known_facts(reads, reference)
            if facts is None:
                with blob_errors(reference):
                    facts = describe_rows(decode_group(blobs.get(reference)))
            rows = [self._find_row(sample_id, seen) for sample_id in facts.sample_ids]
            for name in self.columns:
                has = facts.present.get(name, np.zeros(len(rows), dtype=np.bool_))
                if not has.all():
                    lacking = facts.sample_ids[int(np.argmin(has))]
                    raise ColumnMissingError([name], lacking, "PutColumns")
            parts = range(0, len(rows), SPOOL_ROWS)
            found += [ColumnRows(reference, rows[at : at + SPOOL_ROWS], at) for at in parts]
        self._rows = sorted(seen)
        return found

    def _find_row(self, sample_id: str, seen: set[int]) -> int:
        row = self.batch.rows.get(sample_id)
        if row is None:
            raise NotFoundError("sample", sample_id)
        if row in seen:
            raise InvalidFieldError(
                "blobs", f"name sample {sample_id!r} twice", sample_id=sample_id
            )
        seen.add(row)
        return row

    def apply(self) -> int:
        """Note in the batch what the ranks have now; returns the rows changed."""
        for name in self.columns.values():
            self.batch.mark(name, self._rows)
            self.batch.scored_at.pop(name, None)
        return len(self._rows)


class ColumnUpdate:
    """New columns of some rows of a batch."""

    columns: Mapping[str, str] = {}  # of the blobs all are taken, as they are called

    @property
    def empty(self) -> bool:
        return not self._samples

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

    @disk_errors()
    def spool(self, blobs: Blobs) -> list[ColumnRows]:
        """Put blobs and return them with the rows in each, tokens left out."""
        rows = sorted(self._samples)
        parts = [rows[start : start + SPOOL_ROWS] for start in range(0, len(rows), SPOOL_ROWS)]
        return [
            ColumnRows(blobs.put(encode_group([bare(self._samples[row]) for row in part])), part)
            for part in parts
        ]

    def apply(self) -> int:
        """Note in the batch what the ranks have now; returns the rows changed."""
        batch = self.batch
        for row, sample in self._samples.items():
            for name in sample.columns:
                batch.mark(name, [row])
                batch.scored_at.pop(name, None)  # whatever it was, it is the caller's now
            if "loss_mask" in sample.columns:
                batch.mask_counts[row] = count_trained(sample)
            if "temperature" in sample.columns:
                batch.temperatures[row] = sample.columns["temperature"]
            if "episode" in sample.columns:
                batch.episodes[row] = sample.columns["episode"]
            if "advantages" in sample.columns:
                batch.zero_advantage[row] = not np.any(sample.columns["advantages"])
        return len(self._samples)


def bare(sample: Sample) -> Sample:
    """Return the sample without its tokens, to send columns alone."""
    return Sample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        token_ids=np.empty(0, dtype=np.int32),
        prompt_length=0,
        columns=sample.columns,
    )


def set_columns(update: ColumnUpdate | ReferencedColumns, part: ColumnRows) -> Build:
    """Return the command that gives every rank the new columns of its rows."""
    batch, rows_N = update.batch, np.asarray(part.rows, dtype=np.int64)

    def build(data_rank: int) -> pb.FollowResponse:
        indices = np.flatnonzero(batch.owners[rows_N] == data_rank)
        owned = pb.BlobRows(
            blob=blob_to_proto(part.blob),
            indices=(indices + part.first).tolist(),
            rows=rows_N[indices].tolist(),
        )
        command = pb.SetColumns(batch_id=batch.batch_id, rows=owned, columns=update.columns)
        return pb.FollowResponse(set_columns=command)

    return build


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidFieldError for a column that does not exist."""
    for index, name in enumerate(names):
        if find_column(name) is None:
            raise InvalidFieldError(
                f"columns[{index}]", f"{name!r} is unknown; known: {KNOWN_COLUMNS}"
            )


def in_upload_order(batch: Batch, parts: Sequence[Sequence[Sample]]) -> Iterator[Sample]:
    """Yield rows that the ranks answered with, as the batch has them."""
    samples = {sample.sample_id: sample for part in parts for sample in part}
    for sample_id in batch.facts.sample_ids:
        yield samples[sample_id]


def add_rows(batch: Batch) -> list[Build]:
    """Return commands that give every rank its rows of `batch`."""
    starts: list[int] = []
    rows = blobs = 0
    for index, stored in enumerate(batch.stored):
        if not starts or rows + stored.count > ROWS_PER_COMMAND or blobs == BLOBS_PER_COMMAND:
            starts.append(index)
            rows = blobs = 0
        rows, blobs = rows + stored.count, blobs + 1
    ends = [*starts[1:], len(batch.stored)]
    return [_add_rows(batch, start, end) for start, end in zip(starts, ends, strict=True)]


def _add_rows(batch: Batch, start: int, end: int) -> Build:
    stored = batch.stored[start:end]
    blobs = [blob_to_proto(each.blob) for each in stored]
    firsts = np.array([each.first_row for each in stored])
    offsets = firsts - [each.first_index for each in stored]
    rows_N = np.arange(firsts[0], firsts[-1] + stored[-1].count)
    owners = batch.owners[rows_N]

    def build(data_rank: int) -> pb.FollowResponse:
        command = pb.AddRows(batch_id=batch.batch_id)
        owned = rows_N[owners == data_rank]
        places = np.searchsorted(firsts, owned, side="right") - 1
        rows, indices = owned.tolist(), (owned - offsets[places]).tolist()
        bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(rows)]
        for first, last in itertools.pairwise(bounds if rows else ()):
            command.blobs.add(
                blob=blobs[places[first]], indices=indices[first:last], rows=rows[first:last]
            )
        return pb.FollowResponse(add_rows=command)

    return build


class TrainerBatches:
    """The batches of a trainer. Methods raise the errors that clients see."""

    def __init__(
        self,
        config: TrainerConfig,
        state: TrainerState,
        ranks: RankGroup,
        planner: Planner,
        turns: Turns,
    ) -> None:
        self.blobs = open_blobs(config.store, config.store_cache, sync=config.durable)
        self.limits = RowLimits.from_config(config)
        self.turns = turns
        self._owner, self._max_batches = config.name, config.max_batches
        self._state, self._ranks, self._planner = state, ranks, planner

    def unpin_all(self) -> None:
        """Let go of the blobs that an earlier process of this trainer pinned."""
        self.blobs.unpin(self._owner)

    def begin_upload(self) -> Upload:
        """Return where rows gather before they are a batch. Raises while there are no ranks."""
        assert self._ranks.incarnation  # before, the context ranks that share a row are not known
        return Upload(self.blobs, self.limits)

    @in_turn
    async def upload(
        self, batch_id: str, references: list[BlobReference], count: int, adapter: str = ""
    ) -> Batch:
        """Register the rows of blobs that exist already, for an adapter or the policy."""
        ranks, batches = self._ranks.incarnation, self._state.batches
        policy = self._state.policy(adapter)
        batches.check_new(batch_id)
        limit = self._max_batches
        if len(batches.all()) >= limit:
            raise QueueFullError(
                f"{limit} batches are held: delete one", limit=limit, kind="batches"
            )
        await self._pin(references)
        try:
            batch = await asyncio.to_thread(
                read_batch, batch_id, references, self.blobs, self.limits, self._planner, adapter
            )
            if batch.row_count != count:
                raise InvalidFieldError(
                    "header.sample_count", f"is {count}, {batch.row_count} samples came"
                )
            await self.register(ranks, batch)
        except BaseException:
            await self._unpin({blob.digest for blob in references} - batches.digests())
            raise
        batches.add(batch)
        metrics.BATCHES.set(len(batches.all()))
        if policy.weights is not None and not adapter:  # numbers of others come between
            sampled = batch.facts.oldest_versions
            lags = policy.weights.version - sampled[sampled >= 0]
            observe_all(metrics.SAMPLE_LAG, lags.clip(min=0).tolist())
        return batch

    @in_turn
    async def delete(self, name: str) -> None:
        """Forget a batch and let go of its blobs."""
        batch = self._state.batches.get(name)
        await self._drop(self._ranks.incarnation, batch)
        await self._forget(batch)

    async def drop_all(self, ranks: RankIncarnation, adapter: str = "") -> None:
        """Forget all batches that are for an adapter, or for the policy of the settings."""
        batches = self._state.batches
        for batch in batches.of(adapter):
            await self._drop(ranks, batch)
        await self._unpin(batches.clear(adapter))
        metrics.BATCHES.set(len(batches.all()))

    async def register(self, ranks: RankIncarnation, batch: Batch) -> None:
        """Give the ranks their rows.

        What some have is dropped again if others fail: a later batch of that id would have it
        among its rows.
        """
        try:
            for build in add_rows(batch):
                await ranks.run(build)
        except ServiceError:
            with suppress(ServiceError):  # ranks that are lost hold nothing
                await self._drop(ranks, batch)
            raise

    async def _drop(self, ranks: RankIncarnation, batch: Batch) -> None:
        await ranks.run(pb.FollowResponse(drop_batch=pb.DropBatch(batch_id=batch.batch_id)))

    async def _forget(self, batch: Batch) -> None:
        unnamed = self._state.batches.remove(batch)
        metrics.BATCHES.set(len(self._state.batches.all()))
        await self._unpin(unnamed)

    @in_turn
    async def put_columns(
        self, update: ColumnUpdate | ReferencedColumns, stored: Sequence[ColumnRows]
    ) -> int:
        """Give the ranks columns that lie in the store; returns the rows changed."""
        if self._state.batches.get(update.batch.name) is not update.batch:
            raise NotFoundError("batch", update.batch.name)  # deleted meanwhile
        ranks = self._ranks.incarnation
        try:
            for part in stored:
                await ranks.run(set_columns(update, part))
        except ServiceError:
            await self._reset(ranks, update.batch)
            raise
        return update.apply()

    async def _reset(self, ranks: RankIncarnation, batch: Batch) -> None:
        """Go back to the columns of the upload; a batch that cannot is dropped.

        Some ranks have taken others, which the controller does not know of, such as a mask that
        its divisors leave out.
        """
        if ranks.lost.done():
            return  # the next ranks get what was uploaded
        batch.forget_derived()
        try:
            await self._drop(ranks, batch)
            await self.register(ranks, batch)
        except ServiceError:
            if not ranks.lost.done():
                await self._forget(batch)

    @in_turn
    async def get_columns(
        self, name: str, columns: Sequence[str], sample_ids: Sequence[str] = ()
    ) -> Iterator[Sample]:
        """Return rows in the order of the upload, with the named columns that they have.

        sample_ids: those to return; empty is all.
        """
        check_names(columns)
        batch = self._state.batches.get(name)
        batch.select(sample_ids)  # or it is refused
        wanted = set(sample_ids)
        blobs = await self._spool_columns(batch, columns)
        parts = [await asyncio.to_thread(self._read_columns, blob) for blob in blobs]
        rows = in_upload_order(batch, parts)
        return (row for row in rows if row.sample_id in wanted) if wanted else rows

    @in_turn
    async def refer_columns(self, name: str, columns: Sequence[str]) -> list[BlobReference]:
        """Return blobs that hold the named columns of all rows. Raises ColumnMissingError."""
        check_names(columns)
        batch = self._state.batches.get(name)
        missing = find_missing(batch, np.arange(batch.row_count), columns)
        if missing is not None:
            row, lacking = missing
            raise ColumnMissingError(lacking, batch.facts.sample_ids[row], "GetColumns")
        return await self._spool_columns(batch, columns)

    async def _spool_columns(self, batch: Batch, columns: Sequence[str]) -> list[BlobReference]:
        """Have each rank put its rows with these columns into the store."""
        ranks = self._ranks.incarnation
        command = pb.ReadColumns(batch_id=batch.batch_id, columns=columns)
        results = await ranks.run(pb.FollowResponse(read_columns=command))
        return [blob_from_proto(result.columns) for result in ranks.reporting(results)]

    def _read_columns(self, blob: BlobReference) -> list[Sample]:
        with blob_errors(blob):
            return decode_group(self.blobs.get(blob))

    async def _pin(self, references: list[BlobReference]) -> None:
        digests = [reference.digest for reference in references]
        try:
            await asyncio.to_thread(self.blobs.pin, self._owner, digests)
        except BlobNotFoundError as error:
            raise NotFoundError("blob", error.digest) from None

    async def _unpin(self, digests: set[str]) -> None:
        if digests:
            await asyncio.to_thread(self.blobs.unpin, self._owner, sorted(digests))
