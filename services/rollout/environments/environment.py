"""What an environment does: makes tasks, and rewards what was answered.

Environments know neither gRPC nor the store. One in a process of its own sees JSON values only;
one inside the episode worker must answer in microseconds and is given the tokenizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from sluice.config import Config


class SettingError(ValueError):
    """A setting of an environment is wrong; `key` is its dotted path."""

    def __init__(self, key: str, message: str) -> None:
        self.key = key
        super().__init__(message)


class TaskError(ValueError):
    """A group asks for a task that the environment cannot make; `key` names the field."""

    def __init__(self, key: str, message: str) -> None:
        self.key = key
        super().__init__(message)


class Placement(StrEnum):
    """Where an environment runs: in the episode worker, or in a pool of processes."""

    INLINE = "inline"
    PROCESS = "process"


class TextTokenizer(Protocol):
    """What an inline environment may ask of the tokenizer."""

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
    """A prompt, as text or as chat messages, and what the reward needs, in JSON values."""

    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    answer: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Response:
    """One sampled answer; `text` is without special tokens, empty if not asked for."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What the estimator sees, and what the environment gave before shaping."""

    reward: float
    raw_reward: float


class Environment(ABC):
    """One environment with its settings."""

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
    def make_task(self, request: TaskRequest) -> Task:
        """The task; the same for the same request. Raises TaskError."""

    @abstractmethod
    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        """One reward per response, in order."""
