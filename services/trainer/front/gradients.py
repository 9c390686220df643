"""What is in the gradients: named parts, each added once, under one aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.trainer.errors import (
    AggregationMismatchError,
    GradientsIncompleteError,
    NoGradientsError,
    PartReusedError,
    PartsMismatchError,
)

T = TypeVar("T")
Aggregation = tuple[str, float | None]


@dataclass(frozen=True)
class Part(Generic[T]):
    """One pass: the digest of its request, what was answered and what it adds to the divisor."""

    body: str
    answer: T
    aggregation: Aggregation
    normalizer: float


@dataclass(eq=False)
class GradientLedger(Generic[T]):
    """Parts gathered since the last step. `broken` says why nobody knows what is gathered."""

    parts: dict[str, Part[T]] = field(default_factory=dict)
    broken: str = ""

    def find(self, part_id: str, body: str) -> T | None:
        """The answer that this part was given before, None for a new part.

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
