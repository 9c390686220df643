"""Which groups are kept: built-in rules, users' functions, and what is refused at the start."""

import pytest

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.config import ConfigError
from sluice.loop.config import FilterConfig
from sluice.loop.filters import FilterError, GeneratedGroup, GroupFilters, generated_group

STOP, LENGTH = sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_LENGTH


def group(rewards, **fields) -> pb.FinishedGroup:
    fields.setdefault("raw_rewards", rewards)
    fields.setdefault("finish_reasons", [STOP] * len(rewards))
    return pb.FinishedGroup(
        group_id="g", rewards=rewards, response_lengths=[3] * len(rewards), **fields
    )


def filters(name: str, **settings) -> GroupFilters:
    return GroupFilters([FilterConfig(name=name, settings=settings)])


def short(group: GeneratedGroup, *, limit: int) -> bool:
    return max(group.response_lengths) <= limit


def tells_format(group: GeneratedGroup) -> bool:
    """Reads a number that only some samples have."""
    found = [scores["format"] for scores in group.scores if "format" in scores]
    return bool(found) and min(found) > 0


def unsure(group: GeneratedGroup):
    return None


HERE = "tests.unit.loop.test_filters"


@pytest.mark.parametrize(
    ("name", "settings", "finished", "kept"),
    [
        ("reward_std", {}, group([1, 1, 1]), False),
        ("reward_std", {}, group([0, 0]), False),
        ("reward_std", {}, group([1, 0, 0]), True),
        ("reward_std", {"above": 0.4}, group([1, 0, 0, 0, 0, 0, 0, 0]), False),
        ("reward_std", {}, group([0.1 + 0.2, 0.3]), True),
        ("raw_reward_mean", {"low": 0.2, "high": 0.8}, group([9, 9], raw_rewards=[1, 0]), True),
        ("raw_reward_mean", {"low": 0.2, "high": 0.8}, group([0, 1], raw_rewards=[1, 1]), False),
        ("raw_reward_mean", {"low": 0.5}, group([9, 9], raw_rewards=[1, 0]), True),
        ("raw_reward_mean", {"high": 0.5}, group([9, 9], raw_rewards=[1, 0]), True),
        ("raw_reward_mean", {"low": 0.6}, group([9, 9], raw_rewards=[1, 0]), False),
        ("finished", {}, group([1, 0], finish_reasons=[STOP, LENGTH]), False),
        ("finished", {"share": 0.5}, group([1, 0], finish_reasons=[STOP, LENGTH]), True),
        (f"{HERE}:short", {"limit": 3}, group([1, 0]), True),
        (f"{HERE}:short", {"limit": 2}, group([1, 0]), False),
    ],
)
def test_rules(name, settings, finished, kept) -> None:
    assert filters(name, **settings).rejected_by(finished) == ("" if kept else name)


def test_the_first_that_rejects_is_named() -> None:
    both = GroupFilters([FilterConfig(name="reward_std"), FilterConfig(name="finished")])
    assert both and not GroupFilters()
    assert both.rejected_by(group([1, 1], finish_reasons=[LENGTH, LENGTH])) == "reward_std"
    assert both.rejected_by(group([1, 0], finish_reasons=[LENGTH, LENGTH])) == "finished"


def test_groups_of_several_samples_an_episode_and_mixed_scores() -> None:
    """Fan-out gives groups of any size; a number that some samples lack is absent there."""
    details = [
        pb.SampleDetails(episode=0, scores={"format": 1.0}),
        pb.SampleDetails(episode=0),
        pb.SampleDetails(episode=1, scores={"format": 0.5, "judge": 2.0}),
    ]
    finished = group([1, 1, 0], details=details)
    seen = generated_group(finished)
    assert seen.episodes == (0, 0, 1)
    assert seen.scores == ({"format": 1.0}, {}, {"format": 0.5, "judge": 2.0})
    assert filters("reward_std").rejected_by(finished) == ""
    assert filters(f"{HERE}:tells_format").rejected_by(finished) == ""


def test_an_episode_counts_once_however_many_samples_it_has() -> None:
    """Three samples of the one that was right do not make the task easy."""
    details = [pb.SampleDetails(episode=episode) for episode in (0, 0, 0, 1)]
    finished = group([1, 1, 1, 0], raw_rewards=[1, 1, 1, 0], details=details)
    assert filters("raw_reward_mean", high=0.6).rejected_by(finished) == ""
    assert filters("raw_reward_mean", low=0.6).rejected_by(finished) == "raw_reward_mean"
    assert filters("reward_std", above=0.49).rejected_by(finished) == ""
    assert filters("reward_std", above=0.5).rejected_by(finished) == "reward_std"
    apart = group([0, 1, 0, 1], details=[pb.SampleDetails(episode=e) for e in (0, 0, 1, 1)])
    assert filters("reward_std").rejected_by(apart) == "", "its samples have advantages"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("reward_sdt", {}, "filters.0.name: 'reward_sdt' is unknown; known: reward_std"),
        ("no.such.module:keep", {}, "filters.0.name: no.such.module:keep"),
        (f"{HERE}:nothing", {}, "names no function"),
        ("reward_std", {"abov": 1}, "filters.0.settings.*abov"),
        (f"{HERE}:short", {}, "filters.0.settings.*limit"),
        ("raw_reward_mean", {"low": 0.2, "high": 0.1}, r"low 0\.2 is not up to high 0\.1"),
        ("raw_reward_mean", {"low": 1.5}, "filters.0.settings.*high 1: no group"),
        ("finished", {"share": 80}, "filters.0.settings.*share 80 is more than all"),
        ("reward_std", {"above": -0.1}, "above -0.1 is no spread"),
        ("reward_std", {"above": float("nan")}, "above nan is no spread"),
        ("reward_std", {"above": "0.1"}, "filters.0.settings.*str"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(name, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        filters(name, **settings)


def test_an_answer_that_is_neither_yes_nor_no_is_an_error() -> None:
    """None would read as no, and drop every group."""
    with pytest.raises(FilterError, match="unsure answered None"):
        filters(f"{HERE}:unsure").rejected_by(group([1, 0]))
