"""Per-token estimates of KL(policy || reference) from the log-probs of the sampled tokens."""

from __future__ import annotations

import torch

from sluice.algo.spec import KlEstimator

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: larger ratios carry no information, only overflow
LOW_VARIANCE_LIMIT = 10.0


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns exp of the argument clamped to +-20; the gradient is zero beyond."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def estimate_kl(
    logprobs_T: torch.Tensor, reference_T: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Estimates the KL of each token of the policy, in nats; d = logprobs - reference.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html);
    low_variance is k3 clamped to +-10. k1 and k3 are unbiased values, but only k2 has (on
    policy) the gradient of the KL; as a loss, k1's expected gradient is zero unless it is weighed
    by the current/old ratio (LossSpec.kl_unbiased).
    """
    difference_T = logprobs_T - reference_T
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    k3_T = bounded_exp(-difference_T) - 1 + difference_T
    if estimator == "k3":
        return k3_T
    return k3_T.clamp(-LOW_VARIANCE_LIMIT, LOW_VARIANCE_LIMIT)
