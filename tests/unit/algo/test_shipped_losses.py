"""Shipped losses against their formulas in numpy, token by token in float64, and their gradients.

A gradient is that of the formula with what is held fixed held: central differences of the oracle.
"""

import numpy as np
import pytest
import torch

from sluice.algo.aggregation import merge_measured
from sluice.algo.losses import LossInputs, compute_loss, measure_loss
from sluice.algo.plugins import SHIPPED
from sluice.algo.spec import LossSpec
from tests.unit.algo.loss_inputs import make_inputs


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sapo(x, i, t, now, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if x["A"][t] > 0 else tau_negative
    return -4 / tau * sigmoid(tau * (np.exp(now[t] - x["old"][t]) - 1)) * x["A"][t]


def gmpo(x, i, t, now, low=0.4, high=0.4):
    logs = []
    for s in x["tokens"][i]:
        ratio, sign = now[s] - x["old"][s], np.sign(x["A"][s])
        logs.append(sign * min(sign * ratio, sign * np.clip(ratio, -low, high)))
    return -x["A"][t] * np.exp(np.mean(logs))


def dppo(x, i, t, now, kind="tv", high=0.2, low=None, limit=20.0, two_sided=False, square=0.0):
    p, q, advantage = np.exp(x["fixed"][t]), np.exp(x["old"][t]), x["A"][t]
    low = high if low is None else low
    far = abs(p - q)
    if kind == "kl":
        far = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    back = square * (now[t] - x["old"][t]) ** 2
    up, down = (True, True) if two_sided else (advantage > 0, advantage <= 0)
    if (up and p > q and far > high) or (down and p < q and far > low):
        return back
    return back - min(np.exp(x["fixed"][t] - x["old"][t]), limit) * advantage * now[t]


def ppo(x, i, t, now, low=0.8, high=1.2):
    ratio = np.exp(now[t] - x["old"][t])
    return -min(ratio * x["A"][t], np.clip(ratio, low, high) * x["A"][t])


def covariances(x):
    chosen = [t for tokens in x["tokens"].values() for t in tokens]
    mean_advantage = np.mean([x["A"][t] for t in chosen])
    mean_logprob = np.mean([x["old"][t] for t in chosen])
    return {t: (x["A"][t] - mean_advantage) * (x["old"][t] - mean_logprob) for t in chosen}


def kl_cov(x, i, t, now, share=0.2, coefficient=0.7):
    cov = covariances(x)
    count = max(1, int(share * len(cov)))
    loss = -np.exp(now[t] - x["old"][t]) * x["A"][t]
    if cov[t] >= sorted(cov.values())[-count]:
        loss += coefficient * abs(now[t] - x["old"][t])
    return loss


def dro(x, i, t, now):
    return 0.15 * (now[t] - x["old"][t]) ** 2 - x["A"][t] * now[t]


CASES = {
    "sapo": ({"name": "sapo"}, sapo),
    "sapo_settings": (
        {"name": "sapo", "settings": {"tau_positive": 2.0, "tau_negative": 3.0}},
        lambda *a: sapo(*a, tau_positive=2.0, tau_negative=3.0),
    ),
    "gmpo": ({"name": "gmpo"}, gmpo),
    "gmpo_clipped": (
        {"name": "gmpo", "settings": {"log_clip_low": 0.1, "log_clip_high": 0.2}},
        lambda *a: gmpo(*a, low=0.1, high=0.2),
    ),
    "gpg": ({"name": "gpg"}, lambda x, i, t, now: -x["A"][t] * now[t]),
    "dppo_tv": (
        {"name": "dppo", "settings": {"high": 0.03, "low": 0.02}},
        lambda *a: dppo(*a, high=0.03, low=0.02),
    ),
    "dppo_kl": (
        {"name": "dppo", "settings": {"divergence": "kl", "high": 0.01, "ratio_limit": 1.1}},
        lambda *a: dppo(*a, kind="kl", high=0.01, limit=1.1),
    ),
    "dppo_pulled_back": (
        {"name": "dppo", "settings": {"high": 0.03, "log_ratio_coefficient": 0.4}},
        lambda *a: dppo(*a, high=0.03, square=0.4),
    ),
    "dppo_two_sided": (
        {"name": "dppo", "settings": {"high": 0.03, "two_sided": True}},
        lambda *a: dppo(*a, high=0.03, two_sided=True),
    ),
    "dro": ({"name": "dro", "settings": {"dro_beta": 0.3}}, dro),
    "tinker_ppo": ({"name": "ppo"}, ppo),
    "tinker_ppo_settings": (
        {"name": "ppo", "settings": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.4}},
        lambda *a: ppo(*a, low=0.9, high=1.4),
    ),
    "tinker_cross_entropy": ({"name": "cross_entropy"}, lambda x, i, t, now: -now[t]),
    "kl_cov": ({"name": "kl_cov", "settings": {"share": 0.2, "coefficient": 0.7}}, kl_cov),
}


def numbers(inputs):
    logprobs = inputs.outputs.detach().numpy()
    return {
        "now": logprobs,
        "fixed": logprobs,
        "old": inputs.columns["rollout_logprobs"].numpy(),
        "A": inputs.columns["advantages"].numpy(),
        "weights": inputs.sample_weights.numpy(),
        "tokens": {
            i: [
                t
                for t in range(len(logprobs))
                if inputs.mask[t] and int(inputs.sample_index[t]) == i
            ]
            for i in range(len(inputs.sample_weights))
        },
    }


def total(x, per_token, now):
    return sum(
        x["weights"][i] * per_token(x, i, t, now) for i, ts in x["tokens"].items() for t in ts
    )


def measured(inputs, spec, rounds):
    known = {}
    for number in range(rounds):
        known |= merge_measured([measure_loss(inputs, spec.with_measured(known), number)])
    return spec.with_measured(known)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_equal_the_formula(name, seed):
    settings, per_token = CASES[name]
    spec, inputs = LossSpec(**settings), make_inputs(seed)
    x = numbers(inputs)
    terms = compute_loss(inputs, measured(inputs, spec, spec.loss.rounds))
    assert terms.loss.item() == pytest.approx(total(x, per_token, x["now"]), rel=1e-12, abs=1e-12)
    (gradient,) = torch.autograd.grad(terms.loss, inputs.outputs)
    for t in range(len(x["now"])):
        up, down = x["now"].copy(), x["now"].copy()
        up[t] += 1e-6
        down[t] -= 1e-6
        wanted = (total(x, per_token, up) - total(x, per_token, down)) / 2e-6
        assert gradient[t].item() == pytest.approx(wanted, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clip_cov_holds_back_a_share_of_the_tokens_in_the_band(seed):
    inputs = make_inputs(seed)
    x = numbers(inputs)
    cov = covariances(x)
    settings = {"clip_low": 0.2, "low": 0.0, "high": 0.4, "share": 0.15}
    spec = measured(inputs, LossSpec(name="clip_cov", settings=settings), 2)
    terms = compute_loss(inputs, spec)
    (gradient,) = torch.autograd.grad(terms.loss, inputs.outputs)
    plain = compute_loss(inputs, LossSpec(name="ppo_clip", clip_low=0.2))
    (whole,) = torch.autograd.grad(plain.loss, inputs.outputs)
    inside = {t for t, value in cov.items() if 0.0 < value < 0.4}
    for t in range(len(x["now"])):
        if t not in inside:
            assert gradient[t] == whole[t]
        else:
            assert gradient[t] in (whole[t], 0.0)
    assert spec.measured["loss/inside"] == len(inside)


def test_clip_cov_draws_the_share_that_was_asked_for():
    """Of 40,000 tokens all within the band a tenth, and the same ones whatever their neighbours."""
    count = 40_000
    rng = np.random.default_rng(0)
    logprobs = torch.from_numpy(-1 - rng.random(count)).requires_grad_()
    inputs = make_inputs(0)
    inputs = type(inputs)(
        outputs=logprobs,
        mask=torch.ones(count, dtype=torch.bool),
        sample_index=torch.arange(count) // 100,
        sample_weights=torch.ones(count // 100, dtype=torch.float64),
        columns={
            "rollout_logprobs": logprobs.detach(),
            "advantages": torch.from_numpy(rng.normal(size=count)),
        },
        sample_keys=torch.from_numpy(rng.integers(-(2**62), 2**62, count // 100)),
    )
    settings = {"clip_low": 0.2, "low": -100.0, "high": 100.0, "share": 0.1}
    spec = measured(inputs, LossSpec(name="clip_cov", settings=settings), 2)
    held, weight = compute_loss(inputs, spec).metrics["clipped_covariance"]
    assert float(held / weight) == pytest.approx(0.1, abs=0.006)  # four standard deviations


@pytest.mark.parametrize("certain", [0, 5000])
def test_kl_cov_chooses_the_share_that_was_asked_for(certain):
    """Also of tokens that were all but certain, and so of one covariance, as most of a text are."""
    rng = np.random.default_rng(1)
    count, samples = 5000, 50
    logprobs = -np.abs(rng.normal(size=count))
    logprobs[:certain] *= 1e-6
    advantages = np.where(np.arange(count) < certain, 1.0, rng.normal(size=count))
    inputs = LossInputs(
        outputs=torch.from_numpy(logprobs).requires_grad_(),
        mask=torch.ones(count, dtype=torch.bool),
        sample_index=torch.arange(count) // (count // samples),
        sample_weights=torch.ones(samples, dtype=torch.float64),
        columns={
            "rollout_logprobs": torch.from_numpy(logprobs),
            "advantages": torch.from_numpy(advantages),
        },
        sample_keys=torch.from_numpy(rng.integers(-(2**62), 2**62, samples)),
    )
    spec = measured(inputs, LossSpec(name="kl_cov", settings={"share": 0.01}), 4)
    chosen, _ = compute_loss(inputs, spec).metrics["penalised_covariance"]
    assert int(chosen) == pytest.approx(50, abs=28 if certain else 0)  # four standard deviations


def test_every_name_of_tinker_is_there():
    names = {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}
    assert names <= SHIPPED["loss"].keys()


def test_gspo_keeps_the_gradient_of_each_token():
    """GSPO-token: tokens of other advantages keep their own, which the sequence form has not."""
    inputs = make_inputs(0)
    spec = LossSpec(name="gspo", clip_low=0.9, clip_high=9.0)
    (gradient,) = torch.autograd.grad(compute_loss(inputs, spec).loss, inputs.outputs)
    x = numbers(inputs)
    for i, tokens in x["tokens"].items():
        ratio = np.exp(np.mean([x["now"][t] - x["old"][t] for t in tokens])) if tokens else 0.0
        for t in tokens:
            assert gradient[t].item() == pytest.approx(-x["weights"][i] * ratio * x["A"][t])
