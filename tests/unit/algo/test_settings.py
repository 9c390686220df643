"""Every setting of every loss and estimator changes a number, or is refused by name."""

from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from sluice.algo.advantages import compute_advantages
from sluice.algo.aggregation import weigh_samples
from sluice.algo.logprobs import token_logprobs
from sluice.algo.losses import LossInputs, compute_loss
from sluice.algo.packed_rows import AdvantageRow
from sluice.algo.plugins import SHIPPED, PluginSettingError, PluginSettings, build, find
from sluice.algo.spec import AdvantageSpec, Aggregation, ImportanceSpec, LossSpec, OverlongSpec
from sluice.samples.sample import top_columns
from tests.unit.algo.loss_inputs import COLUMNS
from tests.unit.algo.test_corrections import measure

TOP = ("topk_forward_kl", "topk_reverse_kl", "topk_jsd")
WITHOUT_RATIO = ("sft", "cross_entropy", "value", "linear_value", *TOP)
NEEDED = {
    "ppo_clip": {"clip_low": 0.2},
    "gspo": {"clip_low": 0.05},
    "cispo": {"clip_high": 0.2},
    "dro": {"dro_beta": 0.3},
    "clip_cov": {"clip_low": 0.2},
}
KL = {"kl_coefficient": 0.1}
CONSTANT = {"aggregation": "constant", "constant_length": 9.0}
# field -> (settings it only makes sense beside, values other than what leaving it out means)
LOSS_VALUES = {
    "aggregation": [({}, "sample_mean"), ({}, "group_mean"), ({}, "sum")],
    "constant_length": [(CONSTANT, 5.0)],
    "temperature": [({}, 0.7)],
    "old_logprobs": [({}, "old")],
    "clip_low": [({}, 0.1)],
    "clip_high": [({}, 0.4)],
    "dual_clip": [({}, 1.1)],
    "value_clip": [({}, 0.1)],
    "dro_beta": [({}, 0.5)],
    "kl_coefficient": [({}, 0.1)],
    "kl_estimator": [
        *((KL, name) for name in SHIPPED["kl"] if name != "k3"),
        ({**KL, "kl_unbiased": True}, "k1"),
        ({**KL, "kl_unbiased": True}, "k2"),
        ({**KL, "kl_unbiased": True}, "low_variance"),
    ],
    "kl_unbiased": [(KL, True)],
    "entropy_coefficient": [({}, 0.1), ({}, -0.1)],
    "importance": [({"old_logprobs": "old"}, {"high": 1.2}), ({}, {"high": 1.2})],
    "opsm_delta": [({}, 0.05)],
    "settings": [({}, {"unknown": 1.0})],
    "corrections": [
        ({"old_logprobs": "old"}, [{"name": "tis", "settings": {"high": 1.2}}]),
        ({}, [{"name": "bypass_pg_is", "settings": {"is_threshold": 1.2}}]),
    ],
    "kl_settings": [(KL, {"unknown": 1.0})],
}
# every setting of a shipped class: (what stands beside it, another value than its default)
OWN_LOSS_VALUES = {
    "gmpo": {"log_clip_low": 0.05, "log_clip_high": 0.05},
    "sapo": {"tau_positive": 3.0, "tau_negative": 3.0},
    "dppo": {
        "divergence": "kl",
        "high": 0.02,
        "low": 0.01,
        "two_sided": True,
        "ratio_limit": 0.9,
        "log_ratio_coefficient": 0.5,
    },
    "clip_cov": {
        "clip_low": 0.05,
        "clip_high": 0.02,
        "dual_clip": 1.1,
        "share": 1.0,
        "low": 0.2,
        "high": 0.05,
    },
    "kl_cov": {"share": 0.5, "coefficient": 3.0},
    "ppo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
    **{name: {"top_count": 3, "tail": "renormalised"} for name in TOP[:2]},
    "topk_jsd": {"top_count": 3, "tail": "renormalised", "beta": 0.2},
}
NEEDED_SETTINGS = {
    "clip_cov": {"clip_low": 0.2, "low": 0.0, "share": 0.2},
    "dppo": {"high": 0.1},
}
OWN_ADVANTAGE_VALUES = {
    "remax": {"baseline": "raw_reward"},
    "pass_at_k": {"k": 2, "threshold": 5.0},
    "gdpo": {"rewards": {"reward": 1.0}},
    "bradley_terry": {"centering": 0.3},
    "dpo": {
        "beta": 0.3,
        "form": "ipo",
        "label_smoothing": 0.2,
        "reference": False,
        "average": True,
        "margin": 0.5,
        "sft_weight": 0.5,
    },
}
NEEDED_ADVANTAGE_SETTINGS = {
    "pass_at_k": {"k": 1, "threshold": -0.7},
    "gdpo": {"rewards": {"reward": 1.0, "raw_reward": 2.0}},
}
MASK = {"mode": "mask", "low": 0.7, "high": 1.3}
IMPORTANCE_VALUES = {
    "level": [({"high": 1.2}, "sequence"), ({"high": 1.2}, "geometric"), (MASK, "geometric")],
    "mode": [(MASK, "clip"), (MASK, "reject"), (MASK, "truncate")],
    "low": [(MASK, 0.9), ({"high": 1.2}, 0.9), ({**MASK, "mode": "clip"}, 0.9)],
    "high": [(MASK, 1.1), ({"high": 1.2}, 1.1)],
    "veto": [({"high": 1.2}, 0.7), (MASK, 0.75)],
}
OLD_KL = {"kl_coefficient": 0.1}
TEACHER = {"teacher_coefficient": 0.5}
ADVANTAGE_VALUES = {
    "reward": [({}, "raw_reward")],
    "scale_by_std": [({}, False)],
    "whiten": [({}, True), ({}, False)],
    "gamma": [({}, 0.5), ({}, 0.0)],
    "gae_lambda": [({}, 0.5), ({}, 0.0)],
    "kl_coefficient": [({}, 0.1)],
    "kl_estimator": [(KL, "k2"), (KL, "k3"), (KL, "low_variance"), ({}, "k3")],
    "teacher_coefficient": [({}, 0.5), ({}, 0.0)],
    "old_logprobs": [(KL, "old"), (TEACHER, "old"), ({}, "old")],
    "settings": [({}, {"unknown": 1.0})],
    "overlong": [({}, {"max_length": 7, "buffer": 6})],
    "kl_settings": [(KL, {"unknown": 1.0})],
}
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
LENGTHS = (5, 2, 7, 3)


def test_no_setting_is_left_out_here():
    assert LOSS_VALUES.keys() | {"name"} == LossSpec.model_fields.keys()
    assert IMPORTANCE_VALUES.keys() == ImportanceSpec.model_fields.keys()
    assert ADVANTAGE_VALUES.keys() | {"name"} == AdvantageSpec.model_fields.keys()
    assert {*get_args(Aggregation)} == {
        *("token_mean", "sample_mean", "group_mean", "constant", "sum")
    }


def loss_numbers(spec):
    """Loss of a step, and its gradient by the logits (by the values of a critic)."""
    rng = np.random.default_rng(3)
    tokens, vocabulary = sum(LENGTHS), 6
    index = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    leaf = torch.from_numpy(rng.normal(size=(tokens, vocabulary))).requires_grad_()
    sampled = torch.zeros(tokens, dtype=torch.int64)
    outputs, entropy = token_logprobs(leaf, sampled, entropy="gradient")
    spread = {name: rng.normal(scale=0.5, size=tokens) for name in COLUMNS}
    spread["reference_logprobs"] *= 6  # far enough for low_variance to be cut
    columns = {name: outputs.detach() + torch.from_numpy(each) for name, each in spread.items()}
    columns["advantages"] = torch.from_numpy(rng.normal(size=tokens))
    if spec.loss.head == "value":
        outputs, entropy = leaf[:, 0], None
    elif spec.temperature is not None:
        outputs, entropy = token_logprobs(
            leaf, sampled, temperature=spec.temperature, entropy="gradient"
        )
    top, count = None, spec.loss.top_count
    if count:
        named = torch.arange(count).remainder(vocabulary).expand(tokens, count)
        top, _ = token_logprobs(leaf, named, temperature=spec.temperature or 1.0)
        teacher = torch.from_numpy(rng.normal(size=(tokens, count + 1))).log_softmax(1)[:, :-1]
        names = top_columns(count)
        columns |= dict(zip(names, (named.to(torch.int32), teacher), strict=True))
    weighed = weigh_samples(spec, LENGTHS, ["a", "a", "a", "b"])
    inputs = LossInputs(
        outputs=outputs,
        top=top,
        mask=torch.ones(tokens, dtype=torch.bool),
        sample_index=torch.from_numpy(index),
        sample_weights=torch.tensor(weighed.weights, dtype=torch.float64) / weighed.normalizer,
        columns=columns,
        entropy=entropy,
    )
    loss = compute_loss(inputs, measure(spec, inputs)).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    return torch.cat([loss[None], gradient.flatten()]).detach().numpy()


def advantage_numbers(spec):
    """Advantages and returns of two groups."""
    rng = np.random.default_rng(4)
    rows = [
        AdvantageRow(
            sample_id=str(i),
            group_id="ab"[i // 2],
            loss_mask=torch.ones(length, dtype=torch.bool),
            rewards={
                name: sign * rng.normal()
                for name, sign in (("reward", 1), ("raw_reward", -1), ("score/baseline", 1))
            },
            columns={
                name: torch.from_numpy(rng.normal(scale=2.0, size=length))
                for name in (*COLUMNS, "teacher_logprobs")
            },
        )
        for i, length in enumerate(LENGTHS)
    ]
    found = compute_advantages(rows, spec)
    return torch.cat([*found.advantages, *(found.returns or [])]).numpy()


def assert_effect(build, numbers, context, name, value, means_default=False):
    """The setting is refused by its name, or some number is another one than without it."""
    try:
        spec = build({**context, name: value})
    except ValidationError as error:
        assert any(each in str(error) for each in (name, *context))
        return False
    others = {key: each for key, each in context.items() if key != name}
    try:
        without = numbers(build(others))
    except ValidationError:  # what it stands beside, or it itself, is required
        without = numbers(build(context))
    changed = not np.allclose(numbers(spec), without, rtol=1e-9, atol=1e-12)
    assert changed != means_default, f"{name}={value!r} beside {context} changes nothing"
    return True


@pytest.mark.parametrize("field", LOSS_VALUES)
@pytest.mark.parametrize("loss", SHIPPED["loss"])
def test_a_setting_of_a_loss_changes_a_number_or_is_refused(loss, field):
    def build(settings):
        return LossSpec(name=loss, **settings)

    for context, value in LOSS_VALUES[field]:
        assert_effect(build, loss_numbers, {**NEEDED.get(loss, {}), **context}, field, value)


@pytest.mark.parametrize("field", IMPORTANCE_VALUES)
@pytest.mark.parametrize("loss", [n for n in SHIPPED["loss"] if n not in WITHOUT_RATIO])
def test_a_setting_of_the_correction_changes_a_number_or_is_refused(loss, field):
    old = {} if loss in ("reinforce", "gpg") else {"old_logprobs": "old"}

    def build(settings):
        return LossSpec(
            name=loss, **NEEDED.get(loss, {}), **old, importance=ImportanceSpec(**settings)
        )

    kept = [
        assert_effect(build, loss_numbers, context, field, value)
        for context, value in IMPORTANCE_VALUES[field]
    ]
    assert any(kept)


@pytest.mark.parametrize("field", ADVANTAGE_VALUES)
@pytest.mark.parametrize("estimator", SHIPPED["advantage"])
def test_a_setting_of_an_estimator_changes_a_number_or_is_refused(estimator, field):
    def build(settings):
        own = NEEDED_ADVANTAGE_SETTINGS.get(estimator, {})
        return AdvantageSpec(name=estimator, **{"settings": own, **settings})

    for context, value in ADVANTAGE_VALUES[field]:
        default = (field, value) in (
            ("whiten", estimator in WHITENED),
            ("teacher_coefficient", 0.0),  # says off, as leaving it out does
        )
        assert_effect(build, advantage_numbers, context, field, value, default)


def test_no_own_setting_is_left_out_here():
    own = {name: set(LossSpec.model_fields) for name in NEEDED}
    for name in SHIPPED["loss"]:
        fields = set(find("loss", name).settings_type.model_fields)
        assert fields <= OWN_LOSS_VALUES.get(name, {}).keys() | own.get(name, {"value_clip"})
    for name in SHIPPED["advantage"]:
        fields = set(find("advantage", name).settings_type.model_fields)
        assert fields <= OWN_ADVANTAGE_VALUES.get(name, {}).keys() | ADVANTAGE_VALUES.keys()


@pytest.mark.parametrize(
    ("loss", "key"), [(loss, key) for loss, keys in OWN_LOSS_VALUES.items() for key in keys]
)
def test_an_own_setting_of_a_loss_changes_a_number(loss, key):
    beside = NEEDED_SETTINGS.get(loss, {})
    plain = loss_numbers(LossSpec(name=loss, settings=beside))
    other = loss_numbers(LossSpec(name=loss, settings={**beside, key: OWN_LOSS_VALUES[loss][key]}))
    assert not np.allclose(plain, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in OWN_ADVANTAGE_VALUES.items() for key in keys]
)
def test_an_own_setting_of_an_estimator_changes_a_number(name, key):
    beside = NEEDED_ADVANTAGE_SETTINGS.get(name, {})
    own = {**beside, key: OWN_ADVANTAGE_VALUES[name][key]}
    plain = advantage_numbers(AdvantageSpec(name=name, settings=beside))
    assert not np.allclose(plain, advantage_numbers(AdvantageSpec(name=name, settings=own)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_unbiased": True, "kl_estimator": "k2"}, "kl_unbiased .* k2, which is biased"),
        ({"kl_unbiased": True, "kl_estimator": "low_variance"}, "kl_unbiased .* low_variance"),
        ({"kl_estimator": "k1"}, "k1 has no effect in a loss without kl_unbiased"),
        ({"kl_estimator": "k1", "kl_unbiased": False}, "k1 has no effect"),
    ],
)
def test_a_kl_whose_gradient_is_not_of_a_kl_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        LossSpec(name="ppo_clip", clip_low=0.2, kl_coefficient=0.1, **settings)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e39, -1e39])
@pytest.mark.parametrize("spec", [LossSpec, ImportanceSpec, AdvantageSpec])
def test_a_number_that_is_none_is_refused_by_name(spec, number):
    for name, field in spec.model_fields.items():
        if "float" in str(field.annotation) and "Json" not in str(field.annotation):
            with pytest.raises(ValidationError, match=name):
                spec(**{"name": "grpo" if spec is AdvantageSpec else "ppo_clip", name: number})


def of_float32(kind, name):
    """Settings of a name that are numbers, and what it needs besides."""
    fields = find(kind, name).settings_type.model_fields
    needed = {**NEEDED, "weight": {"high": 2.0}, "opsm": {"delta": 0.1}, "pass_at_k": {"k": 2}}
    return [
        (kind, name, {**needed.get(name, {}), key: 3e38})
        for key, field in fields.items()
        if float in (field.annotation, *get_args(field.annotation))
    ]


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        case
        for kind in ("loss", "advantage", "correction")
        for name in SHIPPED[kind]
        for case in of_float32(kind, name)
    ],
)
def test_a_number_that_leaves_nothing_of_float32_is_refused_by_name(kind, name, settings):
    with pytest.raises(PluginSettingError, match=f"^{list(settings)[-1]}"):
        build(find(kind, name), settings, name)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (lambda: LossSpec(name="sapo", settings={"tau_positive": 1e-46}), "tau_positive"),
        (lambda: LossSpec(name="gpg", aggregation="constant", constant_length=1e-39), "length"),
        (lambda: AdvantageSpec(name="gdpo", settings={"rewards": {"reward": -1e39}}), "rewards"),
        (lambda: OverlongSpec(max_length=2, buffer=1, penalty=1e39), "penalty"),
    ],
)
def test_a_number_that_float32_has_not_is_refused_by_name(spec, named):
    with pytest.raises(ValidationError, match=named):
        spec()


def test_a_whole_number_beyond_any_float_is_refused_by_name():
    class Counted(PluginSettings):
        count: int

    with pytest.raises(ValidationError, match=r"count\n.*beyond 1e\+30"):
        Counted(count=10**400)
    assert Counted(count=10**30).count == 10**30


def test_distillation_without_its_teacher_is_refused():
    with pytest.raises(ValidationError, match="teacher_coefficient 0"):
        AdvantageSpec(name="distillation", teacher_coefficient=0.0)


def test_a_discount_of_nothing_is_refused():
    with pytest.raises(ValidationError, match="gamma"):
        AdvantageSpec(name="gae", gamma=0.0)
