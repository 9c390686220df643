"""`reasoning_gym`: generated tasks by data-set name, https://github.com/open-thought/reasoning-gym.

The library gives partial credit to an answer hidden in a sentence, in some data sets full
credit. Here an answer counts if it is the answer and nothing else, unless `partial_credit`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from pydantic import Field, JsonValue

from services.rollout.environments.alarm import Alarm, JudgingTime
from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskRequest,
    TextTokenizer,
    required_index,
)
from services.rollout.environments.graders.grader import last_tagged

logger = logging.getLogger(__name__)

# What the library raises over an answer that it does not expect.
_OF_ANSWERS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SyntaxError),
    *(TypeError, ValueError),
)


class ReasoningGymSettings(JudgingTime):
    """Task i depends on `seed`, `config` and i. Shots are further tasks, never among them."""

    dataset: str = Field(min_length=1)
    size: int = Field(500, ge=1)
    seed: int = 0
    config: Mapping[str, Any] = Field(default_factory=dict)
    system_prompt: str = ""
    template: dict[str, JsonValue] = Field(default_factory=dict)  # variables of the chat template
    shots: int = Field(0, ge=0, le=1000)  # solved tasks shown before the question
    examples: tuple[tuple[str, str], ...] = ()  # (question, answer) shown before the shots
    answer_tag: str = ""  # e.g. `answer`: the last <answer>...</answer> counts
    partial_credit: bool = False  # the library's own score


class ReasoningGymEnvironment(Environment):
    """Runs in a process of its own: the import takes a second, some graders take longer."""

    name = "reasoning_gym"
    settings_type = ReasoningGymSettings
    placement = Placement.PROCESS

    def __init__(
        self, settings: ReasoningGymSettings, tokenizer: TextTokenizer | None = None
    ) -> None:
        self._settings = settings
        self._dataset = _create_dataset(settings)
        self._seen = set[type[Exception]]()  # of answers, told once
        self._entry = lru_cache(maxsize=1024)(self._dataset.__getitem__)
        first = settings.size
        self._shots = [self._entry(first + shot) for shot in range(settings.shots)]

    @classmethod
    def check(cls, settings: ReasoningGymSettings, request: TaskRequest) -> None:
        required_index(request, settings.size)

    def make_task(self, request: TaskRequest) -> Task:
        index = required_index(request, self._settings.size)
        entry = self._entry(index)
        turns = [{"role": "system", "content": self._settings.system_prompt}]
        if not self._settings.system_prompt:
            turns.clear()
        shown = [(shot["question"], self._shown(shot)) for shot in self._shots]
        for question, answer in (*self._settings.examples, *shown):
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer})
        turns.append({"role": "user", "content": entry["question"]})
        return Task(
            messages=tuple(turns),
            template=self._settings.template,
            answer=str(entry["answer"] or ""),
            state={"index": index},
        )

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        entry, alarm = self._entry(int(task.state["index"])), Alarm(self._settings)
        scores = [
            alarm.within(partial(self._score, response.text, entry), 0.0) for response in responses
        ]
        return [Reward(reward=score, raw_reward=score) for score in scores]

    def _score(self, text: str, entry: Mapping[str, Any]) -> float:
        tag = self._settings.answer_tag
        text = (last_tagged(text, tag) if tag else text).strip()
        if self._settings.partial_credit:
            return self._by_library(text, entry)
        if entry["answer"] is not None:
            return float(text == entry["answer"].strip())
        # Many answers are right; the library knows, and half right is wrong.
        return float(self._by_library(text, entry) == 1.0)

    def _by_library(self, text: str, entry: Mapping[str, Any]) -> float:
        try:
            return float(self._dataset.score_answer(text, entry)) if text else 0.0
        except _OF_ANSWERS as error:
            if type(error) not in self._seen:
                self._seen.add(type(error))
                logger.warning("%s: answers are wrong that raise %r", self._settings.dataset, error)
            return 0.0

    def _shown(self, shot: Mapping[str, Any]) -> str:
        tag, answer = self._settings.answer_tag, str(shot["answer"] or "")
        return f"<{tag}>{answer}</{tag}>" if tag else answer


def _create_dataset(settings: ReasoningGymSettings) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if settings.dataset not in DATASETS:
        raise SettingError("dataset", f"{settings.dataset!r} is unknown; known: {sorted(DATASETS)}")
    for key in ("size", "seed"):
        if key in settings.config:
            raise SettingError(f"config.{key}", f"is the setting `{key}`")
    try:
        return create_dataset(
            settings.dataset,
            size=settings.size + settings.shots,
            seed=settings.seed,
            **settings.config,
        )
    except (AssertionError, TypeError, ValueError) as error:  # how the library refuses a config
        raise SettingError("config", str(error)) from None
