"""Graders by name; another name is a user's function `package.module:name`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.rollout.environments.environment import Placement, SettingError, TextTokenizer
from services.rollout.environments.graders.grader import Grader
from services.rollout.environments.registry import load, parse_settings

_HERE = "services.rollout.environments.graders"
GRADERS = {  # nothing heavy is imported until chosen
    "exact_match": f"{_HERE}.texts:ExactMatch",
    "position_match": f"{_HERE}.texts:PositionMatch",
    "f1": f"{_HERE}.texts:F1",
    "choice": f"{_HERE}.texts:Choice",
    "math": f"{_HERE}.mathematics:Mathematics",
    "remote": f"{_HERE}.remote:Remote",
}


def is_function(name: str) -> bool:
    """Whether a reward is a user's function."""
    return ":" in name


def place_grader(name: str) -> Placement:
    """Where a grader runs. Raises SettingError for an unknown name."""
    return Placement.PROCESS if is_function(name) else _find(name).placement


def needs_text(name: str) -> bool:
    """Whether responses are decoded for it. Raises SettingError for an unknown name."""
    return is_function(name) or _find(name).needs_text


def create_grader(
    name: str, settings: Mapping[str, Any], tokenizer: TextTokenizer | None = None
) -> Grader:
    """Raises SettingError, whose key is `reward` or below `reward_settings`."""
    if is_function(name):
        from services.rollout.environments.graders.grader import UserFunction

        return UserFunction(name, settings)
    found = _find(name)
    try:
        parsed = parse_settings(found, settings)
    except SettingError as error:
        key = f"reward_settings.{error.key}".rstrip(".")
        raise SettingError(key, str(error)) from None
    return found(parsed, tokenizer)


def _find(name: str) -> type[Grader]:
    if name not in GRADERS:
        known = ", ".join(GRADERS)
        raise SettingError(
            "reward", f"{name!r} is unknown; known: {known}, package.module:function"
        )
    found: type[Grader] = load(GRADERS[name])
    return found
