"""Batches as the front knows them: facts about rows, never the rows themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.trainer.errors import OversizeSampleError, cut_sample
from sluice.balance.planner_inputs import OversizePolicy
from sluice.runtime.errors import AlreadyExistsError, InvalidFieldError, NotFoundError
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import ColumnLengthError, InvalidSampleError, Sample, validate_sample

PREFIX = "batches/"


@dataclass(frozen=True)
class StoredRows:
    """Rows of a blob, from index `first_index` on, which are in the upload order from
    `first_row` on."""

    blob: BlobReference
    first_row: int
    count: int
    first_index: int = 0


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What plans, weights and checks need of every row, in upload order.

    lengths, prompt_lengths, mask_counts (trained tokens), prompts (index of the distinct
    prompt, one group's siblings share it), oldest_versions (of the weights that sampled; -1
    unknown): int64[N]. present: bool[N] by column name.
    """

    sample_ids: Sequence[str]
    group_ids: Sequence[str]
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    prompts: np.ndarray
    mask_counts: np.ndarray
    oldest_versions: np.ndarray
    present: dict[str, np.ndarray]


@dataclass(kw_only=True)
class Batch:
    """A batch and what the passes have made of it.

    facts: as uploaded. owners: data-parallel rank of each row, int64[N]. present and
    mask_counts follow the columns as they are now; `silent` tells the rows whose advantages
    are all 0.
    """

    batch_id: str
    stored: tuple[StoredRows, ...]
    facts: RowFacts
    owners: np.ndarray
    present: dict[str, np.ndarray] = field(init=False)
    mask_counts: np.ndarray = field(init=False)
    silent: np.ndarray = field(init=False)
    rows: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {sample: row for row, sample in enumerate(self.facts.sample_ids)}
        self.forget_derived()

    def forget_derived(self) -> None:
        """Back to the columns that were uploaded."""
        self.present = {name: rows.copy() for name, rows in self.facts.present.items()}
        self.mask_counts = self.facts.mask_counts.copy()
        self.silent = np.zeros(self.row_count, dtype=np.bool_)

    @property
    def name(self) -> str:
        return PREFIX + self.batch_id

    @property
    def row_count(self) -> int:
        return len(self.facts.lengths)

    def mark(self, column: str, rows: Sequence[int] | np.ndarray | None = None) -> None:
        """Note that `rows` (default: all) have `column` now."""
        held = self.present.setdefault(column, np.zeros(self.row_count, dtype=np.bool_))
        held[slice(None) if rows is None else np.asarray(rows, dtype=np.int64)] = True

    def unmark(self, *columns: str) -> None:
        """No row counts as having them: a pass about to write them may end with a part of it."""
        for column in columns:
            self.present.pop(column, None)

    def select(self, sample_ids: Sequence[str]) -> np.ndarray:
        """Rows by id, ascending; all of them for no id. Raises for unknown and repeated ids."""
        if not sample_ids:
            return np.arange(self.row_count)
        for sample_id in sample_ids:
            if sample_id not in self.rows:
                raise NotFoundError("sample", sample_id)
        rows = np.unique([self.rows[sample_id] for sample_id in sample_ids])
        if len(rows) != len(sample_ids):
            raise InvalidFieldError("sample_ids", "names a sample twice")
        return rows


def parse_batch_name(name: str) -> str:
    """The id in `batches/<id>`."""
    if not name.startswith(PREFIX) or name == PREFIX:
        raise InvalidFieldError("batch", f"{name!r} is not of the form {PREFIX}<id>")
    return name.removeprefix(PREFIX)


class BatchRegistry:
    """The live batches of a trainer, by id."""

    def __init__(self) -> None:
        self._batches: dict[str, Batch] = {}

    def get(self, name: str) -> Batch:
        batch = self._batches.get(parse_batch_name(name))
        if batch is None:
            raise NotFoundError("batch", name)
        return batch

    def check_new(self, batch_id: str) -> None:
        if batch_id in self._batches:
            raise AlreadyExistsError("batch", PREFIX + batch_id)

    def add(self, batch: Batch) -> None:
        self.check_new(batch.batch_id)
        self._batches[batch.batch_id] = batch

    def remove(self, batch: Batch) -> set[str]:
        """Forget a batch; returns the digests that no other batch names."""
        del self._batches[batch.batch_id]
        return {rows.blob.digest for rows in batch.stored} - self.digests()

    def clear(self) -> set[str]:
        """Forget all; returns the digests they named."""
        named = self.digests()
        self._batches.clear()
        return named

    def digests(self) -> set[str]:
        return {rows.blob.digest for batch in self._batches.values() for rows in batch.stored}

    def all(self) -> list[Batch]:
        return list(self._batches.values())


@dataclass(frozen=True)
class RowLimits:
    """What rows must keep to be trained on by this model and these ranks.

    max_tokens: of a row, unless the policy runs longer ones alone.
    """

    vocabulary_size: int
    max_tokens: int
    oversize: OversizePolicy = OversizePolicy.ERROR


def describe_rows(samples: Sequence[Sample], limits: RowLimits) -> RowFacts:
    """Check every sample and gather the facts, of cut samples as they are cut.

    Raises OversizeSampleError, and InvalidFieldError naming the sample, and the column where
    one is wrong.
    """
    for sample in samples:
        check_row(sample)
    samples = [admit(sample, row, limits) for row, sample in enumerate(samples)]
    seen: set[str] = set()
    prompts: dict[tuple[str, bytes], int] = {}
    prompt_of = np.empty(len(samples), dtype=np.int64)
    present: dict[str, np.ndarray] = {}
    for row, sample in enumerate(samples):
        if sample.sample_id in seen:
            raise InvalidFieldError(
                "sample_id", f"{sample.sample_id!r} comes twice", sample_id=sample.sample_id
            )
        seen.add(sample.sample_id)
        key = (sample.group_id, sample.token_ids[: sample.prompt_length].tobytes())
        prompt_of[row] = prompts.setdefault(key, len(prompts))
        for name in sample.columns:
            if name not in present:
                present[name] = np.zeros(len(samples), dtype=np.bool_)
            present[name][row] = True
    check_tokens(samples, limits)
    return RowFacts(
        sample_ids=[sample.sample_id for sample in samples],
        group_ids=[sample.group_id for sample in samples],
        lengths=np.array([len(sample.token_ids) for sample in samples], dtype=np.int64),
        prompt_lengths=np.array([sample.prompt_length for sample in samples], dtype=np.int64),
        prompts=prompt_of,
        mask_counts=np.array([count_trained(sample) for sample in samples], dtype=np.int64),
        oldest_versions=np.array([_oldest(sample) for sample in samples], dtype=np.int64),
        present=present,
    )


def _oldest(sample: Sample) -> int:
    return min((span.version for span in sample.spans), default=-1)


def count_trained(sample: Sample) -> int:
    """Response tokens that the loss mask leaves in; all without a mask."""
    mask = sample.columns.get("loss_mask")
    return sample.response_length if mask is None else int(np.count_nonzero(mask))


def check_row(sample: Sample) -> None:
    """Raise InvalidFieldError naming what of a sample does not fit together."""
    try:
        validate_sample(sample)
    except ColumnLengthError as error:
        raise InvalidFieldError(
            f"columns[{error.name}]", str(error), sample_id=error.sample_id, column=error.name
        ) from None
    except InvalidSampleError as error:
        raise InvalidFieldError(error.field, str(error), sample_id=error.sample_id) from None


def check_sample(sample: Sample, limits: RowLimits) -> None:
    """Raise for a sample that no rank can take."""
    check_row(sample)
    check_tokens([admit(sample, 0, limits)], limits)


def admit(sample: Sample, row: int, limits: RowLimits) -> Sample:
    """The sample as the ranks hold it. Raises OversizeSampleError."""
    length, cap = len(sample.token_ids), limits.max_tokens
    if length <= cap or limits.oversize is OversizePolicy.ALONE:
        return sample
    if limits.oversize is OversizePolicy.ERROR or sample.prompt_length >= cap:
        raise OversizeSampleError(sample.sample_id, row, length, cap)
    return cut_sample(sample, cap)


def check_tokens(samples: Sequence[Sample], limits: RowLimits) -> None:
    """Raise InvalidFieldError for the first sample that is not of this vocabulary."""
    if not samples:
        return
    lengths = np.array([len(sample.token_ids) for sample in samples])
    tokens = np.concatenate([sample.token_ids for sample in samples])
    foreign = (tokens < 0) | (tokens >= limits.vocabulary_size)
    if foreign.any():
        place = np.searchsorted(lengths.cumsum(), int(np.argmax(foreign)), side="right")
        sample = samples[int(place)]
        raise InvalidFieldError(
            "token_ids",
            f"of sample {sample.sample_id!r} are not all within 0..{limits.vocabulary_size - 1}",
            sample_id=sample.sample_id,
        )
