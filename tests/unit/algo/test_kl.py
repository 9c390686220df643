"""The estimators themselves; as parts of a loss they are in test_losses.py."""

import math

import pytest
import torch

from sluice.algo.kl import estimate_kl

POLICY = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
KL = (POLICY * (POLICY / REFERENCE).log()).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_variance"])
def test_the_expectation_is_the_kl(estimator):
    values = estimate_kl(POLICY.log(), REFERENCE.log(), estimator)
    torch.testing.assert_close((POLICY * values).sum(), KL)


def test_only_k2_has_the_gradient_of_the_kl_on_policy():
    """E[d/dtheta estimate] with tokens held fixed, against d/dtheta of the exact KL."""
    logits = POLICY.log().requires_grad_()
    log = logits.log_softmax(-1)
    exact = (log.exp() * (log - REFERENCE.log())).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    found = {}
    for estimator in ("k1", "k2", "k3"):
        mean = (POLICY * estimate_kl(log, REFERENCE.log(), estimator)).sum()
        (found[estimator],) = torch.autograd.grad(mean, logits, retain_graph=True)
    torch.testing.assert_close(found["k2"], wanted)
    torch.testing.assert_close(found["k1"], torch.zeros_like(wanted), atol=1e-12, rtol=0)
    assert (found["k3"] - wanted).abs().max() > 0.01


def test_low_variance_is_bounded_where_k3_is_not():
    far = torch.tensor([-6.0]), torch.tensor([0.0])
    assert estimate_kl(*far, "low_variance").item() == 10.0
    assert estimate_kl(*far, "k3").item() == pytest.approx(math.exp(6.0) - 7.0, rel=1e-5)
    beyond = torch.tensor([-400.0]), torch.tensor([0.0])
    assert estimate_kl(*beyond, "k3").isfinite().all()
