"""`judge`: a model that judges each answer, at an OpenAI-compatible address.

The judge is asked in words of the run's and has to say a number. One that says none is asked anew;
one that says none at all is an error, never a reward.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import string
from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator, model_validator

from services.rollout.environments.environment import Response, Reward, Task
from services.rollout.environments.graders.grader import answers_of
from services.rollout.environments.graders.remote import (
    AskingGrader,
    Questions,
    RemoteSettings,
    RewardServiceError,
)
from sluice.runtime.idempotency import all_of
from sluice.samples.messages import text_of

KEY = "JUDGE_API_KEY"  # set where the worker runs: no request carries a secret
# Whole: no 1 of 1e3, no 5 of 5,5. Many judges write in bold: **Score:** 5, or Score: **5**.
_NUMBER = re.compile(r"\s*(?:\*\*\s*)?(-?\d+(?:\.\d+)?)(?!\w|[.,]\d)")
FIELDS = frozenset({"question", "answer", "response"})
PROMPT = """Question:
{question}

A right answer:
{answer}

The answer to judge:
{response}

How good is the answer to judge, from 0 (wrong) to 10 (right)? End with one line: Score: <number>"""


class JudgeSettings(RemoteSettings):
    """`url` is the base of the address, `/v1` included. `deadline_seconds` is for a group.

    `prompt` has the fields {question}, {answer} and {response}. After the last `mark` in what the
    judge says, in capitals or not, stands the number, from `lowest` to `highest`, which is brought
    to 0..1. An answer is judged up to `attempts` times, until a number is said.
    """

    model: str = Field(min_length=1)
    prompt: str = PROMPT
    mark: str = Field("Score:", min_length=1)
    lowest: float = 0.0
    highest: float = 10.0
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=1)
    attempts: int = Field(3, ge=1, le=100)
    parallel: int = Field(8, ge=1, le=256)

    @field_validator("prompt")
    @classmethod
    def _fields(cls, prompt: str) -> str:
        parts = [part[1:] for part in string.Formatter().parse(prompt) if part[1] is not None]
        named = {name for name, _, _ in parts}
        if "response" not in named or not named <= FIELDS or any(s or c for _, s, c in parts):
            raise ValueError("must have {response}, and may have {question} and {answer} alone")
        return prompt

    @model_validator(mode="after")
    def _range(self) -> JudgeSettings:
        if not 0 < self.highest - self.lowest < math.inf:
            raise ValueError("lowest must be less than highest, by a number that is finite")
        return self


class ModelJudge(AskingGrader):
    """Asks once for each answer, `parallel` at a time."""

    settings_type = JudgeSettings
    service_key = "openai_url"
    _settings: JudgeSettings

    async def _rewards(
        self, questions: Questions, task: Task, responses: Sequence[Response]
    ) -> list[Reward]:
        places = asyncio.Semaphore(self._settings.parallel)

        async def judge(response: Response) -> Reward:
            async with places:
                return await self._judge(questions, task, response)

        return await all_of(judge(response) for response in responses)

    async def _judge(self, questions: Questions, task: Task, response: Response) -> Reward:
        settings = self._settings
        question = task.prompt or "\n\n".join(text_of(message) for message in task.messages)
        shown = settings.prompt.format(
            question=question, answer=" or ".join(answers_of(task)), response=response.text
        )
        body = {
            "model": settings.model,
            "messages": [{"role": "user", "content": shown}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for left in reversed(range(settings.attempts)):
            answer = await questions.ask(body, headers, "/chat/completions")
            try:
                score = self._score(answer)
                break
            except RewardServiceError as error:
                if not left:
                    raise
                questions.last = str(error)
        share = (score - settings.lowest) / (settings.highest - settings.lowest)
        return Reward(reward=share, raw_reward=share)

    def _score(self, answer: Any) -> float:
        """Reads what the judge said. Raises RewardServiceError."""
        settings = self._settings
        try:
            choice = answer["choices"][0]
            said, ending = choice["message"]["content"], choice.get("finish_reason")
        except (TypeError, KeyError, IndexError, AttributeError):
            said = ending = None
        if not isinstance(said, str):
            raise RewardServiceError(f"{settings.url}: no chat completion", url=settings.url)
        _, found, rest = said.lower().rpartition(settings.mark.lower())
        number = _NUMBER.match(rest) if found else None
        if number is None:
            raise RewardServiceError(
                f"{settings.url}: the judge says no score: {said[-200:]!r}", url=settings.url
            )
        if ending == "length" and not rest[number.end() :].strip(".,"):
            raise RewardServiceError(
                f"{settings.url}: the score is cut off by max_tokens: {said[-200:]!r}",
                url=settings.url,
            )
        score = float(number[1])
        if not settings.lowest <= score <= settings.highest:  # NaN neither
            raise RewardServiceError(
                f"{settings.url}: {score:g} is not within "
                f"{settings.lowest:g}..{settings.highest:g}",
                url=settings.url,
            )
        return score
