"""Rewards as functions of users and services give them: numbers, objects, or `Reward`s."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.rollout.environments.environment import Reward

_FIELDS = {"reward", "raw_reward", "scores", "trained"}


class InvalidRewardError(ValueError):
    """Something that is no list of rewards; the message says what is wrong with it."""


def rewards_from(values: Any, count: int) -> list[Reward]:
    """One per response. Raises InvalidRewardError."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidRewardError(f"rewards must be a list, not {type(values).__name__}")
    if len(values) != count:
        raise InvalidRewardError(f"{len(values)} rewards for {count} responses")
    return [_reward_from(value, index) for index, value in enumerate(values)]


def _reward_from(value: Any, index: int) -> Reward:
    where = f"rewards[{index}]"
    if isinstance(value, Reward):
        value = {
            "reward": value.reward,
            "raw_reward": value.raw_reward,
            "scores": value.scores,
            "trained": value.trained,
        }
    if not isinstance(value, Mapping):
        number = _number(value, where)
        return Reward(reward=number, raw_reward=number)
    if unknown := value.keys() - _FIELDS:
        raise InvalidRewardError(f"{where} has unknown keys: {', '.join(sorted(unknown))}")
    if "reward" not in value:
        raise InvalidRewardError(f"{where} has no reward")
    raw, scores = value.get("raw_reward"), value.get("scores") or {}
    trained = value.get("trained", True)
    if not isinstance(scores, Mapping) or not isinstance(trained, bool):
        raise InvalidRewardError(f"{where}: scores must be an object, trained true or false")
    return Reward(
        reward=_number(value["reward"], f"{where}.reward"),
        raw_reward=None if raw is None else _number(raw, f"{where}.raw_reward"),
        scores={name: _number(score, f"{where}.scores.{name}") for name, score in scores.items()},
        trained=trained,
    )


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidRewardError(f"{where} is {value!r}, not a number") from None
    if isinstance(value, str) or not math.isfinite(number):
        raise InvalidRewardError(f"{where} is {value!r}, not a finite number")
    return number
