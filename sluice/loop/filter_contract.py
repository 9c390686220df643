"""What a filter of a user must keep to, as a check for its own test."""

from __future__ import annotations

from typing import Any

from sluice.config import ConfigError
from sluice.loop.config import FilterConfig
from sluice.loop.filters import FilterError, GeneratedGroup, GroupFilters, group_to_proto


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
            filters.rejected_by(group_to_proto(group))
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
