"""`reward_model`: a model with a value head scores each answer, over HTTP.

POST {"model", "text": [...]} -> [{"embedding": [score]}, ...], as SGLang's `/classify` has it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from services.rollout.environments.environment import (
    InvalidRewardError,
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TextTokenizer,
    rewards_from,
)
from services.rollout.environments.graders.remote import (
    AskingGrader,
    Questions,
    RemoteSettings,
    RewardServiceError,
)
from sluice.samples import tokenizer as texts
from sluice.samples.chat_template import ChatTemplateError
from sluice.samples.messages import MessageError, has_parts, template_messages

KEY = "REWARD_MODEL_API_KEY"  # set where the worker runs: no request carries a secret


class RewardModelSettings(RemoteSettings):
    """`url` is the whole address, `/classify` included. `deadline_seconds` is for a group.

    tokenizer: directory of the reward model on the worker's machine, whose chat template writes
    conversations; without it a task must be a plain prompt. batch_size: texts of one question.
    """

    model: str = Field(min_length=1, max_length=256)
    tokenizer: str = ""
    batch_size: int = Field(64, ge=1, le=4096)


class RewardModel(AskingGrader):
    """Asks for the scores of a group, `batch_size` texts after another."""

    settings_type = RewardModelSettings
    service_key = "classify_url"
    _settings: RewardModelSettings

    def __init__(
        self, settings: RewardModelSettings, tokenizer: TextTokenizer | None = None
    ) -> None:
        """Raises SettingError for a directory without a tokenizer or a chat template."""
        super().__init__(settings)
        self._tokenizer: texts.TextTokenizer | None = None
        if settings.tokenizer:
            try:
                self._tokenizer = texts.TextTokenizer(Path(settings.tokenizer))
                self._template = self._tokenizer.chat_template
            except (OSError, ValueError) as error:
                raise SettingError("reward_settings.tokenizer", str(error)) from None

    @classmethod
    def check(cls, task: Task) -> None:
        """Raises TaskError for images, which a model that is sent text would not see."""
        for index, message in enumerate(task.messages):
            if has_parts([message]) and not _is_text(message):
                raise TaskError(f"row.messages[{index}]", "a reward model is sent text alone")

    async def _rewards(
        self, questions: Questions, task: Task, responses: Sequence[Response]
    ) -> list[Reward]:
        settings, scores = self._settings, list[float]()
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        shown = [self._text(task, response) for response in responses]
        for first in range(0, len(shown), settings.batch_size):
            batch = shown[first : first + settings.batch_size]
            body = {"model": settings.model, "text": batch}
            scores += self._scores(await questions.ask(body, headers), len(batch))
        try:
            return rewards_from(scores, len(responses))
        except InvalidRewardError as error:
            raise RewardServiceError(f"{settings.url}: {error}", url=settings.url) from None

    def _text(self, task: Task, response: Response) -> str:
        """Writes a task and its answer as the reward model reads them. Raises TaskError."""
        if not task.messages:
            turns = "".join(turn.text + turn.observation for turn in response.turns)
            return task.prompt + turns + response.text
        if self._tokenizer is None:
            raise TaskError(
                "row.messages", "a chat needs reward_settings.tokenizer, of the reward model"
            )
        said: list[Mapping[str, Any]] = []
        for turn in response.turns:
            said.append({"role": "assistant", "content": turn.text})
            said.append({"role": "user", "content": turn.observation})
        said.append({"role": "assistant", "content": response.text})
        try:
            chat = template_messages([*task.messages, *said])
            text = self._template.render(chat, opening=False, tools=list(task.tools) or None)
        except (ChatTemplateError, MessageError) as error:
            raise TaskError("row.messages", f"to the reward model: {error}") from None
        return self._tokenizer.without_first(text)

    def _scores(self, answer: Any, count: int) -> list[float]:
        """Reads one score per text. Raises RewardServiceError."""
        if not isinstance(answer, list) or len(answer) != count:
            said = f"{len(answer)} scores" if isinstance(answer, list) else "no list of scores"
            raise self._error(f"{said} for {count} texts")
        return [self._score(each, index) for index, each in enumerate(answer)]

    def _score(self, each: Any, index: int) -> float:
        values = each.get("embedding") if isinstance(each, Mapping) else None
        if not isinstance(values, list):
            raise self._error(f"no score at {index}")
        if len(values) != 1:
            raise self._error(f"{len(values)} labels at {index}, a reward model has one")
        score = values[0]
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise self._error(f"the score at {index} is no number")
        try:
            is_finite = math.isfinite(score)
        except OverflowError:  # an integer of any length is JSON
            is_finite = False
        if not is_finite:
            raise self._error(f"the score at {index} is not finite")
        return float(score)

    def _error(self, detail: str) -> RewardServiceError:
        return RewardServiceError(f"{self._settings.url}: {detail}", url=self._settings.url)


def _is_text(message: Mapping[str, Any]) -> bool:
    return all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in message["content"]
    )
