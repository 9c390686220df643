"""Defines an environment: it makes tasks, and rewards what was answered.

Environments know neither gRPC nor the store. One in a process of its own sees JSON values only;
one inside the episode worker must answer in microseconds and is given the tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from numbers import Real
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar

import grpc

from sluice.config import Config
from sluice.json_values import json_fault, shown
from sluice.light import light_dataclass
from sluice.runtime.errors import ServiceError, place_of
from sluice.samples.sample import LARGEST_NUMBER

logger = logging.getLogger(__name__)

LONGEST_TEXT = 500  # of what code of users raises: the place must fit into the answer too
PROTOCOL = 3  # of calls to processes of environments: one more with each change of what they say

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

    A message may have parts, some of them images: see `sluice.samples.messages`.
    tools: JSON schemas that the chat template shows. template: variables of its own that it is
    given, e.g. {"enable_thinking": False}. state: of the first step.
    """

    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    answer: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer that the environment went on from, and what it replied, as text."""

    text: str
    observation: str = ""


@light_dataclass(frozen=True, kw_only=True)
class Response:
    """An episode's last answer, the turns before it, and the state that the last step left.

    `text` is without special tokens, empty if not asked for. `finish_reason`: `stop`, or
    `length` when the tokens of the episode ran out.
    """

    token_ids: Sequence[int] = ()
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


@light_dataclass(frozen=True, kw_only=True)
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
    def paths(cls, settings: Any) -> Mapping[str, str]:
        """Returns directories that the settings name, by key; the worker reads those it may."""
        return {}

    @classmethod
    def generator(cls, settings: Any) -> Generate | None:
        """Returns a coroutine function that makes the samples of an episode, or None.

        It runs in a thread of the episode worker, wherever the environment does.
        """
        return None


def required_row(request: TaskRequest) -> Mapping[str, Any]:
    """Returns the row of a request. Raises TaskError where it has none."""
    if request.row is None:
        raise TaskError("row", "this environment reads rows of a prompt file")
    return request.row


def required_index(request: TaskRequest, size: int) -> int:
    """Returns the index of a request. Raises TaskError unless it is within 0..size-1."""
    if request.index is None:
        raise TaskError("index", "this environment generates tasks by index")
    if not 0 <= request.index < size:
        raise TaskError("index", f"{request.index} is not within 0..{size - 1}")
    return request.index


LARGEST_REWARD = LARGEST_NUMBER
_FIELDS = {"reward", "raw_reward", "scores", "trained"}
_NAMES_SHOWN = 200  # characters of names that nobody asked for


class InvalidRewardError(ValueError):
    """Something that is no list of rewards; the message says what is wrong with it."""


def rewards_from(values: Any, count: int) -> list[Reward]:
    """Checks rewards, one per response, and returns them. Raises InvalidRewardError."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidRewardError(f"rewards must be a list, not {type(values).__name__}")
    if len(values) != count:
        raise InvalidRewardError(f"{len(values)} rewards for {count} responses")
    return [
        value if isinstance(value, Reward) and _is_plain(value) else _reward_from(value, index)
        for index, value in enumerate(values)
    ]


def _is_plain(reward: Reward) -> bool:
    """Whether a reward is surely as it must be, number by number."""
    raw, scores = reward.raw_reward, reward.scores
    if type(reward.trained) is not bool or not _is_number(reward.reward):
        return False
    if raw is not None and not _is_number(raw):
        return False
    if not scores:
        return True
    return {*map(type, scores)} == {str} and all([_is_number(each) for each in scores.values()])


def _is_number(value: Any) -> bool:
    return type(value) is float and abs(value) <= LARGEST_REWARD  # NaN is not


def _reward_from(value: Any, index: int) -> Reward:
    where = f"rewards[{index}]"
    if isinstance(value, Reward):
        value = {
            "reward": value.reward,
            "raw_reward": value.raw_reward,
            "scores": value.scores,
            "trained": value.trained,
        }
    if not isinstance(value, Mapping):
        number = _number(value, where)
        return Reward(reward=number, raw_reward=number)
    if unknown := value.keys() - _FIELDS:
        names = ", ".join(sorted(map(str, unknown)))
        raise InvalidRewardError(f"{where} has unknown keys: {names[:_NAMES_SHOWN]}")
    if "reward" not in value:
        raise InvalidRewardError(f"{where} has no reward")
    raw, scores = value.get("raw_reward"), value.get("scores") or {}
    trained = value.get("trained", True)
    if not isinstance(scores, Mapping):
        raise InvalidRewardError(f"{where}.scores is {shown(scores)}, not an object")
    if not isinstance(trained, bool):
        raise InvalidRewardError(f"{where}.trained is {shown(trained)}, not true or false")
    if nameless := [name for name in scores if not isinstance(name, str)]:
        raise InvalidRewardError(f"{where}.scores has {shown(nameless[0])} as a name")
    return Reward(
        reward=_number(value["reward"], f"{where}.reward"),
        raw_reward=None if raw is None else _number(raw, f"{where}.raw_reward"),
        scores={name: _number(score, f"{where}.scores.{name}") for name, score in scores.items()},
        trained=trained,
    )


def _number(value: Any, where: str) -> float:
    """Returns a number, or the one that a numpy or torch scalar holds. True is none."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidRewardError(f"{where} is {shown(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_REWARD:  # NaN neither
        raise InvalidRewardError(
            f"{where} is {shown(value)}, not a finite number up to {LARGEST_REWARD:g}"
        )
    return number


_KINDS: Mapping[str, type] = {"prompt": str, "template": dict, "answer": str, "done": bool}
Given = TypeVar("Given", Task, Step)


def checked(found: Given, name: str) -> Given:
    """Returns a task or step of an environment. Raises EnvironmentFailedError naming a field."""
    if fault := fault_of(found, type(found)):
        raise EnvironmentFailedError(f"{name}: {fault}", environment=name)
    return found


def fault_of(found: Any, kind: type[Task | Step]) -> str:
    """Says why what an environment gave is no such task or step, naming a field, or nothing."""
    if not isinstance(found, kind):
        return f"gave {type(found).__name__}, no {kind.__name__}"
    for each in fields(found):
        value = getattr(found, each.name)
        fault = json_fault(value)
        if not fault and not isinstance(value, _KINDS.get(each.name, object)):
            fault = f"is {shown(value)}"
        if fault:
            return f"{kind.__name__}.{each.name} {fault}"
    return ""


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
    whoever waits for it, nor its `sys.exit` end this process, nor its KeyboardInterrupt the loop.
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
        if error is not None and not isinstance(error, asyncio.CancelledError | GeneratorExit):
            logger.error("%s failed", self._name, exc_info=error)
            raise EnvironmentFailedError(
                f"{self._name}: {told(error)}", environment=self._name
            ) from error


def told(error: BaseException) -> str:
    """Says in a line what was raised, and where in code that is no library's."""
    text = str(traceback.TracebackException(type(error), error, None))  # also where str() raises
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}... ({len(text):,} characters)"
    return f"{type(error).__name__}: {text}{place_of(error)}"
