"""The learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.trainer.config import OptimConfig
from services.trainer.controller.batches import BatchRegistry
from services.trainer.errors import (
    AggregationMismatchError,
    GradientsIncompleteError,
    NoGradientsError,
    PartReusedError,
    PartsMismatchError,
)


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
        return sum(part.normalizer for part in self.parts.values())

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


@dataclass(frozen=True)
class PublishedWeights:
    """A version of the store that this trainer published or that its checkpoint names."""

    version: int
    digest: str


@dataclass(eq=False)
class TrainerState:
    """Everything that a checkpoint or a restart of the ranks changes.

    weights: the latest published version that the parameters descend from. checkpoint: the
    name of the one that ranks restart from.
    """

    step: int = 0
    skipped_count: int = 0
    skips_in_a_row: int = 0
    last_skip: str = ""
    weights: PublishedWeights | None = None
    checkpoint: str = ""
    batches: BatchRegistry = field(default_factory=BatchRegistry)
    ledger: GradientLedger[PassScalars] = field(default_factory=GradientLedger)
