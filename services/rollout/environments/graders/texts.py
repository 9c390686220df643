"""Compares texts: exact match, word overlap, multiple choice, tokens at their place."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from services.rollout.environments.environment import (
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TextTokenizer,
)
from services.rollout.environments.graders.grader import AnswerSettings, Grader, answers_of, exact

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatchSettings(AnswerSettings):
    """`ignore_case` compares without regard to case."""

    ignore_case: bool = False


class ExactMatch(Grader):
    """Takes the answer and nothing else; stripped texts are compared."""

    settings_type = ExactMatchSettings
    _settings: ExactMatchSettings

    def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        right = {self._fold(answer) for answer in self._settings.right(task)}
        answers = [self._settings.find(response.text) for response in responses]
        return [exact(self._fold(text) in right) for text in answers]

    def _fold(self, text: str) -> str:
        return text.casefold() if self._settings.ignore_case else text


class F1(Grader):
    """Measures word overlap with the best answer, normalised as SQuAD does (arXiv 1606.05250).

    The raw reward is 1 if the normalised words are the same.
    """

    settings_type = AnswerSettings
    _settings: AnswerSettings

    def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        wanted = [words(answer) for answer in self._settings.right(task)]
        rewards = []
        for response in responses:
            found = words(self._settings.find(response.text))
            best = max(overlap(found, answer) for answer in wanted)
            rewards.append(Reward(reward=best, raw_reward=float(found in wanted)))
        return rewards


class ChoiceSettings(AnswerSettings):
    """`letters`: those a task offers."""

    letters: str = Field("ABCD", pattern=r"^[A-Z]{2,26}$")


class Choice(Grader):
    """Reads a letter, as in GPQA: the last of `answer ... X`, else the only letter.

    `the answer is B`, `Answer: (B)`, `(B)`, `B.` are all B. No letter, or two, is no answer. A
    task whose own answer is none of the letters is refused: nobody could be right.
    """

    settings_type = ChoiceSettings
    _settings: ChoiceSettings

    def __init__(self, settings: ChoiceSettings, tokenizer: TextTokenizer | None = None) -> None:
        super().__init__(settings)
        letters = settings.letters
        between = r"[^A-Za-z0-9\n]*"
        self._stated = re.compile(  # no two parts that match the same: time is linear
            rf"(?:answer|choice|option)\b{between}(?:(?:is|was)\b{between})?"
            rf"(?:(?:option|choice){between})?([{letters}])"
            r"(?![A-Za-z0-9]|(?-i:(?<=[ai])) [A-Za-z])",  # `the answer is a prime` names none
            re.IGNORECASE,
        )
        self._alone = re.compile(rf"(?<![A-Za-z0-9'])([{letters}])(?![A-Za-z0-9'])")

    def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        right = {answer.strip().strip("().").upper() for answer in answers_of(task)}
        if others := right - {*self._settings.letters}:
            letters = self._settings.letters
            raise TaskError("row.answer", f"{min(others)[:80]!r} is none of the letters {letters}")
        return [exact(self.find(response.text) in right) for response in responses]

    def find(self, text: str) -> str:
        """Returns the letter, in upper case; empty if there is none."""
        answer = self._settings.find(text)
        if stated := self._stated.findall(answer):
            return str(stated[-1]).upper()
        alone = set(self._alone.findall(answer))
        return str(alone.pop()) if len(alone) == 1 else ""


class PositionMatch(Grader):
    """Counts the share of the answer's tokens, end of sequence included, at their place.

    The raw reward is 1 if the whole is right.
    """

    needs_text = False

    def __init__(self, settings: object, tokenizer: TextTokenizer | None = None) -> None:
        if tokenizer is None or tokenizer.end_token_id is None:
            raise SettingError("reward", "position_match needs an end-of-sequence token")
        self._tokenizer, self._end = tokenizer, tokenizer.end_token_id

    def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        target = [*self._tokenizer.encode(task.answer, special=False), self._end]
        return [_position_match(response.token_ids, target) for response in responses]


def words(text: str) -> list[str]:
    """Returns the lower-case words without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def overlap(found: Sequence[str], wanted: Sequence[str]) -> float:
    """Returns the harmonic mean of precision and recall of words; 1 if both are empty."""
    common = sum((Counter(found) & Counter(wanted)).values())
    if not common:
        return float(not found and not wanted)
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _position_match(token_ids: Sequence[int], target: Sequence[int]) -> Reward:
    right = sum(map(int.__eq__, token_ids, target))
    whole = right == len(target) == len(token_ids)
    return Reward(reward=right / len(target), raw_reward=float(whole))
