"""The estimators themselves; as parts of a loss they are in test_losses.py."""

import math

import numpy as np
import pytest
import torch

from sluice.algo.kl import estimate_kl
from sluice.algo.losses import LossInputs, compute_loss
from sluice.algo.spec import LossSpec

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


EDGES = (0.0, 1e-6, 1e-4, 1e-3, 0.1, 0.25, 1.0, 5.0, 19.99, 20.0, 20.01, 100.0)
# log-prob of the policy minus that of the reference
GAPS = np.concatenate(
    [
        [sign * edge for edge in EDGES for sign in (-1.0, 1.0)],
        np.random.default_rng(0).normal(scale=1e-4, size=100),
        np.random.default_rng(1).normal(scale=3.0, size=100),
        np.random.default_rng(2).uniform(-100.0, 100.0, size=100),
    ]
)


def exact_k3(gaps):
    """(value, gradient by the gap) in float64, of the tangent beyond exp(20)."""
    x = -gaps
    series = x**2 / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5)))
    bounded = np.minimum(x, 20.0)
    beyond = np.expm1(20.0) * (x - bounded)
    value = np.where(np.abs(x) < 1e-3, series, np.expm1(bounded) - bounded + beyond)
    return value, -np.expm1(bounded)


def k3_and_gradient(gaps, dtype, estimator="k3"):
    policy = torch.tensor(gaps, dtype=dtype, requires_grad=True)
    values = estimate_kl(policy, torch.zeros_like(policy), estimator)
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    return values.detach().double().numpy(), gradient.double().numpy()


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 2e-6), (torch.float64, 1e-11)])
def test_k3_and_its_gradient_are_exact_from_nothing_to_100_nats(dtype, digits):
    gaps = torch.tensor(GAPS, dtype=dtype).double().numpy()  # as that precision has them
    (value, gradient), (wanted, slope) = k3_and_gradient(gaps, dtype), exact_k3(gaps)
    np.testing.assert_allclose(value, wanted, rtol=digits)
    np.testing.assert_allclose(gradient, slope, rtol=digits, atol=1e-30)


@pytest.mark.parametrize("estimator", ["k2", "k3", "low_variance"])
def test_no_gradient_leads_away_from_the_reference(estimator):
    """A step against the gradient must not widen the gap, however wide it is."""
    _, gradient = k3_and_gradient(GAPS, torch.float32, estimator)
    assert (gradient * np.sign(GAPS) >= 0).all()
    if estimator != "low_variance":  # which has none where it is cut
        assert (gradient[np.abs(GAPS) > 1e-3] != 0).all()


def test_low_variance_is_k3_cut_at_10():
    value, gradient = k3_and_gradient(GAPS, torch.float64, "low_variance")
    wanted, slope = exact_k3(GAPS)
    np.testing.assert_allclose(value, np.minimum(wanted, 10.0), rtol=1e-11)
    np.testing.assert_allclose(gradient, np.where(wanted > 10, 0.0, slope), rtol=1e-11, atol=1e-30)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_variance"])
def test_a_nan_is_not_made_a_number(estimator):
    values = estimate_kl(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, math.nan]), estimator)
    assert values.isnan().all()


def test_the_kl_that_is_reported_is_exact_where_policies_hardly_differ():
    """In float32 `ratio - 1 - log(ratio)` is off by ten times at a gap of 1e-4."""
    gap = 1e-4
    old = torch.zeros(1000)
    inputs = LossInputs(
        outputs=torch.full((1000,), gap).requires_grad_(),
        mask=torch.ones(1000, dtype=torch.bool),
        sample_index=torch.zeros(1000, dtype=torch.int64),
        sample_weights=torch.ones(1),
        columns={"old_logprobs": old, "rollout_logprobs": old - gap, "advantages": old},
    )
    spec = LossSpec(name="ppo_clip", clip_low=0.2, old_logprobs="old")
    metrics = compute_loss(inputs, spec).metrics
    for name in ("kl_old_k3", "rollout_mismatch_k3"):
        total, weight = metrics[name]
        assert (total / weight).item() == pytest.approx(gap**2 / 2, rel=1e-3), name
