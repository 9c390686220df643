"""Corrections in stages, and presets of them, against numpy: the factor of each token's loss."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algo.losses import LossInputs, compute_loss, measure_loss
from sluice.algo.spec import LossSpec, loss_traits
from tests.unit.algo.loss_inputs import make_inputs


def measure(spec, inputs):
    """The loss with what it measures of these rows, as of all of a pass."""
    known = {}
    for number in range(loss_traits(spec).rounds):
        known |= measure_loss(inputs, spec.with_measured(known), number)
    return spec.with_measured(known)


def factors_found(spec, inputs):
    """What the gradient of each trained token is multiplied by: -A log p has gradient -w A."""
    loss = compute_loss(inputs, measure(spec, inputs)).loss
    (gradient,) = torch.autograd.grad(loss, inputs.outputs)
    weight = inputs.sample_weights[inputs.sample_index] * inputs.columns["advantages"]
    if spec.loss.has_ratio:
        weight = weight * (inputs.outputs.detach() - inputs.columns[spec.old_column]).exp()
    return (-gradient / weight).numpy()


class Oracle:
    """l of each token, by sample, and factors that stages make of it."""

    def __init__(self, inputs, trainer, rollout):
        self.log = (trainer - rollout).detach().numpy()
        self.mask = inputs.mask.numpy()
        self.index = inputs.sample_index.numpy()
        self.factor = self.mask.astype(float)

    def samples(self):
        for i in range(self.index.max() + 1):
            own = (self.index == i) & self.mask
            if own.any():
                yield own

    def spread(self, reduce, per_token):
        out = np.zeros_like(self.log)
        for own in self.samples():
            out[own] = reduce(per_token[own])
        return out

    def weight(self, level="token", mode="truncate", low=0.0, high=None, normalized=False):
        log = self.log
        if level != "token":
            log = self.spread(np.sum if level == "sequence" else np.mean, log)
        weight = np.exp(np.clip(log, -20, 20))
        if mode == "mask":
            weight = np.where((weight < low) | (weight > high), 0.0, weight)
        else:
            weight = np.clip(weight, low if mode == "clip" else 0.0, high)
        if normalized:
            kept = self.mask & (self.factor != 0)
            if level == "token":
                weight = weight / weight[kept].mean()
            else:
                means = [weight[own & kept].mean() for own in self.samples() if (own & kept).any()]
                weight = weight / np.mean(means)
        self.factor = self.factor * weight
        return self

    def reject(self, statistic="k1", level="token", low=-np.inf, high=np.inf):
        log = np.clip(self.log, -20, 20)
        value = {"k1": -log, "k2": log**2 / 2, "k3": np.exp(log) - 1 - log}[statistic]
        if level in ("sequence", "geometric"):
            value = self.spread(np.sum if level == "sequence" else np.mean, value)
        bad = (value < low) | (value > high)
        if level == "worst":
            bad = self.spread(np.any, bad) > 0
        self.factor = np.where(bad, 0.0, self.factor)
        return self


def compare(spec, inputs, oracle):
    found = factors_found(spec, inputs)
    np.testing.assert_allclose(found[oracle.mask], oracle.factor[oracle.mask], atol=1e-10)


def old_case(inputs):
    return Oracle(inputs, inputs.columns["old_logprobs"], inputs.columns["rollout_logprobs"])


def importance_loss(corrections, **more):
    return LossSpec(name="importance_sampling", old_logprobs="old", corrections=corrections, **more)


LEVELS = ("token", "sequence", "geometric")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("normalized", [False, True])
def test_weights(level, mode, normalized):
    own = {"level": level, "mode": mode, "high": 1.8, "batch_normalized": normalized}
    if mode != "truncate":
        own["low"] = 0.2
    for seed in range(3):
        inputs = make_inputs(seed)
        spec = importance_loss([{"name": "weight", "settings": own}])
        wanted = old_case(inputs).weight(level, mode, own.get("low", 0.0), 1.8, normalized)
        compare(spec, inputs, wanted)


@pytest.mark.parametrize("level", (*LEVELS, "worst"))
@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
@pytest.mark.parametrize("band", [{"high": 0.1}, {"low": 0.02}, {"low": 0.01, "high": 1.5}])
def test_rejections(level, statistic, band):
    if statistic == "k1" and "low" not in band:
        band = {"high": -0.1}  # k1 has both signs
    kept = set()
    for seed in range(4):
        inputs = make_inputs(seed)
        own = {"level": level, "statistic": statistic, **band}
        wanted = old_case(inputs).reject(statistic, level, **band)
        compare(importance_loss([{"name": "reject", "settings": own}]), inputs, wanted)
        kept |= set(wanted.factor[wanted.mask])
    assert kept == {0.0, 1.0}  # some of each, or nothing was tested


@pytest.mark.parametrize(
    ("stage", "bounds"),
    [("weight", {"mode": "mask", "low": 1.0, "high": 1.0}), ("reject", {"low": 0.0, "high": 0.0})],
)
def test_what_lies_on_a_bound_is_inside(stage, bounds):
    inputs = make_inputs(0)
    inputs.columns["rollout_logprobs"][:] = inputs.columns["old_logprobs"]
    compare(importance_loss([{"name": stage, "settings": bounds}]), inputs, old_case(inputs))


def test_stages_are_applied_in_order():
    """A mean that a weight is divided by is of what the stages before have left."""
    inputs = make_inputs(0)
    weight = {"name": "weight", "settings": {"high": 1.3, "batch_normalized": True}}
    reject = {"name": "reject", "settings": {"level": "geometric", "low": -0.1, "high": 0.1}}
    first = old_case(inputs).weight(high=1.3, normalized=True).reject("k1", "geometric", -0.1, 0.1)
    compare(importance_loss([weight, reject]), inputs, first)
    second = old_case(inputs).reject("k1", "geometric", -0.1, 0.1).weight(high=1.3, normalized=True)
    compare(importance_loss([reject, weight]), inputs, second)
    assert not np.allclose(first.factor, second.factor)


VERL = {"is_threshold": 1.2}
GEOMETRIC = {"rs_low": 0.9, "rs_high": 1.2}
BAND = {"low": np.log(0.9), "high": np.log(1.2)}
PRESETS = {
    "tis": ({"high": 1.2}, lambda o: o.weight(high=1.2)),
    "mis": ({"low": 0.7, "high": 1.5}, lambda o: o.weight("sequence", "mask", 0.7, 1.5)),
    "icepop": ({"low": 0.7, "high": 1.5}, lambda o: o.weight("token", "mask", 0.7, 1.5)),
    "decoupled_token_is": (VERL, lambda o: o.weight(high=1.2)),
    "decoupled_seq_is": (VERL, lambda o: o.weight("sequence", high=1.2)),
    "decoupled_seq_is_rs": (
        {**VERL, "rs_low": 0.6, "rs_high": 1.6},
        lambda o: o.weight("sequence", high=1.2).reject("k1", "sequence", np.log(0.6), np.log(1.6)),
    ),
    "decoupled_geo_rs": (GEOMETRIC, lambda o: o.reject("k1", "geometric", **BAND)),
    "decoupled_geo_rs_seq_tis": (
        {**VERL, **GEOMETRIC, "batch_normalized": True},
        lambda o: o.weight("sequence", high=1.2, normalized=True).reject("k1", "geometric", **BAND),
    ),
    "decoupled_geo_rs_token_tis": (
        {**VERL, **GEOMETRIC},
        lambda o: o.weight(high=1.2).reject("k1", "geometric", **BAND),
    ),
    "decoupled_k3_rs": ({"rs_threshold": 0.08}, lambda o: o.reject("k3", "geometric", high=0.08)),
    "decoupled_k3_rs_seq_tis": (
        {**VERL, "rs_threshold": 0.08},
        lambda o: o.weight("sequence", high=1.2).reject("k3", "geometric", high=0.08),
    ),
    "decoupled_k3_rs_token_tis": (
        {**VERL, "rs_threshold": 0.08},
        lambda o: o.weight(high=1.2).reject("k3", "geometric", high=0.08),
    ),
    "bypass_ppo_clip_geo_rs": (GEOMETRIC, lambda o: o.reject("k1", "geometric", **BAND)),
    "bypass_ppo_clip_k3_rs": (
        {"rs_threshold": 0.08},
        lambda o: o.reject("k3", "geometric", high=0.08),
    ),
    "bypass_pg_is": (VERL, lambda o: o.weight("sequence", high=1.2)),
    "bypass_pg_geo_rs": (GEOMETRIC, lambda o: o.reject("k1", "geometric", **BAND)),
    "bypass_pg_geo_rs_seq_tis": (
        {**VERL, **GEOMETRIC},
        lambda o: o.weight("sequence", high=1.2).reject("k1", "geometric", **BAND),
    ),
    "bypass_pg_geo_rs_token_tis": (
        {**VERL, **GEOMETRIC},
        lambda o: o.weight(high=1.2).reject("k1", "geometric", **BAND),
    ),
}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_presets_are_their_formula(name, seed):
    values, wanted = PRESETS[name]
    inputs = make_inputs(seed)
    rollout = inputs.columns["rollout_logprobs"]
    corrections = [{"name": name, "settings": values}]
    if name.startswith("bypass_pg"):
        spec = LossSpec(name="reinforce", corrections=corrections)
        oracle = Oracle(inputs, inputs.outputs, rollout)
    elif name.startswith("bypass"):
        spec = LossSpec(name="importance_sampling", corrections=corrections)
        oracle = Oracle(inputs, inputs.outputs, rollout)
    else:
        spec, oracle = importance_loss(corrections), old_case(inputs)
    compare(spec, inputs, wanted(oracle))


@pytest.mark.parametrize(
    ("short", "stages"),
    [
        (
            {"importance": {"level": "geometric", "mode": "clip", "low": 0.9, "high": 1.1}},
            [
                {
                    "name": "weight",
                    "settings": {"level": "geometric", "mode": "clip", "low": 0.9, "high": 1.1},
                }
            ],
        ),
        (
            {"importance": {"mode": "reject", "low": 0.8, "high": 1.25, "veto": 0.7}},
            [
                {"name": "reject", "settings": {"low": -np.log(1.25), "high": -np.log(0.8)}},
                {"name": "reject", "settings": {"level": "worst", "high": -np.log(0.7)}},
            ],
        ),
        ({"opsm_delta": 0.05}, [{"name": "opsm", "settings": {"delta": 0.05}}]),
    ],
)
def test_short_forms_are_stages(short, stages):
    for seed in range(3):
        losses = [
            compute_loss(
                make_inputs(seed),
                LossSpec(name="ppo_clip", clip_low=0.2, old_logprobs="old", **more),
            ).loss
            for more in (short, {"corrections": stages})
        ]
        assert losses[0] == losses[1]


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=12),
    st.sampled_from(["token", "sequence", "geometric", "worst"]),
    st.sampled_from(["k1", "k2", "k3"]),
)
@settings(max_examples=60)
def test_far_tokens_stay_numbers(logs, level, statistic):
    count = len(logs)
    inputs = LossInputs(
        outputs=torch.full((count,), -1.0, dtype=torch.float64, requires_grad=True),
        mask=torch.ones(count, dtype=torch.bool),
        sample_index=torch.zeros(count, dtype=torch.int64),
        sample_weights=torch.ones(1, dtype=torch.float64),
        columns={
            "old_logprobs": torch.tensor(logs, dtype=torch.float64),
            "rollout_logprobs": torch.zeros(count, dtype=torch.float64),
            "advantages": torch.ones(count, dtype=torch.float64),
        },
    )
    own = {"level": level, "statistic": statistic, "high": 3.0}
    spec = importance_loss([{"name": "reject", "settings": own}])
    oracle = old_case(inputs).reject(statistic, level, high=3.0)
    terms = compute_loss(inputs, spec)
    assert terms.loss.isfinite()
    dropped, _ = terms.metrics["importance_dropped"]
    assert int(dropped) == int((oracle.factor == 0).sum())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"corrections": [{"name": "weight", "settings": {"high": 2.0}}]}, "in the ratio already"),
        ({"corrections": [{"name": "nope"}]}, "corrections.0.name: 'nope' is no correction; known"),
        ({"corrections": [{"name": "weight"}]}, "corrections.0.settings.high: is required"),
        (
            {"corrections": [{"name": "reject", "settings": {"cap": 1}}]},
            "corrections.0.settings.cap: has no effect",
        ),
        ({"corrections": [{"name": "decoupled_geo_rs"}]}, "is for old_logprobs old"),
        ({"corrections": [{"name": "bypass_pg_is"}]}, "is for a loss without a ratio"),
        ({"corrections": [{"name": "opsm", "settings": {"delta": float("inf")}}]}, "finite|delta"),
        (
            {"corrections": [{"name": "reject", "settings": {"statistic": "k2", "low": 0}}]},
            "low has no effect",
        ),
        ({"corrections": [{"name": "reject"}]}, "low or high is required"),
        (
            {"corrections": [{"name": "reject", "settings": {"statistic": "k3", "high": -0.1}}]},
            "high is below 0, which drops everything: k3 never is",
        ),
        (
            {"corrections": [{"name": "weight", "settings": {"low": 0.5, "high": 2.0}}]},
            "low has no effect with mode truncate",
        ),
        (
            {"corrections": [{"name": "weight", "settings": {"mode": "clip", "high": 2.0}}]},
            "low is required by mode clip",
        ),
        ({"corrections": [], "opsm_delta": 0.1}, "opsm_delta has no effect"),
    ],
)
def test_a_stage_without_effect_is_refused(more, message):
    with pytest.raises(ValueError, match=message):
        LossSpec(name="ppo_clip", clip_low=0.2, **more)


def test_a_batch_mean_needs_columns_known_ahead():
    own = {"name": "weight", "settings": {"high": 2.0, "batch_normalized": True}}
    with pytest.raises(ValueError, match="batch_normalized needs old_logprobs old"):
        LossSpec(name="reinforce", corrections=[own])


def test_a_batch_mean_is_not_of_what_the_current_policy_leaves():
    own = {"name": "weight", "settings": {"high": 2.0, "batch_normalized": True}}
    opsm = {"name": "opsm", "settings": {"delta": 0.1}}
    with pytest.raises(ValueError, match="batch_normalized comes before opsm"):
        LossSpec(name="ppo_clip", clip_low=0.2, old_logprobs="old", corrections=[opsm, own])
    LossSpec(name="ppo_clip", clip_low=0.2, old_logprobs="old", corrections=[own, opsm])
