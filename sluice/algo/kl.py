"""Per-token estimates of KL(policy || reference) from the log-probs of the sampled tokens."""

from __future__ import annotations

import math

import torch

from sluice.algo.spec import KlEstimator

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
    series = torch.ones_like(near)
    for term in range(14, 2, -1):  # enough for float64
        series = 1 + near / term * series
    series = 0.5 * near.square() * series
    bounded = x.clamp(max=LOG_RATIO_LIMIT)
    slope = math.expm1(LOG_RATIO_LIMIT)
    tangent = slope - LOG_RATIO_LIMIT + slope * (x - LOG_RATIO_LIMIT)
    beyond = torch.where(x > LOG_RATIO_LIMIT, tangent, bounded.expm1() - bounded)
    return torch.where(x.abs() < SERIES_LIMIT, series, beyond)


def estimate_kl(
    logprobs_T: torch.Tensor, reference_T: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Estimates the KL of each token of the policy, in nats; d = logprobs - reference.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html), below
    d = -20 its tangent there; low_variance is k3 up to 10, without a gradient beyond. k1 and k3
    are unbiased values, but only k2 has (on policy) the gradient of the KL; as a loss, k1's
    expected gradient is zero unless it is weighed by the current/old ratio
    (LossSpec.kl_unbiased). A NaN stays one.
    """
    difference_T = logprobs_T - reference_T
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    k3_T = exp_remainder(-difference_T)
    return k3_T if estimator == "k3" else k3_T.clamp(max=LOW_VARIANCE_LIMIT)
