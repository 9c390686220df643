"""`math`: equal in value, by math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from services.rollout.environments.alarm import Alarm, JudgingTime
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


class MathSettings(AnswerSettings, JudgingTime):
    """The marks of an answer, and the time for it."""


class Mathematics(Grader):
    """Compares values in a process of its own: sympy takes its time, and may not come back."""

    settings_type = MathSettings
    placement = Placement.PROCESS
    _settings: MathSettings

    def __init__(self, settings: MathSettings, tokenizer: TextTokenizer | None = None) -> None:
        super().__init__(settings)
        try:
            import math_verify
        except ImportError as error:
            raise SettingError("reward", f"math needs the package math-verify: {error}") from None
        self._library = math_verify
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that it has no limit
        self._read_gold = lru_cache(maxsize=1024)(self._gold)

    def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        gold = [self._read_gold(answer) for answer in answers_of(task)]
        alarm = Alarm(self._settings)
        return [
            exact(alarm.within(partial(self._is_right, response.text, gold), False))
            for response in responses
        ]

    def _gold(self, answer: str) -> list[Any]:
        wrapped = answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"
        found: list[Any] | None = Alarm(self._settings).within(partial(self._parse, wrapped), None)
        if found is None:
            raise TaskError("row.answer", f"{answer!r} took too long to read as mathematics")
        if not found:
            raise TaskError("row.answer", f"{answer!r} cannot be read as mathematics")
        return found

    def _is_right(self, text: str, gold: Sequence[list[Any]]) -> bool:
        marked = self._settings.find(text)
        if not marked:
            return False
        is_marked = self._settings.boxed or self._settings.answer_tag
        found = self._parse(f"\\boxed{{{marked}}}" if is_marked else marked)
        return bool(found) and any(
            self._library.verify(one, found, timeout_seconds=None) for one in gold
        )

    def _parse(self, text: str) -> list[Any]:
        expressions: list[Any] = self._library.parse(text, parsing_timeout=None)
        return expressions
