"""`remote`: a reward service over HTTP, asked once a group.

POST {"prompt", "messages", "answer", "state", "responses": [{"text", "finish_reason", "turns"}]}
-> {"rewards": [...]}: a number per response, or an object {"reward", "raw_reward"?, "scores"?,
"trained"?}.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import grpc
from pydantic import Field, field_validator

from services.rollout.environments.environment import (
    InvalidRewardError,
    Response,
    Reward,
    SettingError,
    Task,
    TextTokenizer,
    rewards_from,
)
from services.rollout.environments.graders.grader import Grader
from sluice.config import Config, ConfigError
from sluice.runtime.addresses import url_of
from sluice.runtime.errors import DeadlineError, ServiceError
from sluice.runtime.recovery import Backoff

ADDRESSES = ("http://", "https://")
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
LARGEST_ANSWER = 4 << 20  # bytes: the loop stands still while JSON is read


class RemoteSettings(Config):
    """`deadline_seconds` is for all attempts on a group, `attempt_seconds` for one.

    `url` is an address, or the name of a service of the worker's own services.json, FILE#NAME.
    """

    url: str = Field(max_length=4096)
    deadline_seconds: float = Field(60.0, gt=0)
    attempt_seconds: float = Field(20.0, gt=0)
    first_backoff_seconds: float = Field(0.2, gt=0)
    longest_backoff_seconds: float = Field(5.0, gt=0)

    @field_validator("url")
    @classmethod
    def _address_or_service(cls, url: str) -> str:
        file, _, name = url.rpartition("#")
        if url.startswith(ADDRESSES) or (file and name and "://" not in url):
            return url
        raise ValueError("must be http://..., https://... or FILE#NAME")


class RewardServiceError(ServiceError):
    """A reward service refused, or its answer makes no sense."""

    code = grpc.StatusCode.INTERNAL
    reason = "REWARD_SERVICE_FAILED"


class RewardServiceTimeoutError(DeadlineError):
    """A reward service gave no answer before the deadline; the message has the last failure."""

    reason = "REWARD_SERVICE_TIMED_OUT"


class _PassingError(Exception):
    """A failure after which asking again may help, not before `after` seconds."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class Questions:
    """Asks an address until it answers, within what is left of a group's deadline."""

    def __init__(
        self, settings: RemoteSettings, session: aiohttp.ClientSession, service_key: str
    ) -> None:
        self._settings, self._session, self._service_key = settings, session, service_key
        self.last = ""  # failure

    async def ask(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, path: str = ""
    ) -> Any:
        """Returns the JSON of the answer at `path` below the address. Raises RewardServiceError."""
        settings = self._settings
        backoff = Backoff(
            settings.first_backoff_seconds, settings.longest_backoff_seconds, scatter=0.5
        )
        for failures in itertools.count(1):
            try:
                return await self._attempt(self._url(path), body, headers or {})
            except _PassingError as failure:
                self.last = str(failure)
                await asyncio.sleep(max(failure.after, backoff.seconds(failures)))

    def _url(self, path: str) -> str:
        """Where it is by now. Raises _PassingError while the services.json does not know it."""
        url = self._settings.url
        if url.startswith(ADDRESSES):
            return f"{url.rstrip('/')}{path}" if path else url
        file, _, name = url.rpartition("#")
        try:
            return url_of(Path(file), name, self._service_key) + path
        except ConfigError as error:
            raise _PassingError(str(error)) from None

    async def _attempt(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        headers = {"Accept-Encoding": "identity", **headers}  # what unpacks has no limit
        try:
            async with asyncio.timeout(self._settings.attempt_seconds):
                async with self._session.post(
                    url, json=body, headers=headers, allow_redirects=False
                ) as answer:
                    if answer.status in _RETRIED:
                        raise _PassingError(f"HTTP {answer.status}", _retry_after(answer))
                    if answer.status != 200:
                        text = (await answer.content.read(200)).decode(errors="replace")
                        raise RewardServiceError(f"{url}: HTTP {answer.status}: {text}", url=url)
                    return json.loads(await _read(url, answer))
        except aiohttp.ClientError as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from None
        except TimeoutError:
            raise _PassingError("an attempt took too long") from None
        except (ValueError, RecursionError) as error:  # no JSON
            raise RewardServiceError(f"{url}: {error}", url=url) from None


class AskingGrader(Grader):
    """Asks over HTTP; it only waits, so many groups share the episode worker."""

    service_key: ClassVar[str] = ""  # of a services.json: where a service has its address
    _settings: RemoteSettings

    def __init__(self, settings: RemoteSettings, tokenizer: TextTokenizer | None = None) -> None:
        """Raises SettingError for a service of a services.json where none can be asked."""
        super().__init__(settings)
        if not settings.url.startswith(ADDRESSES) and not self.service_key:
            raise SettingError("reward_settings.url", "give an address, http:// or https://")

    async def grade(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        """Raises RewardServiceError and RewardServiceTimeoutError."""
        settings = self._settings
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            questions = Questions(settings, session, self.service_key)
            try:
                async with asyncio.timeout(settings.deadline_seconds):
                    return await self._rewards(questions, task, responses)
            except TimeoutError:
                raise RewardServiceTimeoutError(
                    f"no rewards in {settings.deadline_seconds:g} s: "
                    f"{questions.last or 'no answer'}",
                    url=settings.url,
                ) from None

    @abstractmethod
    async def _rewards(
        self, questions: Questions, task: Task, responses: Sequence[Response]
    ) -> list[Reward]:
        """Returns one reward per response."""


class Remote(AskingGrader):
    """Posts a group until it is rewarded."""

    settings_type = RemoteSettings

    async def _rewards(
        self, questions: Questions, task: Task, responses: Sequence[Response]
    ) -> list[Reward]:
        url = self._settings.url
        values = await questions.ask(_body(task, responses))
        rewards = values.get("rewards") if isinstance(values, Mapping) else None
        try:
            return rewards_from(rewards, len(responses))
        except InvalidRewardError as error:
            raise RewardServiceError(f"{url}: {error}", url=url) from None


def _body(task: Task, responses: Sequence[Response]) -> dict[str, Any]:
    return {
        "prompt": task.prompt,
        "messages": list(task.messages),
        "answer": task.answer,
        "state": task.state,
        "responses": [
            {
                "text": response.text,
                "finish_reason": response.finish_reason,
                "turns": [asdict(turn) for turn in response.turns],
            }
            for response in responses
        ],
    }


async def _read(url: str, answer: aiohttp.ClientResponse) -> bytes:
    """Raises RewardServiceError for more than anybody's rewards are, and for what is packed."""
    packed = answer.headers.get("Content-Encoding", "identity")
    if packed.lower() != "identity":
        raise RewardServiceError(f"{url}: answers as {packed[:80]}, unasked", url=url)
    data = bytearray()
    async for part in answer.content.iter_any():
        data += part
        if len(data) > LARGEST_ANSWER:
            raise RewardServiceError(f"{url}: answers more than {LARGEST_ANSWER} bytes", url=url)
    return bytes(data)


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    try:
        seconds = float(answer.headers.get("Retry-After", "0"))
    except ValueError:  # a date
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
