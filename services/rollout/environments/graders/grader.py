"""Graders reward the answers of a group, whatever environment made the task.

They are chosen by name; another name is a user's function `package.module:name`.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import model_validator

from services.rollout.environments.environment import (
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TextTokenizer,
    answer_of,
    rewards_from,
)
from services.rollout.environments.registry import load, load_function, parse_settings
from sluice.config import Config

_BOXED = "\\boxed{"
_BRACES = re.compile(r"[{}]")
_HERE = "services.rollout.environments.graders"
GRADERS = {  # nothing heavy is imported until chosen
    "exact_match": f"{_HERE}.texts:ExactMatch",
    "position_match": f"{_HERE}.texts:PositionMatch",
    "f1": f"{_HERE}.texts:F1",
    "choice": f"{_HERE}.texts:Choice",
    "math": f"{_HERE}.mathematics:Mathematics",
    "code": f"{_HERE}.code:Code",
    "remote": f"{_HERE}.remote:Remote",
    "judge": f"{_HERE}.judge:ModelJudge",
    "reward_model": f"{_HERE}.reward_model:RewardModel",
}


class NoSettings(Config):
    """The settings of a grader that takes none."""


class Grader(ABC):
    """Rewards answers. INLINE ones answer in microseconds or are coroutines."""

    settings_type: ClassVar[type[Config]] = NoSettings
    placement: ClassVar[Placement] = Placement.INLINE
    needs_text: ClassVar[bool] = True

    def __init__(self, settings: Any, tokenizer: TextTokenizer | None = None) -> None:
        """Raises SettingError for a value that only the grader can judge."""
        self._settings = settings

    @classmethod
    def check(cls, task: Task) -> None:
        """Raises TaskError for a task that it could not judge, before anything is sampled."""
        return None

    @abstractmethod
    def grade(
        self, task: Task, responses: Sequence[Response]
    ) -> list[Reward] | Awaitable[list[Reward]]:
        """Returns one reward per response, in order; all responses of the group are there."""


class AnswerSettings(Config):
    """Names the part of a response that is its answer: all of it, unless a mark is named."""

    answer_tag: str = ""  # e.g. `answer`: the last <answer>...</answer>
    boxed: bool = False  # the last \\boxed{...}

    @model_validator(mode="after")
    def _one_mark(self) -> AnswerSettings:
        if self.answer_tag and self.boxed:
            raise ValueError("give answer_tag or boxed, not both")
        return self

    def find(self, text: str) -> str:
        """Returns the answer in a response, stripped; empty where its mark is missing."""
        if self.answer_tag:
            return last_tagged(text, self.answer_tag).strip()
        return (last_boxed(text) if self.boxed else text).strip()

    def right(self, task: Task) -> Sequence[str]:
        """Returns all right answers, stripped.

        Raises TaskError for an empty one where a mark is named: to leave it out would be right.
        """
        answers = [answer.strip() for answer in answers_of(task)]
        if "" in answers and (self.answer_tag or self.boxed):
            raise TaskError("row.answer", "is empty, and so is what has no mark of an answer")
        return answers


def answers_of(task: Task) -> Sequence[str]:
    """Returns all right answers of a task; a row may give several."""
    several = task.state.get("answers")
    return several if several else [task.answer]


def exact(is_right: bool) -> Reward:
    """Returns reward 1 or 0."""
    return Reward(reward=float(is_right), raw_reward=float(is_right))


def last_tagged(text: str, tag: str) -> str:
    """Returns what stands in the last <tag>...</tag>; empty if it is missing."""
    before, found, _ = text.rpartition(f"</{tag}>")
    return before.rpartition(f"<{tag}>")[2] if found and f"<{tag}>" in before else ""


def last_boxed(text: str) -> str:
    """Returns what stands in the last closed \\boxed{...}, whose braces may nest, or ""."""
    found, opened = (0, 0), list[int]()
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end())
        elif opened:
            start = opened.pop()
            if text.endswith(_BOXED, 0, start):
                found = max(found, (start, brace.start()))
    return text[slice(*found)]


class UserFunction(Grader):
    """Calls a user's function. An exception of it fails the group, and ends the process."""

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
        """Calls the function, and waits for it where it is a coroutine's.

        Raises InvalidRewardError, and what the function raises.
        """
        values = answer_of(self._function(task, list(responses), **self._values))
        return rewards_from(values, len(responses))


def is_function(name: str) -> bool:
    """Says whether a reward is a user's function."""
    return ":" in name


def place_grader(name: str) -> Placement:
    """Returns where a grader runs. Raises SettingError for an unknown name."""
    return Placement.PROCESS if is_function(name) else _load_grader(name).placement


def needs_text(name: str) -> bool:
    """Says whether responses are decoded for it. Raises SettingError for an unknown name."""
    return is_function(name) or _load_grader(name).needs_text


def check_task(name: str, task: Task) -> None:
    """Raises TaskError for a task that the grader could not judge; functions of users take any."""
    if not is_function(name):
        _load_grader(name).check(task)


def create_grader(
    name: str, settings: Mapping[str, Any], tokenizer: TextTokenizer | None = None
) -> Grader:
    """Builds a grader. Raises SettingError, whose key is `reward` or below `reward_settings`."""
    if is_function(name):
        return UserFunction(name, settings)
    grader_type = _load_grader(name)
    try:
        parsed = parse_settings(grader_type, settings)
    except SettingError as error:
        key = f"reward_settings.{error.key}".rstrip(".")
        raise SettingError(key, str(error)) from None
    return grader_type(parsed, tokenizer)


def _load_grader(name: str) -> type[Grader]:
    if name not in GRADERS:
        known = ", ".join(GRADERS)
        raise SettingError(
            "reward", f"{name!r} is unknown; known: {known}, package.module:function"
        )
    grader_type: type[Grader] = load(GRADERS[name])
    return grader_type
