"""What would make the gradient of preferences another one, or do nothing, is refused by key."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.config import ConfigError, parse_config
from sluice.loop.config import AlgorithmConfig, DpoConfig, RewardModelRunConfig, RunConfig

ROWS: dict[str, Any] = {
    "run_dir": "run",
    "trainer": "a:1",
    "tokenizer": "model",
    "rows": {"file": "pairs.jsonl"},
}
ONLINE: dict[str, Any] = {
    "advantage": {"name": "dpo", "settings": {"beta": 0.2}},
    "loss": {"name": "reinforce", "aggregation": "constant", "constant_length": 0.5},
}
RUN: dict[str, Any] = {
    "run_dir": "run",
    "trainer": "a:1",
    "router": "b:1",
    "prompts": {"file": "prompts.jsonl"},
    "environment": {"name": "prompts"},
    "sampling": {"max_new_tokens": 4},
    "samples_per_group": 2,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"preference": {"beta": 0}}, r"preference\.beta"),
        ({"preference": {"bta": 1}}, r"preference\.bta"),
        ({"preference": {"form": "ipo", "margin": 1}}, "margin has no effect for form ipo"),
        ({"loss": {"name": "sft"}}, "loss"),
        ({"mini_batches": 2}, "mini_batches"),
        ({"held_out": {"every_steps": 3}}, r"held_out\.file"),
        ({"trackers": {"otel": {"endpoint": "http://a:1"}}}, r"trackers\.otel: has no effect"),
        ({"trainer": ""}, "give services or trainer"),
    ],
)
def test_what_a_run_on_preferences_does_not_read_is_refused(
    changes: dict[str, Any], named: str
) -> None:
    parse_config(DpoConfig, ROWS)
    with pytest.raises(ConfigError, match=named):
        parse_config(DpoConfig, {**ROWS, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mini_batches": 2}, "mini_batches: advantage dpo takes one optimizer step a batch"),
        ({"epochs": 2}, "epochs: advantage dpo takes one optimizer step a batch"),
        ({"loss": {"name": "ppo_clip", "clip_low": 0.2}}, r"loss\.name: ppo_clip has no effect"),
        ({"advantage": {"name": "dpo", "kl_coefficient": 0.1}}, "kl_coefficient has no effect"),
    ],
)
def test_the_estimator_is_of_one_step_of_one_loss(changes: dict[str, Any], named: str) -> None:
    AlgorithmConfig(**ONLINE)
    with pytest.raises(ValueError, match=named):
        AlgorithmConfig(**{**ONLINE, **changes})


def test_a_run_that_samples_pairs_samples_two() -> None:
    parse_config(RunConfig, {**RUN, "algorithm": ONLINE})
    with pytest.raises(ConfigError, match=r"samples_per_group: .* two answers .* not of 4"):
        parse_config(RunConfig, {**RUN, "algorithm": ONLINE, "samples_per_group": 4})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"preference": {"centering": -0.1}}, r"preference\.centering"),
        ({"preference": {"centering": float("nan")}}, r"preference\.centering"),
        ({"preference": {"beta": 0.1}}, r"preference\.beta"),
        ({"loss": {"name": "value"}}, "loss"),
    ],
)
def test_what_a_reward_model_does_not_read_is_refused(changes: dict[str, Any], named: str) -> None:
    parse_config(RewardModelRunConfig, ROWS)
    with pytest.raises(ConfigError, match=named):
        parse_config(RewardModelRunConfig, {**ROWS, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mini_batches": 2}, "mini_batches: advantage bradley_terry takes one optimizer step"),
        ({"epochs": 2}, "epochs: advantage bradley_terry takes one optimizer step a batch"),
        ({"loss": {"name": "reinforce"}}, "linear_value and bradley_terry go together"),
        ({"advantage": {"name": "grpo"}}, "linear_value and bradley_terry go together"),
    ],
)
def test_the_estimator_of_a_reward_model_is_of_its_loss_alone(
    changes: dict[str, Any], named: str
) -> None:
    own = {"advantage": {"name": "bradley_terry"}, "loss": {"name": "linear_value"}}
    AlgorithmConfig(**own)
    with pytest.raises(ValueError, match=named):
        AlgorithmConfig(**{**own, **changes})
    with pytest.raises(ConfigError, match="which `sluice reward-model` trains"):
        parse_config(RunConfig, {**RUN, "algorithm": own})
