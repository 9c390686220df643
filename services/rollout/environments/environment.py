"""Defines an environment: it makes tasks, and rewards what was answered.

Environments know neither gRPC nor the store. One in a process of its own sees JSON values only;
one inside the episode worker must answer in microseconds and is given the tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar

import grpc

from sluice.config import Config
from sluice.runtime.errors import ServiceError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _KeyedError(ValueError):
    def __init__(self, key: str, message: str) -> None:
        self.key = key
        super().__init__(message)


class SettingError(_KeyedError):
    """A setting of an environment is wrong; `key` is its dotted path."""


class TaskError(_KeyedError):
    """A group asks for a task that the environment cannot make; `key` names the field."""


class UnknownEnvironmentError(ValueError):
    """No environment has this name, or may be asked for by it."""


class Placement(StrEnum):
    """Where an environment runs: in the episode worker, or in a pool of processes."""

    INLINE = "inline"
    PROCESS = "process"


class TextTokenizer(Protocol):
    """Encodes texts, for inline environments."""

    @property
    def end_token_id(self) -> int | None: ...

    def encode(self, text: str, *, special: bool) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """Index into a generated data set, or a row of a prompt file."""

    index: int | None = None
    row: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt, as text or as chat messages, and what the reward needs, in JSON values.

    tools: JSON schemas that the chat template shows. state: of the first step.
    """

    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    answer: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer that the environment went on from, and what it replied, as text."""

    text: str
    observation: str = ""


@dataclass(frozen=True, kw_only=True)
class Response:
    """An episode's last answer, the turns before it, and the state that the last step left.

    `text` is without special tokens, empty if not asked for. `finish_reason`: `stop`, or
    `length` when the tokens of the episode ran out.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    turns: tuple[Turn, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What follows an answer: an observation the model is to answer, or the end.

    messages: chat messages, of role `user` or `tool`; text: for prompts that are no chat. Just
    one of the two. state: JSON values, given back to the next step and to the reward.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What the estimator sees, and what a sample may have besides.

    raw_reward: before shaping, None where there is none. scores: further numbers by name, e.g.
    `format`; rows hold them as `score/<name>`. trained: False masks the whole sample, whose
    reward still counts in its group.
    """

    reward: float
    raw_reward: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    trained: bool = True


Generate = Callable[[Any], Awaitable[Sequence[Any]]]  # Episode -> Trajectories


class Environment(ABC):
    """Makes tasks, takes steps and rewards answers, by its settings.

    It holds no state of an episode: what a step must know of those before goes through `state`,
    so that any process may take the next one. In the worker itself (`INLINE`) `make_task`,
    `step` and `reward` may be coroutines, for what waits on a network.
    """

    name: ClassVar[str]
    settings_type: ClassVar[type[Config]]
    placement: ClassVar[Placement]
    needs_text: bool = True  # responses are decoded for `reward`

    @abstractmethod
    def __init__(self, settings: Any, tokenizer: TextTokenizer | None = None) -> None:
        """Raises SettingError for a value that only the environment can judge."""

    @classmethod
    @abstractmethod
    def check(cls, settings: Any, request: TaskRequest) -> None:
        """Raise TaskError for a request that no task can be made of; cheap, imports nothing."""

    @abstractmethod
    def make_task(self, request: TaskRequest) -> Task | Awaitable[Task]:
        """Returns the task, the same for the same request. Raises TaskError."""

    def step(
        self, task: Task, state: Mapping[str, Any], response: Response
    ) -> Step | Awaitable[Step]:
        """Returns what follows an answer. An environment that has this is asked after every answer.

        A call it cannot understand deserves an observation that says so, not an exception.
        """
        return Step(state=state, done=True)

    @abstractmethod
    def reward(
        self, task: Task, responses: Sequence[Response]
    ) -> list[Reward] | Awaitable[list[Reward]]:
        """Returns one reward per response, in order: the whole group at once."""

    @classmethod
    def place(cls, settings: Any) -> Placement:
        """Returns where it runs with these settings."""
        return cls.placement

    @classmethod
    def functions(cls, settings: Any) -> Mapping[str, str]:
        """Returns functions of users that the settings name, `package.module:name` by key."""
        return {}

    @classmethod
    def urls(cls, settings: Any) -> Mapping[str, str]:
        """Returns addresses that the settings name, by key; the worker asks those it may."""
        return {}

    @classmethod
    def generator(cls, settings: Any) -> Generate | None:
        """Returns a coroutine function that makes the samples of an episode, or None.

        It runs in a thread of the episode worker, wherever the environment does.
        """
        return None


def answer_of(found: T | Awaitable[T]) -> T:
    """Returns what an environment answered, or its coroutine does, which has the process alone."""

    async def wait(answer: Awaitable[T]) -> T:
        return await answer

    return asyncio.run(wait(found)) if isinstance(found, Awaitable) else found


class EnvironmentFailedError(ServiceError):
    """An environment raised, or gave what makes no sense; the message says what."""

    code = grpc.StatusCode.INTERNAL
    reason = "ENVIRONMENT_FAILED"


class UserCode(AbstractContextManager[None]):
    """Guards code of users in this process: what it raises becomes EnvironmentFailedError.

    What is typed already goes on as it is. Its TimeoutError must not look like a deadline of
    whoever waits for it, nor its `sys.exit` end this process.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ServiceError | SettingError | TaskError | UnknownEnvironmentError):
            return
        if isinstance(error, Exception | SystemExit):
            logger.error("%s failed", self._name, exc_info=error)
            raise EnvironmentFailedError(
                f"{self._name}: {type(error).__name__}: {error}", environment=self._name
            ) from error
