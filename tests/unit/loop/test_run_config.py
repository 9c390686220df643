"""What a run's settings must be before any service is asked for anything."""

from typing import Any

import pytest

from sluice.config import ConfigError, parse_config
from sluice.loop.config import RunConfig
from sluice.runtime.messages import LONGEST_SECONDS

GAE = {"advantage": {"name": "gae"}}


def configured(**changes: Any) -> RunConfig:
    values = {
        "run_dir": "run",
        "trainer": "a:1",
        "router": "a:2",
        "prompts": {"index_count": 5},
        "environment": {"name": "prompts"},
        "sampling": {"max_new_tokens": 5},
        **changes,
    }
    return parse_config(RunConfig, values)


def loss(**settings: Any) -> dict[str, Any]:
    return {"algorithm": {"loss": {"name": "ppo_clip", "clip_low": 0.2, **settings}}}


def sampling(**settings: Any) -> dict[str, Any]:
    return {"sampling": {"max_new_tokens": 5, **settings}}


@pytest.mark.parametrize(
    ("settings", "staleness", "ignored"),
    [
        ({"old_logprobs": "old"}, 1, True),
        ({"old_logprobs": "old", "opsm_delta": 0.1}, 1, True),  # of trainer's policies alone
        ({"old_logprobs": "old"}, 0, False),
        ({"old_logprobs": "rollout"}, 1, False),
        ({}, 1, False),
        ({"old_logprobs": "old", "importance": {"high": 2.0}}, 1, False),
        ({"old_logprobs": "old", "corrections": [{"name": "tis"}]}, 1, False),
    ],
)
def test_a_loss_that_takes_older_samples_for_its_own_is_known(
    settings: dict[str, Any], staleness: int, ignored: bool
) -> None:
    config = configured(max_staleness=staleness, **loss(**settings))
    assert config.ignores_staleness == ignored


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1e-3, 2.5])
def test_the_loss_has_the_temperature_of_the_sampling(temperature):
    for extra in ({}, loss(temperature=temperature)):
        config = configured(**sampling(temperature=temperature), **extra)
        assert config.tempered_algorithm.loss.temperature == temperature
    assert configured().tempered_algorithm.loss.temperature == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {**sampling(temperature=0.7), **loss(temperature=1.0)},
            r"algorithm\.loss\.temperature 1 contradicts sampling\.temperature 0\.7",
        ),
        (loss(temperature=0.7), r"algorithm\.loss\.temperature 0\.7 .* sampling\.temperature 1"),
        (sampling(temperature=0), r"sampling\.temperature: must be above 0"),
        (sampling(temperature=-1), r"sampling\.temperature"),
        (sampling(temperature=float("inf")), r"sampling\.temperature"),
        (
            sampling(temperature=1e-40),
            r"sampling\.temperature: must be from 1.9e-06 to",
        ),
        (sampling(temperature=1e9), r"sampling\.temperature"),
        (sampling(max_new_tokens=2**31), r"sampling\.max_new_tokens"),
        *[
            (sampling(min_new_tokens=wrong), r"^sampling\.min_new_tokens")
            for wrong in (-1, 2**31, 1.5, float("nan"), "many", [1], None)
        ],
        (sampling(min_new_tokens=6), r"sampling\.min_new_tokens: 6 is more than max_new_tokens, 5"),
        (sampling(ignore_eos="perhaps"), r"^sampling\.ignore_eos"),
        *[
            ({"replay": {"run_dir": "r", **wrong}}, rf"^replay\.{next(iter(wrong))}")
            for wrong in (
                {"first_step": 0},
                {"first_step": -1},
                {"last_step": 0},
                {"last_step": 2**31},
                {"last_step": "all"},
                {"steps": "3-10"},
            )
        ],
        ({"replay": {}}, r"^replay\.run_dir"),
        (
            {"replay": {"run_dir": "r", "first_step": 3, "last_step": 2}},
            r"^replay: last_step: 2 is before first_step 3",
        ),
        ({"replay": {"run_dir": "r"}, "steps": 3}, r"steps: has no effect with replay"),
        (
            {"replay": {"run_dir": "r"}, "placement": "colocated"},
            r"placement: must be separate with replay",
        ),
        (
            {"replay": {"run_dir": "r"}, "weight_transport": "collective"},
            r"weight_transport: must be store with replay",
        ),
        (
            {
                "replay": {"run_dir": "r"},
                "evaluation": {"datasets": {"a": {"prompts": {"index_count": 1}}}},
            },
            r"evaluation: has no effect with replay",
        ),
        (
            {
                "replay": {"run_dir": "r"},
                "algorithm": {
                    "loss": {"name": "ppo_clip", "clip_low": 0.2, "kl_coefficient": 0.1},
                    "reference_every": 2,
                },
            },
            r"algorithm\.reference_every: is not for replay",
        ),
        (
            {
                "replay": {"run_dir": "r"},
                "teachers": {"big": {"address": "a:1"}},
                "algorithm": {"advantage": {"name": "distillation"}},
            },
            r"teachers\.big: is a trainer, which a replay does not ask",
        ),
        (
            {
                **sampling(min_new_tokens=4),
                "evaluation": {
                    "datasets": {
                        "short": {
                            "prompts": {"index_count": 1},
                            "sampling": {"max_new_tokens": 3},
                        }
                    }
                },
            },
            r"datasets\.short\.sampling\.min_new_tokens: 4 is more than max_new_tokens, 3",
        ),
        (
            {
                "prompts": None,
                "environment": None,
                "environments": {
                    "one": {
                        "prompts": {"index_count": 1},
                        "environment": {"name": "copy_digits"},
                        "sampling": {"min_new_tokens": 9},
                    }
                },
            },
            r"environments\.one\.sampling\.min_new_tokens: 9 is more than max_new_tokens, 5",
        ),
        (sampling(top_k=2**31), r"sampling\.top_k"),
        (sampling(stop_token_ids=[2**31]), r"sampling\.stop_token_ids\.0"),
        (sampling(stop_token_ids=[7, -1]), r"sampling\.stop_token_ids\.1"),
        (sampling(stop=[""]), r"sampling\.stop\.0"),
        (sampling(stop=["a", "b" * 5000]), r"sampling\.stop\.1"),
        (sampling(stop=["\ud800"]), r"sampling\.stop\.0"),
        (sampling(stop="a"), r"sampling\.stop"),
        ({"max_staleness": 10_001}, r"max_staleness"),
        (sampling(temperature=float("nan")), r"sampling\.temperature"),
        (
            {"algorithm": {"advantage": {"name": "provided"}}},
            r"algorithm\.advantage\.name: .* column advantages .* no service",
        ),
        (
            {"algorithm": {"advantage": {"name": "distillation"}}},
            r"teachers: algorithm\.advantage\.name learns from one",
        ),
        (
            {"algorithm": {"advantage": {"name": "grpo", "teacher_coefficient": 0.1}}},
            r"teachers: algorithm\.advantage\.teacher_coefficient learns from one",
        ),
        (
            {"algorithm": {"advantage": {"name": "grpo", "gamma": 0.9}}},
            r"algorithm\.advantage: gamma has no effect for advantage grpo",
        ),
        ({"algorithm": {"advantage": {"name": "gae", "gamma": 0}}}, r"advantage\.gamma"),
        (
            {"algorithm": {"loss": {"name": "value"}}},
            r"algorithm: loss\.name: value .* critic\.loss",
        ),
        (
            {"algorithm": {"loss": {"name": "sft"}, "advantage": {"name": "rloo"}}},
            r"algorithm: advantage: has no effect with loss sft",
        ),
        (loss(kl_coefficient=0.1, kl_estimator="k1"), r"algorithm\.loss: kl_estimator k1"),
        (loss(dro_beta=0.1), r"algorithm\.loss: dro_beta has no effect for loss ppo_clip"),
        (
            {"algorithm": {"mini_batches": 9}, "groups_per_step": 8},
            r"algorithm\.mini_batches: 9 .* groups_per_step 8",
        ),
        *[
            ({"algorithm": {"epochs": wrong}}, r"^algorithm\.epochs: ")
            for wrong in (0, -1, 65, 10**30, 1.5, "two", "", True, False, None, [2], {})
        ],
        (
            {"algorithm": GAE, "critic": {"warmup_steps": 7}, "steps": 7},
            r"critic\.warmup_steps: 7 leave none of the 7 steps",
        ),
        (
            {"algorithm": GAE, "critic": {"service": "critic", "address": "a:3"}},
            r"critic: service: has no effect with address",
        ),
        ({"algorithm": GAE}, r"critic: the advantage gae needs one"),
        ({"critic": {}}, r"critic: has no effect for the advantage grpo"),
        ({"stop_window": 3}, r"stop_window: has no effect without stop_at_reward"),
        ({"max_filtered_in_a_row": 3}, r"max_filtered_in_a_row: has no effect without filters"),
        (
            {
                "deterministic": True,
                "evaluation": {
                    "datasets": {"d": {"prompts": {"index_count": 1}}},
                    "beside_training": True,
                },
            },
            r"deterministic needs evaluation\.beside_training false",
        ),
        ({"groups_per_step": 10**7}, r"groups_per_step: .* less than or equal to 1000000"),
        ({"samples_per_group": 10**7}, r"samples_per_group: .* less than or equal to 1000000"),
        ({"prompts": {"index_count": 10**9}}, r"index_count: .* not shuffled; give shuffle: false"),
        ({"prompts": {"index_count": 2**63, "shuffle": False}}, r"index_count: .* less than"),
        ({"max_mismatch": -0.1}, r"max_mismatch"),
        ({"max_mismatch": float("nan")}, r"max_mismatch"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused_by_its_key(changes, message):
    with pytest.raises(ConfigError, match=message):
        configured(**changes)


def test_what_only_just_works_is_taken():
    assert configured(algorithm={"mini_batches": 8}, groups_per_step=8)
    assert configured(algorithm={"mini_batches": 8, "epochs": 64}).algorithm.epochs == 64
    assert configured().algorithm.epochs == 1
    assert configured(algorithm=GAE, critic={"warmup_steps": 6}, steps=7)
    assert configured(algorithm={"loss": {"name": "sft"}})
    assert configured(stop_window=3, stop_at_reward=0.5)
    most = 2**31 - 1
    assert configured(**sampling(max_new_tokens=most, top_k=most, stop_token_ids=[0, most]))
    assert configured(**sampling(stop=["\0", "a" * 1024, "\n\n", "🙂"]))
    assert configured(max_mismatch=0).max_mismatch == 0
    assert configured().max_mismatch > 0


@pytest.mark.parametrize(
    ("settings", "truncates"),
    [
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_new_tokens": 5}, True),
        ({"ignore_eos": True}, False),
        ({}, False),
    ],
)
def test_sampling_that_cuts_off_says_so(settings, truncates):
    assert configured(**sampling(**settings)).sampling.truncates is truncates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 1}, "placement: colocated needs max_staleness 0"),
        ({"over_sampling": 1.5}, "placement: colocated needs over_sampling 1"),
        ({"straggler_seconds": 5}, "straggler_seconds: has no effect with placement colocated"),
        ({"weight_transport": "collective"}, "placement: colocated needs weight_transport store"),
        (
            {
                "evaluation": {
                    "datasets": {"a": {"prompts": {"index_count": 5}}},
                    "beside_training": True,
                }
            },
            r"placement: colocated needs evaluation\.beside_training false",
        ),
        *[({"placement": wrong}, "placement") for wrong in ("", "shared", "Colocated", None, 1)],
    ],
)
def test_what_needs_both_at_once_is_refused_on_shared_devices(changes, message):
    with pytest.raises(ConfigError, match=message):
        configured(**{"placement": "colocated", **changes})
    if "placement" not in changes:
        configured(**changes)  # each with devices of its own


def test_evaluations_wait_on_shared_devices_unless_they_say_they_do_not():
    datasets = {"a": {"prompts": {"index_count": 5}}}
    configured(placement="colocated", evaluation={"datasets": datasets})
    configured(placement="colocated", evaluation={"datasets": datasets, "beside_training": False})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    ["stop_at_reward", "group_timeout_seconds", "service_timeout_seconds", "server.drain_seconds"],
)
def test_a_number_that_is_none_is_refused(name, number):
    outer, _, inner = name.rpartition(".")
    with pytest.raises(ConfigError, match=rf"{name}: Input should be"):
        configured(**{outer: {inner: number}} if outer else {name: number})


@pytest.mark.parametrize("seconds", [1e300, LONGEST_SECONDS + 1, 1e-300, 0])
def test_a_limit_of_a_group_is_one_that_a_call_can_say(seconds):
    share = {"prompts": {"index_count": 5}, "environment": {"name": "prompts"}}
    several = {"prompts": None, "environment": None}
    several["environments"] = {"a": {**share, "group_timeout_seconds": seconds}}
    for changes in ({"group_timeout_seconds": seconds}, several):
        with pytest.raises(ConfigError, match="group_timeout_seconds: Input should be"):
            configured(**changes)
