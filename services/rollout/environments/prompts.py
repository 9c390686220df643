"""`prompts`: rows of a prompt file, rewarded by comparison with their answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TaskRequest,
    TextTokenizer,
)
from services.rollout.environments.registry import required_row
from sluice.config import Config


class PromptsSettings(Config):
    """`exact_match` compares stripped texts. `position_match` is the share of the answer's
    tokens, end of sequence included, that stand at their place."""

    reward: Literal["exact_match", "position_match"] = "exact_match"
    chat: bool = False  # a `prompt` becomes a user message; `messages` always are a chat
    system_prompt: str = ""
    prompt_key: str = "prompt"
    messages_key: str = "messages"
    answer_key: str = "answer"


class PromptsEnvironment(Environment):
    """Cheap enough for the episode worker itself."""

    name = "prompts"
    settings_type = PromptsSettings
    placement = Placement.INLINE

    def __init__(self, settings: PromptsSettings, tokenizer: TextTokenizer | None = None) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self.needs_text = settings.reward == "exact_match"
        if not self.needs_text and (tokenizer is None or tokenizer.end_token_id is None):
            raise SettingError("reward", "position_match needs an end-of-sequence token")
        if settings.system_prompt and not settings.chat:
            raise SettingError("system_prompt", "has no effect without chat")

    @classmethod
    def check(cls, settings: PromptsSettings, request: TaskRequest) -> None:
        _make_task(settings, request)

    def make_task(self, request: TaskRequest) -> Task:
        return _make_task(self._settings, request)

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        if self.needs_text:
            answer = task.answer.strip()
            return [_exact(response.text.strip() == answer) for response in responses]
        assert self._tokenizer is not None and self._tokenizer.end_token_id is not None
        target = self._tokenizer.encode(task.answer, special=False)
        target.append(self._tokenizer.end_token_id)
        return [_position_match(response.token_ids, target) for response in responses]


def _make_task(settings: PromptsSettings, request: TaskRequest) -> Task:
    row = required_row(request)
    answer = _text(row, settings.answer_key)
    messages = row.get(settings.messages_key)
    if messages:
        return Task(messages=_checked_messages(messages), answer=answer)
    prompt = _text(row, settings.prompt_key)
    if not prompt:
        raise TaskError(f"row.{settings.prompt_key}", "is empty")
    if not settings.chat:
        return Task(prompt=prompt, answer=answer)
    system = [{"role": "system", "content": settings.system_prompt}]
    turns = [*(system if settings.system_prompt else ()), {"role": "user", "content": prompt}]
    return Task(messages=tuple(turns), answer=answer)


def _exact(is_right: bool) -> Reward:
    return Reward(reward=float(is_right), raw_reward=float(is_right))


def _position_match(token_ids: Sequence[int], target: Sequence[int]) -> Reward:
    """Share of right positions; raw: 1 if the whole is right."""
    right = sum(map(int.__eq__, token_ids, target))
    whole = right == len(target) == len(token_ids)
    return Reward(reward=right / len(target), raw_reward=float(whole))


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if value is None:
        raise TaskError(f"row.{key}", "is required")
    raise TaskError(f"row.{key}", f"must be a text or a number, not {type(value).__name__}")


def _checked_messages(messages: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, list):
        raise TaskError("row.messages", "must be a list")
    for index, message in enumerate(messages):
        is_turn = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_turn or not isinstance(message.get("content"), str):
            raise TaskError(f"row.messages[{index}]", "needs a role and a content")
    return tuple(messages)
