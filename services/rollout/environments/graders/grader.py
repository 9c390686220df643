"""What a grader does: rewards the answers of a group, whatever environment made the task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from pydantic import model_validator

from services.rollout.environments.environment import (
    Placement,
    Response,
    Reward,
    Task,
    TextTokenizer,
)
from sluice.config import Config


class NoSettings(Config):
    """Of a grader that takes none."""


class Grader(ABC):
    """Built from its settings; INLINE ones answer in microseconds or are coroutines."""

    settings_type: ClassVar[type[Config]] = NoSettings
    placement: ClassVar[Placement] = Placement.INLINE
    needs_text: ClassVar[bool] = True

    def __init__(self, settings: Any, tokenizer: TextTokenizer | None = None) -> None:
        """Raises SettingError for a value that only the grader can judge."""
        self._settings = settings

    @abstractmethod
    def grade(
        self, task: Task, responses: Sequence[Response]
    ) -> list[Reward] | Awaitable[list[Reward]]:
        """One reward per response, in order; all responses of the group are there."""


class AnswerSettings(Config):
    """Which part of a response is its answer: all of it, unless a mark is named."""

    answer_tag: str = ""  # e.g. `answer`: the last <answer>...</answer>
    boxed: bool = False  # the last \\boxed{...}

    @model_validator(mode="after")
    def _one_mark(self) -> AnswerSettings:
        if self.answer_tag and self.boxed:
            raise ValueError("give answer_tag or boxed, not both")
        return self

    def find(self, text: str) -> str:
        """The answer in a response, stripped; empty where its mark is missing."""
        if self.answer_tag:
            return last_tagged(text, self.answer_tag).strip()
        return (last_boxed(text) if self.boxed else text).strip()


def answers_of(task: Task) -> Sequence[str]:
    """All right answers of a task; a row may give several."""
    several = task.state.get("answers")
    return several if several else [task.answer]


def exact(is_right: bool) -> Reward:
    """1 or 0."""
    return Reward(reward=float(is_right), raw_reward=float(is_right))


def last_tagged(text: str, tag: str) -> str:
    """What stands in the last <tag>...</tag>; empty if it is missing."""
    before, found, _ = text.rpartition(f"</{tag}>")
    return before.rpartition(f"<{tag}>")[2] if found and f"<{tag}>" in before else ""


def last_boxed(text: str) -> str:
    """What stands in the last closed \\boxed{...}, whose braces may nest; empty without one."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for index in range(start + len("\\boxed"), len(text)):
            depth += (text[index] == "{") - (text[index] == "}")
            if not depth:
                return text[start + len("\\boxed{") : index]
        end = start
    return ""
