"""Count, mean and squared deviations of numbers, in a form that ranks can merge exactly enough.

Two passes inside a part and Chan's formula between parts (Chan, Golub, LeVeque 1983): no
E[x^2] - E[x]^2, which cancels when the mean is large beside the spread. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Moments:
    """`m2` is the sum of squared deviations from `mean`. The empty one is all zeros."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of_values(cls, values: Iterable[float]) -> Moments:
        """Sums with exact rounding, so the order of the values does not matter at all."""
        numbers = list(values)
        if not numbers:
            return cls()
        mean = math.fsum(numbers) / len(numbers)
        mean = min(max(mean, min(numbers)), max(numbers))  # equal values deviate by exactly 0
        return cls(float(len(numbers)), mean, math.fsum((x - mean) ** 2 for x in numbers))

    @classmethod
    def of_tensor(cls, values_T: torch.Tensor) -> Moments:
        if values_T.numel() == 0:
            return cls()
        exact_T = values_T.double()
        mean = exact_T.mean()
        return cls(float(values_T.numel()), mean.item(), (exact_T - mean).square().sum().item())

    def merge(self, other: Moments) -> Moments:
        """Returns the moments of both parts together; associative up to rounding."""
        count = self.count + other.count
        if count == 0:
            return Moments()
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * other.count / count,
            self.m2 + (other.m2 + delta * delta * self.count * other.count / count),
        )

    @property
    def standard_deviation(self) -> float:
        """Of the population the values were drawn from (n - 1); 0 for fewer than two values."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0
