"""A user's function as a grader: `reward(task, responses, **settings)`.

It sees the whole group and gives a number or a `Reward` per response, in order. It runs in a
process of its own, with the deadline and the attempts of `episodes.graders`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.rollout.environments.environment import (
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
)
from services.rollout.environments.graders.answers import rewards_from
from services.rollout.environments.graders.grader import Grader
from services.rollout.environments.paths import load_function


class UserFunction(Grader):
    """An exception of the function fails the group, and ends the process."""

    placement = Placement.PROCESS

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Raises SettingError for a path or settings that do not fit."""
        self._path, self._values = path, dict(settings)
        self._function: Callable[..., Any] = load_function(path, "reward")
        try:
            inspect.signature(self._function).bind(None, [], **self._values)
        except TypeError as error:
            raise SettingError("reward_settings", f"{path}: {error}") from None

    def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        """Raises InvalidRewardError, and what the function raises."""
        values = self._function(task, list(responses), **self._values)
        return rewards_from(values, len(responses))
