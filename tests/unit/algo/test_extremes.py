"""Losses at the edges of their ratios, in float32, against numpy in float64; a NaN stays one."""

import numpy as np
import pytest
import torch

from sluice.algo.losses import LossInputs, compute_loss
from sluice.algo.spec import LossSpec

EDGES = [sign * gap for gap in (0.0, 1e-6, 1e-4, 0.1, 19.9, 20.0, 20.1, 100.0) for sign in (-1, 1)]
# log-prob of the policy minus that of the old one; each is a sample of one token
GAPS = np.concatenate([EDGES, np.random.default_rng(0).normal(scale=8.0, size=64)]).astype(
    np.float32
)
ADVANTAGES = np.where(np.arange(len(GAPS)) % 4 < 2, 1.3, -0.7).astype(np.float32)
IMPORTANCE = np.random.default_rng(1).permutation(GAPS)  # old minus rollout


def bounded(gaps):
    """exp, of gaps up to 20 nats; (value, derivative)."""
    value = np.exp(np.clip(gaps.astype(np.float64), -20, 20))
    return value, np.where(np.abs(gaps) <= 20, value, 0.0)


def clipped(low, high, dual=np.inf):
    def formula(gaps, advantages):
        (ratio, slope), a = bounded(gaps), advantages.astype(np.float64)
        plain, cut = -ratio * a, -np.clip(ratio, 1 - low, 1 + high) * a
        value, gradient = np.maximum(plain, cut), np.where(plain >= cut, -slope * a, 0.0)
        beyond = (a < 0) & (value > -dual * a)
        return np.where(beyond, -dual * a, value), np.where(beyond, 0.0, gradient)

    return formula


def unclipped(gaps, advantages):
    ratio, slope = bounded(gaps)
    return -ratio * advantages, -slope * advantages


def cispo(gaps, advantages):
    weight = -np.minimum(bounded(gaps)[0], 1.2) * advantages
    return weight * gaps, weight


def dro(gaps, advantages):
    d = gaps.astype(np.float64)
    return 0.15 * d**2 - advantages * d, 0.3 * d - advantages


LOSSES = {
    "ppo": ({"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3}, clipped(0.2, 0.3)),
    "dual": ({"name": "ppo_clip", "clip_low": 0.2, "dual_clip": 3.0}, clipped(0.2, 0.2, 3.0)),
    "gspo": ({"name": "gspo", "clip_low": 0.1}, clipped(0.1, 0.1)),
    "unclipped": ({"name": "importance_sampling"}, unclipped),
    "cispo": ({"name": "cispo", "clip_high": 0.2}, cispo),
    "dro": ({"name": "dro", "dro_beta": 0.3}, dro),
}
CORRECTIONS = {
    "none": (None, lambda weight: 1.0),
    "truncate": ({"high": 1.5}, lambda weight: np.minimum(weight, 1.5)),
    "mask": (
        {"mode": "mask", "low": 0.5, "high": 2.0},
        lambda weight: weight * ((weight >= 0.5) & (weight <= 2.0)),
    ),
    "sequence": ({"level": "sequence", "high": 1e9}, lambda weight: weight),
}


def per_token(spec, gaps):
    """(losses, gradients) of samples of one token, float32[N]."""
    policy = torch.from_numpy(gaps.copy()).requires_grad_()
    old = torch.zeros(len(gaps))
    leaf_weights = torch.ones(len(gaps))
    inputs = LossInputs(
        outputs=policy,
        mask=torch.ones(len(gaps), dtype=torch.bool),
        sample_index=torch.arange(len(gaps)),
        sample_weights=leaf_weights.requires_grad_(),  # its gradient is the loss of each sample
        columns={
            "old_logprobs": old,
            "rollout_logprobs": old - torch.from_numpy(IMPORTANCE),
            "advantages": torch.from_numpy(ADVANTAGES),
        },
    )
    terms = compute_loss(inputs, spec)
    gradients, losses = torch.autograd.grad(terms.loss, (policy, leaf_weights))
    return losses.numpy(), gradients.numpy(), terms


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_the_formula_up_to_100_nats(name, correction):
    settings, formula = LOSSES[name]
    importance, weigh = CORRECTIONS[correction]
    spec = LossSpec(**settings, old_logprobs="old", importance=importance)
    losses, gradients, _ = per_token(spec, GAPS)
    weight = weigh(bounded(IMPORTANCE)[0])
    value, slope = formula(GAPS, ADVANTAGES)
    np.testing.assert_allclose(losses, weight * value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients, weight * slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_is_seen_by_whoever_looks_at_the_loss(name):
    gaps = GAPS.copy()
    gaps[3] = np.nan
    spec = LossSpec(**LOSSES[name][0], old_logprobs="old")
    assert per_token(spec, gaps)[2].loss.isnan()


def test_the_mismatch_is_exact_at_every_size():
    spec = LossSpec(name="ppo_clip", clip_low=0.2, old_logprobs="old")
    metrics = per_token(spec, GAPS)[2].metrics
    gap = IMPORTANCE.astype(np.float64)
    total, weight = (float(each) for each in metrics["rollout_mismatch"])
    assert weight == len(GAPS)
    assert total == pytest.approx(np.abs(gap).sum(), rel=1e-6)
