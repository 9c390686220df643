"""Batches of a trainer: facts about rows, never the rows themselves."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sluice.runtime.errors import AlreadyExistsError, InvalidFieldError, NotFoundError
from sluice.samples.blobs import BlobReference
from sluice.samples.facts import RowFacts

PREFIX = "batches/"


@dataclass(frozen=True)
class StoredRows:
    """Rows of a blob, from index `first_index` on, which are in the upload order from
    `first_row` on."""

    blob: BlobReference
    first_row: int
    count: int
    first_index: int = 0


@dataclass(frozen=True)
class PassPlan:
    """Rows (upload order of the batch) by data-parallel rank and micro-batch."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def micro_batch_count(self) -> int:
        return len(self.ranks[0])


@dataclass(kw_only=True)
class Batch:
    """A batch and what the passes have made of it.

    facts: as uploaded. owners: data-parallel rank of each row, int64[N]. present and
    mask_counts follow the columns as they are now; `zero_advantage` marks the rows whose advantages
    are all 0.
    """

    batch_id: str
    stored: tuple[StoredRows, ...]
    facts: RowFacts
    owners: np.ndarray
    present: dict[str, np.ndarray] = field(init=False)
    mask_counts: np.ndarray = field(init=False)
    zero_advantage: np.ndarray = field(init=False)
    rows: dict[str, int] = field(init=False)
    last_plan: tuple[Hashable, PassPlan] | None = None  # and what it was made for

    def __post_init__(self) -> None:
        self.rows = {sample: row for row, sample in enumerate(self.facts.sample_ids)}
        self.forget_derived()

    def forget_derived(self) -> None:
        """Back to the columns that were uploaded."""
        self.present = {name: rows.copy() for name, rows in self.facts.present.items()}
        self.mask_counts = self.facts.mask_counts.copy()
        self.zero_advantage = np.zeros(self.row_count, dtype=np.bool_)

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
        """Find rows by id, ascending; all for no id. Raises for unknown and repeated ids."""
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
    """Return the id in `batches/<id>`."""
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
