"""`prompts`: makes tasks of the rows of a prompt file, rewarded by a grader."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, JsonValue

from services.rollout.environments.environment import (
    Environment,
    Generate,
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TaskRequest,
    TextTokenizer,
    required_row,
)
from services.rollout.environments.graders.grader import (
    check_task,
    create_grader,
    is_function,
    needs_text,
    place_grader,
)
from services.rollout.environments.registry import load_function
from sluice.config import Config
from sluice.json_values import find
from sluice.samples.messages import MARK, split_marks


class PromptsSettings(Config):
    """`reward` names a grader, or a user's function; `reward_settings` are its own."""

    reward: str = "exact_match"
    reward_settings: Mapping[str, Any] = Field(default_factory=dict)
    generate: str = ""  # a user's coroutine function that makes the samples of an episode
    chat: bool = False  # a `prompt` becomes a user message; `messages` always are a chat
    system_prompt: str = ""
    template: dict[str, JsonValue] = Field(default_factory=dict)  # variables of the chat template
    prompt_key: str = "prompt"  # a text, or a list of messages
    messages_key: str = "messages"
    images_key: str = "images"  # a path, data URL or {bytes, path}, or a list: shown at `<image>`
    answer_key: str = "answer"  # a text, a number, or a list of several that are right
    # a key of an object inside the row has its names with dots, e.g. reward_model.ground_truth
    state_keys: tuple[str, ...] = ()  # of the row, for the reward and for readers


class PromptsEnvironment(Environment):
    """Runs where its grader does: most are cheap enough for the episode worker itself."""

    name = "prompts"
    settings_type: ClassVar[type[Config]] = PromptsSettings
    placement = Placement.INLINE

    def __init__(self, settings: PromptsSettings, tokenizer: TextTokenizer | None = None) -> None:
        self._settings = settings
        if settings.system_prompt and not settings.chat:
            raise SettingError("system_prompt", "has no effect without chat")
        self._grader = create_grader(settings.reward, settings.reward_settings, tokenizer)
        self.needs_text = needs_text(settings.reward)

    @classmethod
    def place(cls, settings: PromptsSettings) -> Placement:
        return place_grader(settings.reward)

    @classmethod
    def functions(cls, settings: PromptsSettings) -> Mapping[str, str]:
        named = {"reward": settings.reward if is_function(settings.reward) else ""}
        named["generate"] = settings.generate
        return {key: path for key, path in named.items() if path}

    @classmethod
    def urls(cls, settings: PromptsSettings) -> Mapping[str, str]:
        asks = settings.reward in ("remote", "judge", "reward_model")
        url = settings.reward_settings.get("url") if asks else None
        return {"reward_settings.url": url} if isinstance(url, str) else {}

    @classmethod
    def paths(cls, settings: PromptsSettings) -> Mapping[str, str]:
        asks = settings.reward == "reward_model"
        path = settings.reward_settings.get("tokenizer") if asks else None
        return {"reward_settings.tokenizer": path} if isinstance(path, str) and path else {}

    @classmethod
    def generator(cls, settings: PromptsSettings) -> Generate | None:
        if not settings.generate:
            return None
        function: Generate = load_function(settings.generate, "generate")
        if not inspect.iscoroutinefunction(function):
            raise SettingError("generate", f"{settings.generate} is no coroutine function")
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise SettingError("generate", f"{settings.generate}: {error}") from None
        return function

    @classmethod
    def check(cls, settings: PromptsSettings, request: TaskRequest) -> None:
        check_task(settings.reward, make_row_task(settings, request))

    def make_task(self, request: TaskRequest) -> Task:
        return make_row_task(self._settings, request)

    def reward(
        self, task: Task, responses: Sequence[Response]
    ) -> list[Reward] | Awaitable[list[Reward]]:
        return self._grader.grade(task, responses)


VIDEOS = (
    "video",
    "videos",
)  # columns of data sets: to train on the text alone is not what was asked


def make_row_task(settings: PromptsSettings, request: TaskRequest) -> Task:
    """Makes the task of a row. Raises TaskError for one without prompt or answer."""
    row = required_row(request)
    answers = _answers(row, settings.answer_key)
    state: dict[str, Any] = {key: row[key] for key in settings.state_keys if key in row}
    if len(answers) > 1:
        state["answers"] = answers
    for key in VIDEOS:
        if row.get(key) and key not in settings.state_keys:
            raise TaskError(f"row.{key}", "video is not taken; images are")
    images = _images(find(row, settings.images_key), settings.images_key)
    key = settings.messages_key if find(row, settings.messages_key) else settings.prompt_key
    messages = find(row, key)
    if messages and (key == settings.messages_key or isinstance(messages, list)):
        shown = _show(_checked_messages(messages, key), images, settings)
        return _chat(shown, answers[0], state, settings)
    prompt = _prompt(messages, f"row.{settings.prompt_key}")
    if not settings.chat:
        if images:
            raise TaskError(f"row.{settings.images_key}", "images need `chat: true`, or messages")
        if settings.template:
            key = f"row.{settings.prompt_key}"
            raise TaskError(key, "is no chat, which `template` is for: set `chat: true`")
        return Task(prompt=prompt, answer=answers[0], state=state)
    system = [{"role": "system", "content": settings.system_prompt}]
    turns = [*(system if settings.system_prompt else ()), {"role": "user", "content": prompt}]
    return _chat(_show(turns, images, settings), answers[0], state, settings)


def _chat(
    messages: tuple[Mapping[str, Any], ...],
    answer: str,
    state: Mapping[str, Any],
    settings: PromptsSettings,
) -> Task:
    return Task(messages=messages, template=settings.template, answer=answer, state=state)


def _images(value: Any, key: str) -> list[Any]:
    """What the images of a row are read from; a column that all rows have may be empty."""
    images = value if isinstance(value, list) else [] if value is None else [value]
    for index, image in enumerate(images):
        if not isinstance(image, str | Mapping):
            kind = type(image).__name__
            raise TaskError(
                f"row.{key}[{index}]", f"must be a path, a data URL or {{bytes, path}}, not {kind}"
            )
    return images


def _show(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any], settings: PromptsSettings
) -> tuple[Mapping[str, Any], ...]:
    """Puts the images of a row to the marks in its texts; without marks, before the first one."""
    if not images:
        return tuple(messages)
    texts = [index for index, each in enumerate(messages) if _is_asked(each)]
    rest, shown = list(images), list(messages)
    has_marks = any(MARK in messages[index]["content"] for index in texts)
    for index in texts if has_marks else texts[:1]:
        content = messages[index]["content"]
        count = content.count(MARK) if has_marks else len(rest)
        taken, rest = rest[:count], rest[count:]
        try:
            shown[index] = {**messages[index], "content": split_marks(content, taken)}
        except ValueError:
            break
    else:
        if texts and not rest:
            return tuple(shown)
    raise TaskError(
        f"row.{settings.images_key}",
        f"{len(images)} images do not go with the marks {MARK} in the texts of users",
    )


def _is_asked(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" and isinstance(message["content"], str)


def _prompt(value: Any, key: str) -> str:
    if value is None:
        raise TaskError(key, "is required")
    if not isinstance(value, str | list):
        kind = type(value).__name__
        raise TaskError(key, f"must be a text or a list of messages, not {kind}")
    if not value:
        raise TaskError(key, "is empty")
    assert isinstance(value, str), "messages are taken as such"
    return value


def _answers(row: Mapping[str, Any], key: str) -> list[str]:
    value = find(row, key)
    if isinstance(value, list) and value:
        return [_text(one, f"{key}[{index}]") for index, one in enumerate(value)]
    return [_text(value, key)]


def _text(value: Any, key: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):  # how some programs write what is missing
            raise TaskError(f"row.{key}", f"is {value}, which is no number")
        # as people write it: 1e-07 is read as e - 7 by who reads mathematics
        return str(value) if isinstance(value, int) else np.format_float_positional(value, trim="-")
    if value is None:
        raise TaskError(f"row.{key}", "is required")
    raise TaskError(f"row.{key}", f"must be a text or a number, not {type(value).__name__}")


def _checked_messages(messages: Any, key: str) -> tuple[Mapping[str, Any], ...]:
    """Checks roles and kinds only: what a message holds, e.g. images, its readers judge."""
    if not isinstance(messages, list):
        raise TaskError(f"row.{key}", "must be a list")
    for index, message in enumerate(messages):
        is_turn = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_turn or not isinstance(message.get("content"), str | list):
            raise TaskError(f"row.{key}[{index}]", "needs a role and a content")
    return tuple(messages)
