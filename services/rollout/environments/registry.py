"""Environments by name. A path names module and class; it is imported when chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from pydantic import ValidationError

from services.rollout.environments.environment import (
    Environment,
    SettingError,
    TaskError,
    TaskRequest,
    TextTokenizer,
)
from services.rollout.environments.paths import load
from sluice.config import Config

ENVIRONMENTS = {
    "tools": "services.rollout.environments.tools:ToolsEnvironment",
    "prompts": "services.rollout.environments.prompts:PromptsEnvironment",
    "reasoning_gym": "services.rollout.environments.reasoning_gym:ReasoningGymEnvironment",
}


def load_environment(path: str) -> type[Environment]:
    """The class at `package.module:Class`. Raises ValueError where there is none."""
    found = load(path)
    if not isinstance(found, type) or not issubclass(found, Environment):
        raise ValueError(f"{path} names no Environment")
    return found


class Configured(Protocol):
    """Has settings of a type of its own."""

    settings_type: ClassVar[type[Config]]


def parse_settings(found: type[Configured], values: Mapping[str, Any]) -> Config:
    """Raises SettingError naming the first unknown or wrong key."""
    try:
        return found.settings_type(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(found.settings_type.model_fields)
        unknown = first["type"] == "extra_forbidden"
        message = f"unknown key; known: {known}" if unknown else first["msg"]
        raise SettingError(key, message) from None


def create_environment(
    path: str, values: Mapping[str, Any], tokenizer: TextTokenizer | None = None
) -> Environment:
    """Raises SettingError for a wrong setting."""
    found = load_environment(path)
    return found(parse_settings(found, values), tokenizer)


def required_row(request: TaskRequest) -> Mapping[str, Any]:
    """The row of a request; raises TaskError where it has none."""
    if request.row is None:
        raise TaskError("row", "this environment reads rows of a prompt file")
    return request.row


def required_index(request: TaskRequest, size: int) -> int:
    """The index of a request within 0..size-1; raises TaskError where it is not."""
    if request.index is None:
        raise TaskError("index", "this environment generates tasks by index")
    if not 0 <= request.index < size:
        raise TaskError("index", f"{request.index} is not within 0..{size - 1}")
    return request.index
