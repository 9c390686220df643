"""`math`: equal in value, by math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field

from services.rollout.environments.environment import (
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TextTokenizer,
)
from services.rollout.environments.graders.grader import AnswerSettings, Grader, answers_of, exact


class MathSettings(AnswerSettings):
    """`seconds`: for reading or comparing one answer; then it is wrong."""

    seconds: int = Field(5, ge=1, le=3600)  # an alarm of the system takes no 2**31


class Mathematics(Grader):
    """Compares values in a process of its own: sympy takes its time, and may not come back."""

    settings_type = MathSettings
    placement = Placement.PROCESS

    def __init__(self, settings: MathSettings, tokenizer: TextTokenizer | None = None) -> None:
        super().__init__(settings)
        try:
            import math_verify
        except ImportError as error:
            raise SettingError("reward", f"math needs the package math-verify: {error}") from None
        self._library = math_verify
        self._read_gold = lru_cache(maxsize=1024)(self._gold)

    def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        gold = [self._read_gold(answer) for answer in answers_of(task)]
        return [exact(self._is_right(response.text, gold)) for response in responses]

    def _gold(self, answer: str) -> list[Any]:
        wrapped = answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"
        found = self._parse(wrapped)
        if not found:
            raise TaskError("row.answer", f"{answer!r} cannot be read as mathematics")
        return found

    def _is_right(self, text: str, gold: Sequence[list[Any]]) -> bool:
        marked = self._settings.find(text)
        if not marked:
            return False
        is_marked = self._settings.boxed or self._settings.answer_tag
        found = self._parse(f"\\boxed{{{marked}}}" if is_marked else marked)
        seconds = self._settings.seconds
        return bool(found) and any(
            self._library.verify(one, found, timeout_seconds=seconds) for one in gold
        )

    def _parse(self, text: str) -> list[Any]:
        expressions: list[Any] = self._library.parse(text, parsing_timeout=self._settings.seconds)
        return expressions
