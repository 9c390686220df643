"""Which finished groups are worth training on: built-in rules, and functions of users.

A filter is `keep(group: GeneratedGroup, **settings) -> bool`. It runs in the loop, so it must be
quick, and it sees numbers only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sluice.algo.aggregation import Moments
from sluice.algo.estimator import Sibling
from sluice.algo.estimators.groups import group_moments
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.config import ConfigError, named_function
from sluice.loop.config import FilterConfig
from sluice.runtime import wire


class FilterError(Exception):
    """A filter answered something else than yes or no."""


@dataclass(frozen=True, kw_only=True)
class GeneratedGroup:
    """A finished group as filters see it; one entry a sample, of which an episode may have several.

    scores: further numbers of the environment, by name; not every sample has the same.
    finish_reasons: `stop` or `length`.
    """

    group_id: str
    rewards: tuple[float, ...]
    raw_rewards: tuple[float, ...]
    response_lengths: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    scores: tuple[Mapping[str, float], ...]
    episodes: tuple[int, ...]
    prompt_length: int
    min_version: int
    max_version: int


Keep = Callable[[GeneratedGroup], bool]


def reward_std(group: GeneratedGroup, *, above: float = 0.0) -> bool:
    """The rewards differ (DAPO, arXiv 2503.14476): else every advantage is zero."""
    moments = _moments(group, group.rewards)
    return math.sqrt(moments.m2 / moments.count) > above


def raw_reward_mean(group: GeneratedGroup, *, low: float = 0.0, high: float = 1.0) -> bool:
    """Neither too hard nor too easy: the mean raw reward is within [low, high]."""
    return low <= _moments(group, group.raw_rewards).mean <= high


def _moments(group: GeneratedGroup, rewards: Sequence[float]) -> Moments:
    """Every episode counts once."""
    both = zip(rewards, group.episodes, strict=True)
    return group_moments([Sibling((reward,), 0, episode) for reward, episode in both])


def finished(group: GeneratedGroup, *, share: float = 1.0) -> bool:
    """At least this share of the samples ended by itself, not for want of tokens."""
    ended = sum(reason == "stop" for reason in group.finish_reasons)
    return ended >= share * len(group.finish_reasons)


def _check_band(*, low: float = 0.0, high: float = 1.0) -> None:
    if not low <= high:
        raise ValueError(f"low {low:g} is not up to high {high:g}: no group would be kept")


def _check_share(*, share: float = 1.0) -> None:
    if not share <= 1:
        raise ValueError(f"share {share:g} is more than all samples: no group would be kept")


def _check_spread(*, above: float = 0.0) -> None:
    if not 0 <= above < math.inf:
        raise ValueError(f"above {above:g} is no spread of rewards: it is 0 or more, and finite")


FILTERS: Mapping[str, Callable[..., bool]] = {
    "reward_std": reward_std,
    "raw_reward_mean": raw_reward_mean,
    "finished": finished,
}
_CHECKS: Mapping[str, Callable[..., None]] = {
    "reward_std": _check_spread,
    "raw_reward_mean": _check_band,
    "finished": _check_share,
}


class GroupFilters:
    """All filters of a run, asked in order."""

    def __init__(self, configs: Sequence[FilterConfig] = ()) -> None:
        """Raises ConfigError for a name that is none, or settings that it does not take."""
        self._keeps = [
            (config.name, _load(config, f"filters.{index}")) for index, config in enumerate(configs)
        ]

    def __bool__(self) -> bool:
        return bool(self._keeps)

    def rejected_by(self, finished: pb.FinishedGroup) -> str:
        """Name of the first filter that does not keep the group; empty if all do.

        Raises FilterError, and what a filter raises.
        """
        return self.rejecting(generated_group(finished))

    def rejecting(self, group: GeneratedGroup) -> str:
        """Returns the name of the first filter that does not keep the group, as `rejected_by`."""
        for name, keep in self._keeps:
            verdict = keep(group)
            if not isinstance(verdict, bool):
                raise FilterError(f"filter {name} answered {verdict!r}, not True or False")
            if not verdict:
                return name
        return ""


def generated_group(finished: pb.FinishedGroup) -> GeneratedGroup:
    """The group without where its samples lie."""
    count = len(finished.rewards)
    details = finished.details or [pb.SampleDetails(episode=index) for index in range(count)]
    return GeneratedGroup(
        group_id=finished.group_id,
        rewards=tuple(finished.rewards),
        raw_rewards=tuple(finished.raw_rewards),
        response_lengths=tuple(finished.response_lengths),
        finish_reasons=tuple(wire.finish_reason_name(r) for r in finished.finish_reasons),
        scores=tuple(dict(detail.scores) for detail in details),
        episodes=tuple(detail.episode for detail in details),
        prompt_length=finished.prompt_length,
        min_version=finished.min_version,
        max_version=finished.max_version,
    )


def _load(config: FilterConfig, key: str) -> Keep:
    keep = FILTERS.get(config.name)
    if keep is None:
        keep = named_function(config.name, f"{key}.name", known=tuple(FILTERS))
    try:
        inspect.signature(keep).bind(None, **config.settings)
        if check := _CHECKS.get(config.name):
            check(**config.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.settings: {config.name}: {error}") from None
    return partial(keep, **config.settings)


def check_filter(path: str, settings: dict[str, Any], *groups: GeneratedGroup) -> None:
    """The filter answers True or False for any group: of equal rewards, of one sample, cut off,
    of several samples an episode, with numbers that only some samples have; and for `groups`.

    Raises AssertionError that says what is wrong, and what the filter raises.
    """
    try:
        filters = GroupFilters([FilterConfig(name=path, settings=settings)])
    except ConfigError as error:
        raise AssertionError(str(error)) from None
    for group in (*ODD_GROUPS, *groups):
        try:
            filters.rejecting(group)
        except FilterError as error:
            raise AssertionError(f"{error}, for {group}") from None


def _group(rewards: tuple[float, ...], **values: Any) -> GeneratedGroup:
    count = len(rewards)
    fields: dict[str, Any] = {
        "raw_rewards": rewards,
        "response_lengths": (3,) * count,
        "finish_reasons": ("stop",) * count,
        "scores": ({},) * count,
        "episodes": tuple(range(count)),
        **values,
    }
    return GeneratedGroup(
        group_id="g", rewards=rewards, prompt_length=5, min_version=1, max_version=2, **fields
    )


ODD_GROUPS = (
    _group((1.0, 0.0, 0.5, 0.0)),
    _group((1.0, 1.0)),
    _group((0.0,)),
    _group((-2.0, 3.0), raw_rewards=(0.0, 1.0)),
    _group((1.0, 0.0), finish_reasons=("length", "length"), response_lengths=(0, 4096)),
    _group((1.0, 1.0, 0.0), episodes=(0, 0, 1)),
    _group((1.0, 0.0), scores=({"format": 1.0}, {})),
)
