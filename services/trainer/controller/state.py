"""What calls change in a trainer: its batches, gradients gathered and steps, one call at a time.

Batches are facts about rows, never the rows themselves.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np

from services.trainer import metrics
from services.trainer.config import LoraConfig, OptimConfig
from services.trainer.errors import (
    AdapterMismatchError,
    AggregationMismatchError,
    GradientsIncompleteError,
    NoGradientsError,
    PartReusedError,
    PartsMismatchError,
    TrainerAsleepError,
    disk_errors,
)
from sluice.runtime.errors import (
    AlreadyExistsError,
    InvalidFieldError,
    NotFoundError,
    QueueFullError,
)
from sluice.runtime.waits import Waits
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import RowFacts

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

    facts: as uploaded. owners: data-parallel rank of each row, int64[N]. present, mask_counts,
    temperatures and episodes follow the columns as they are now; `zero_advantage` marks the rows
    whose advantages are all 0. scored_at: temperatures of columns that passes over the batch
    computed. adapter: the one that it is for; empty is the policy of the settings. begun_at: the
    optimizer step at which it was first trained on.
    """

    batch_id: str
    stored: tuple[StoredRows, ...]
    facts: RowFacts
    owners: np.ndarray
    present: dict[str, np.ndarray] = field(init=False)
    mask_counts: np.ndarray = field(init=False)
    temperatures: np.ndarray = field(init=False)
    episodes: np.ndarray = field(init=False)
    scored_at: dict[str, float] = field(init=False)
    zero_advantage: np.ndarray = field(init=False)
    rows: dict[str, int] = field(init=False)
    begun_at: int | None = field(init=False)
    last_plan: tuple[Hashable, PassPlan] | None = None  # and what it was made for
    adapter: str = ""

    def __post_init__(self) -> None:
        self.rows = {sample: row for row, sample in enumerate(self.facts.sample_ids)}
        self.forget_derived()

    def forget_derived(self) -> None:
        """Back to the columns that were uploaded."""
        self.present = {name: rows.copy() for name, rows in self.facts.present.items()}
        self.mask_counts = self.facts.mask_counts.copy()
        self.temperatures = self.facts.temperatures.copy()
        self.episodes = self.facts.episodes.copy()
        self.scored_at = {}
        self.begun_at = None
        self.zero_advantage = np.zeros(self.row_count, dtype=np.bool_)

    @property
    def name(self) -> str:
        return PREFIX + self.batch_id

    @property
    def row_count(self) -> int:
        return len(self.facts.lengths)

    def episode_keys(self) -> list[tuple[str, float]]:
        """Return what names the episode of each row: one without is an episode of its own."""
        has = self.present.get("episode", np.zeros(self.row_count, dtype=np.bool_))
        own = np.where(has, self.episodes, np.arange(self.row_count))
        return [
            (group, number) if shared else (f"{group}/alone", number)
            for group, number, shared in zip(self.facts.group_ids, own.tolist(), has, strict=True)
        ]

    def mark(
        self, column: str, rows: Sequence[int] | np.ndarray | None = None, *, present: bool = True
    ) -> None:
        """Note that `rows` (default: all) have `column` now, or have it no more."""
        found = self.present.setdefault(column, np.zeros(self.row_count, dtype=np.bool_))
        found[slice(None) if rows is None else np.asarray(rows, dtype=np.int64)] = present

    def has_others(self, column: str, rows: np.ndarray) -> bool:
        """Tell whether a row that is none of `rows` has `column`."""
        present = self.present.get(column)
        return present is not None and bool(np.delete(present, rows).any())

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

    def clear(self, adapter: str) -> set[str]:
        """Forget all that are for an adapter; returns the digests that no other batch names."""
        named = self.digests()
        for batch in self.of(adapter):
            del self._batches[batch.batch_id]
        return named - self.digests()

    def of(self, adapter: str) -> list[Batch]:
        return [batch for batch in self._batches.values() if batch.adapter == adapter]

    def digests(self) -> set[str]:
        return {rows.blob.digest for batch in self._batches.values() for rows in batch.stored}

    def all(self) -> list[Batch]:
        return list(self._batches.values())


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Rate of the optimizer step taken when `step` steps are done."""
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.learning_rate
    span = optim.decay_steps - optim.warmup_steps
    progress = min(1.0, (step - optim.warmup_steps) / span)
    left = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.learning_rate * (optim.minimum_ratio + (1 - optim.minimum_ratio) * left)


T = TypeVar("T")
Aggregation = tuple[str, float | None]


@dataclass(frozen=True)
class PassRecord(Generic[T]):
    """One pass: the digest of its request, what was answered and what it adds to the divisor."""

    body: str
    answer: T
    aggregation: Aggregation
    normalizer: float


@dataclass(eq=False)
class GradientLedger(Generic[T]):
    """Parts gathered since the last step. `broken` says why nobody knows what is gathered."""

    parts: dict[str, PassRecord[T]] = field(default_factory=dict)
    broken: str = ""

    def find(self, part_id: str, body: str) -> T | None:
        """Return the answer that this part was given before, None for a new part.

        Raises GradientsIncompleteError, and PartReusedError for another body.
        """
        self.check_complete()
        part = self.parts.get(part_id)
        if part is None:
            return None
        if part.body != body:
            raise PartReusedError(
                f"part {part_id!r} was added with another request", part_id=part_id
            )
        return part.answer

    def check_complete(self) -> None:
        if self.broken:
            raise GradientsIncompleteError(
                f"a pass failed midway ({self.broken}): call DiscardGradients", cause=self.broken
            )

    def check_aggregation(self, aggregation: Aggregation) -> None:
        """Raise AggregationMismatchError unless a part so averaged can be added."""
        for part_id, part in self.parts.items():
            if part.aggregation != aggregation:
                raise AggregationMismatchError(
                    f"part {part_id!r} is averaged by {part.aggregation}, this one by "
                    f"{aggregation}: the parts of a step have one aggregation",
                    part_id=part_id,
                )

    def check_expected(self, part_ids: Sequence[str]) -> None:
        """Raise unless exactly the parts named were gathered."""
        self.check_complete()
        if not self.parts:
            raise NoGradientsError("no gradients were gathered since the last step")
        if sorted(part_ids) != sorted(self.parts):
            raise PartsMismatchError(sorted(part_ids), sorted(self.parts))

    @property
    def normalizer(self) -> float:
        parts = self.parts.values()
        if any(part.aggregation[0] == "sum" for part in parts):
            return max(part.normalizer for part in parts)
        return sum(part.normalizer for part in parts)

    def clear(self) -> list[str]:
        """Forget all parts; returns their ids."""
        forgotten = list(self.parts)
        self.parts.clear()
        self.broken = ""
        return forgotten


@dataclass(frozen=True)
class PassScalars:
    """What a pass over rows came to, over all ranks."""

    loss: float
    token_count: int
    metrics: dict[str, float]
    micro_batch_count: int
    silent_row_count: int = 0
    metric_weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedWeights:
    """A version of the store that this trainer published or that its checkpoint names."""

    version: int
    digest: str


@dataclass(frozen=True)
class SleepReport:
    """Bytes that left the devices of all ranks, and by how many less they hold of them since."""

    state_bytes: int = 0
    freed_bytes: int = 0


@dataclass(frozen=True)
class Undone:
    """Steps up to `step` are undone, for ranks were lost and came back at an earlier one."""

    step: int
    cause: str


@dataclass(eq=False)
class PolicyState:
    """What is one policy's own: its steps, gradients, versions and checkpoints.

    weights: the latest published version that the parameters descend from. checkpoint: the
    name of the one that ranks restart from. undone: until one is loaded. adapter, settings, seed:
    of an adapter that a call began.
    """

    adapter: str = ""
    settings: LoraConfig | None = None
    seed: int | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    step: int = 0
    skipped_count: int = 0
    skips_in_a_row: int = 0
    last_skip: str = ""
    weights: PublishedWeights | None = None
    checkpoint: str = ""
    undone: Undone | None = None
    ledger: GradientLedger[PassScalars] = field(default_factory=GradientLedger)


@dataclass(eq=False)
class TrainerState(PolicyState):
    """Everything that a checkpoint or a restart of the ranks changes: of the policy of the
    settings, and of the adapters beside it by name.

    asleep: what became free, while the ranks sleep.
    """

    asleep: SleepReport | None = None
    batches: BatchRegistry = field(default_factory=BatchRegistry)
    adapters: dict[str, PolicyState] = field(default_factory=dict)

    def policy(self, adapter: str) -> PolicyState:
        """Find a policy; that of the settings has no name. Raises NotFoundError."""
        if not adapter:
            return self
        if adapter not in self.adapters:
            raise NotFoundError("adapter", adapter if len(adapter) <= 64 else f"{adapter[:64]}...")
        return self.adapters[adapter]

    @property
    def policies(self) -> Sequence[PolicyState]:
        """All, that of the settings first."""
        return [self, *self.adapters.values()]

    def batch(self, name: str, adapter: str) -> Batch:
        """Find a batch for the policy that is named. Raises NotFoundError, AdapterMismatchError."""
        self.policy(adapter)
        batch = self.batches.get(name)
        if batch.adapter != adapter:
            raise AdapterMismatchError(name, batch.adapter, adapter)
        return batch

    def check_awake(self) -> None:
        """Raise TrainerAsleepError while the model is not on the device."""
        if self.asleep is not None:
            raise TrainerAsleepError("the trainer sleeps; wake it first")


P = ParamSpec("P")


class Turns:
    """Runs calls one at a time, each that has begun to its end even if its caller goes away."""

    def __init__(self, limit: int, waits: Waits) -> None:
        self._limit, self._waits = limit, waits
        self._lock = asyncio.Lock()
        self._holder = ""
        self._calls: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Run `call` when it is its turn, and `ready` has returned in that turn.

        A caller that goes away before gives the turn up. Raises QueueFullError when too many wait
        for theirs.
        """
        if len(self._calls) >= self._limit:
            raise QueueFullError(
                f"{self._limit} calls wait for their turn", limit=self._limit, kind="calls"
            )
        has_begun = asyncio.Event()

        async def begin() -> T:
            if ready is not None:
                await ready()
            has_begun.set()
            return await call()

        task = asyncio.ensure_future(self.wait_and_run(what, begin))
        self._calls.add(task)
        metrics.WAITING_CALLS.set(len(self._calls))
        task.add_done_callback(self._end)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not has_begun.is_set():
                task.cancel()
            raise

    async def wait_and_run(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call` when it is its turn, however many wait."""
        with self._waits.waiting(f"turn of {what}", on=lambda: [self._holder]):
            await self._lock.acquire()
        self._holder = what
        try:
            with disk_errors():
                return await call()
        finally:
            self._lock.release()

    async def close(self) -> None:
        """Cancel the calls that run or wait, and wait for their end."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        metrics.WAITING_CALLS.set(len(self._calls))


class TakesTurns(Protocol):
    """An owner of methods that are `in_turn`."""

    turns: Turns


S = TypeVar("S", bound=TakesTurns)


def in_turn(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], Awaitable[T]]:
    """Run a method as one of its owner's turns, named by the method."""
    what = method.__name__.replace("_", " ")

    @functools.wraps(method)
    async def run(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.turns.run(what, lambda: method(self, *args, **kwargs))

    return run
