"""Per-token estimates of KL(policy || reference) from the log-probs of the sampled tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from sluice.algo.plugins import Plugin, build, find

if TYPE_CHECKING:
    import torch

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: larger ratios carry no information, only overflow
LOW_VARIANCE_LIMIT = 10.0
SERIES_LIMIT = 0.25  # below it seven terms of the series are exact to float32, expm1(x) - x is not


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns exp of the argument clamped to +-20; the gradient is zero beyond."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def exp_remainder(x: torch.Tensor) -> torch.Tensor:
    """Returns exp(x) - 1 - x, never negative; above x = 20 its tangent there.

    Exact to a few units in the last place at every size: near 0, where the terms cancel, it is
    x^2 / 2 (1 + x / 3 (1 + x / 4 (...))). The tangent keeps it finite, and its gradient rising
    with x: a clamped exponential would leave the gradient of -x alone, which points the other way.
    """
    near = x.clamp(-SERIES_LIMIT, SERIES_LIMIT)
    series = near.new_ones(near.shape)
    for term in range(14, 2, -1):  # enough for float64
        series = 1 + near / term * series
    series = 0.5 * near.square() * series
    bounded = x.clamp(max=LOG_RATIO_LIMIT)
    slope = math.expm1(LOG_RATIO_LIMIT)
    tangent = slope - LOG_RATIO_LIMIT + slope * (x - LOG_RATIO_LIMIT)
    beyond = tangent.where(x > LOG_RATIO_LIMIT, bounded.expm1() - bounded)
    return series.where(x.abs() < SERIES_LIMIT, beyond)


class KlForm(Plugin, ABC):
    """An estimate of KL(policy || reference) a token.

    unbiased: of the KL's value, and so with its gradient once weighed by current / old
    (LossSpec.kl_unbiased). has_gradient: its expected gradient in a loss is not 0 without.
    """

    unbiased: ClassVar[bool] = True
    has_gradient: ClassVar[bool] = True

    @abstractmethod
    def estimate(self, difference_T: torch.Tensor) -> torch.Tensor:
        """Returns nats a token, float[T], of d = log-prob of the policy - of the reference.

        As a loss it is differentiated by d.
        """


class K1(KlForm):
    """d: unbiased; as a loss, its expected gradient is 0."""

    has_gradient = False

    def estimate(self, difference_T: torch.Tensor) -> torch.Tensor:
        return difference_T


class K2(KlForm):
    """d^2 / 2: biased, with (on policy) the gradient of the KL."""

    unbiased = False

    def estimate(self, difference_T: torch.Tensor) -> torch.Tensor:
        return 0.5 * difference_T.square()


class K3(KlForm):
    """exp(-d) - 1 + d: unbiased, never negative; below d = -20 its tangent there."""

    def estimate(self, difference_T: torch.Tensor) -> torch.Tensor:
        return exp_remainder(-difference_T)


class LowVariance(KlForm):
    """k3 up to 10, without a gradient beyond."""

    unbiased = False

    def estimate(self, difference_T: torch.Tensor) -> torch.Tensor:
        return exp_remainder(-difference_T).clamp(max=LOW_VARIANCE_LIMIT)


def estimate_kl(
    logprobs_T: torch.Tensor, reference_T: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Estimates the KL of each token of the policy, in nats, by a form without settings.

    Forms: http://joschu.net/blog/kl-approx.html. A NaN stays one. Raises ValueError.
    """
    form: KlForm = build(find("kl", estimator), {}, f"kl {estimator}")
    return form.estimate(logprobs_T - reference_T)
