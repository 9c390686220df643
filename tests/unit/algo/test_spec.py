import pytest

from sluice.algo.spec import AdvantageSpec, ImportanceSpec, LossSpec, required_columns

TIS = ImportanceSpec(high=2.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "sft", "clip_low": 0.2}, "clip_low"),
        ({"name": "sft", "old_logprobs": "old"}, "old_logprobs"),
        ({"name": "cispo", "clip_high": 0.2, "dual_clip": 3.0}, "dual_clip"),
        ({"name": "reinforce", "clip_low": 0.2}, "clip_low"),
        ({"name": "ppo_clip", "clip_low": 0.2, "value_clip": 0.2}, "value_clip"),
        ({"name": "ppo_clip", "clip_low": 0.2, "kl_estimator": "k3"}, "kl_estimator"),
        (
            {"name": "ppo_clip", "clip_low": 0.2, "kl_coefficient": 0.0, "kl_unbiased": True},
            "kl_unbiased",
        ),
        ({"name": "ppo_clip", "clip_low": 0.2, "constant_length": 9.0}, "constant_length"),
        ({"name": "ppo_clip", "clip_low": 0.2, "importance": TIS}, "importance"),
        ({"name": "value", "temperature": 0.7}, "temperature"),
        ({"name": "linear_value", "temperature": 0.7}, "temperature"),
        ({"name": "linear_value", "kl_coefficient": 0.1}, "kl_coefficient"),
        ({"name": "value", "entropy_coefficient": 0.1}, "entropy_coefficient"),
    ],
)
def test_a_loss_setting_without_effect_is_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=f"{named} has no effect"):
        LossSpec(**settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "grpo", "gamma": 0.9}, "gamma"),
        ({"name": "rloo", "scale_by_std": True}, "scale_by_std"),
        ({"name": "gae", "kl_estimator": "k1"}, "kl_estimator"),
        ({"name": "distillation", "kl_coefficient": 0.1}, "kl_coefficient"),
        ({"name": "grpo", "old_logprobs": "old"}, "old_logprobs"),
        ({"name": "provided", "reward": "raw_reward"}, "reward"),
    ],
)
def test_an_advantage_setting_without_effect_is_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=f"{named} has no effect"):
        AdvantageSpec(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "ppo_clip"}, "clip_low is required"),
        ({"name": "cispo"}, "clip_high is required"),
        ({"name": "dro"}, "dro_beta is required"),
        ({"name": "ppo_clip", "clip_low": 1.5}, "clip_low must be below 1"),
        ({"name": "ppo_clip", "settings": {"clip_low": 1.0}}, "must be below 1: ratios"),
        (
            {"name": "ppo", "settings": {"clip_low_threshold": 1.1, "clip_high_threshold": 1.0}},
            "clip_low_threshold is above clip_high_threshold",
        ),
        (
            {"name": "clip_cov", "clip_low": 0.2, "settings": {"low": 2.0, "high": 2.0}},
            "low is not below high",
        ),
        (
            {
                "name": "reinforce",
                "corrections": [{"name": "icepop", "settings": {"low": 2.0, "high": 1.0}}],
            },
            "low is above high",
        ),
        ({"name": "sft", "aggregation": "constant"}, "constant_length is required"),
        ({"name": "sft", "temperature": 0.0}, "temperature"),
        ({"name": "sft", "temperature": float("nan")}, "temperature"),
        ({"name": "sft", "temperature": 1e-40}, "temperature"),
        ({"name": "sft", "temperature": 1e9}, "temperature"),
        ({"name": "sft", "clip": 0.2}, "clip"),
    ],
)
def test_a_missing_or_impossible_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        LossSpec(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "truncate"}, "high is required"),
        ({"mode": "truncate", "high": 2.0, "low": 0.5}, "low has no effect"),
        ({"mode": "mask", "high": 2.0}, "low is required"),
        ({"mode": "clip", "low": 3.0, "high": 2.0}, "above"),
    ],
)
def test_importance_bounds_fit_the_mode(settings, message):
    with pytest.raises(ValueError, match=message):
        ImportanceSpec(**settings)


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        (LossSpec(name="ppo_clip", clip_low=0.2), {"advantages", "rollout_logprobs"}),
        (
            LossSpec(
                name="gspo",
                clip_low=3e-4,
                old_logprobs="old",
                importance=TIS,
                kl_coefficient=0.1,
            ),
            {"advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs"},
        ),
        (LossSpec(name="reinforce"), {"advantages"}),
        (LossSpec(name="sft"), set()),
        (LossSpec(name="value"), {"returns"}),
        (LossSpec(name="value", value_clip=0.2), {"returns", "values"}),
        (AdvantageSpec(name="grpo"), {"reward"}),
        (AdvantageSpec(name="grpo", reward="raw_reward"), {"raw_reward"}),
        (
            AdvantageSpec(name="gae", kl_coefficient=0.1, old_logprobs="old"),
            {"reward", "values", "old_logprobs", "reference_logprobs"},
        ),
        (AdvantageSpec(name="distillation"), {"rollout_logprobs", "teacher_logprobs"}),
        (AdvantageSpec(name="provided"), {"advantages"}),
    ],
)
def test_required_columns(spec, columns):
    assert required_columns(spec) == columns


def test_specs_cannot_change():
    with pytest.raises(ValueError, match="frozen"):
        LossSpec(name="sft").name = "value"
