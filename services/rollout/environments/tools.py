"""Tool calls as models of the Hermes and Qwen families write them, and functions that answer them.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or more in an answer.
"""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from PIL import Image
from pydantic import ConfigDict, Field, PydanticSchemaGenerationError, ValidationError, create_model

from services.rollout.environments.environment import (
    Placement,
    Response,
    Reward,
    SettingError,
    Step,
    Task,
    TaskRequest,
    TextTokenizer,
)
from services.rollout.environments.prompts import PromptsEnvironment, PromptsSettings
from services.rollout.environments.registry import load_function
from sluice.json_values import json_fault
from sluice.samples.messages import image_part
from sluice.samples.tokenizer import CALL_MARKS

OPEN, CLOSE = CALL_MARKS
_CALL = re.compile(
    re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|(?=<tool_call>)|\Z)", re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """What a model asked for; `error` instead says why it cannot be understood."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class ToolAnswer:
    """What a tool answers the model: a text, and images as parts of a message behind it."""

    text: str
    is_error: bool = False
    images: tuple[Mapping[str, Any], ...] = ()


def parse_calls(text: str) -> list[ToolCall]:
    """Returns the calls in an answer, in order; malformed ones with their error."""
    return [_parse(match.group(1), match.group(0)) for match in _CALL.finditer(text)]


def _parse(body: str, whole: str) -> ToolCall:
    if not whole.endswith(CLOSE):
        return ToolCall(error=f"a tool call must end with {CLOSE}")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"a tool call must be one JSON object: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error="a tool call must be a JSON object with a name")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(error="arguments must be a JSON object")
    if fault := json_fault([call["name"], arguments]):
        return ToolCall(error=f"a tool call {fault}")
    return ToolCall(name=call["name"], arguments=arguments)


class Tool:
    """Calls a function with annotated parameters, whose docstring describes it to the model."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Raises ValueError for parameters that cannot be described."""
        self._name, self._function = name, function
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"{name}: is a coroutine function; a tool has a process to itself")
        fields: dict[str, Any] = {}
        try:
            hints = inspect.get_annotations(function, eval_str=True)
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    raise ValueError(f"{name}: {parameter} cannot be given by name")
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[parameter.name] = (hints.get(parameter.name, Any), default)
            self._arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        except (NameError, PydanticSchemaGenerationError) as error:
            raise ValueError(f"{name}: {error}") from None

    @property
    def schema(self) -> dict[str, Any]:
        """Returns what chat templates show, in the form of OpenAI's API."""
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        description = inspect.getdoc(self._function) or ""
        function = {"name": self._name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    def answer(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Returns what the function does, or what is wrong.

        It may give a text, a value of JSON, an image (of PIL, or the bytes of a file), or a list
        of texts and images.
        """
        try:
            given = self._arguments(**arguments)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return ToolAnswer(f"error: {self._name}: {where}: {first['msg']}", is_error=True)
        values = {name: getattr(given, name) for name in self._arguments.model_fields}
        with _Catching() as catching:
            result = self._function(**values)
            return _answer_of(result)
        return ToolAnswer(f"error: {catching.raised}", is_error=True)


def _answer_of(result: Any) -> ToolAnswer:
    values = result if isinstance(result, list | tuple) else [result]
    images = [_file_of(value) for value in values if isinstance(value, bytes | Image.Image)]
    if not images:
        return ToolAnswer(result if isinstance(result, str) else json.dumps(result, default=str))
    rest = [value for value in values if not isinstance(value, bytes | Image.Image)]
    texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in rest]
    return ToolAnswer("\n".join(texts), images=tuple(map(image_part, images)))


def _file_of(image: bytes | Image.Image) -> bytes:
    if isinstance(image, bytes):
        return image
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class _Catching(AbstractContextManager["_Catching"]):
    """Keeps what a function raises, whatever its library calls it: the model gets to read it.

    That a library would end the program (`sys.exit` of argparse) is no reason to end this one.
    """

    raised = ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        self.raised = f"{type(error).__name__}: {error}"
        return True


class ToolsSettings(PromptsSettings):
    """`tools`: a user's function `package.module:name` by the name the model calls it by."""

    tools: Mapping[str, str] = Field(min_length=1)
    max_turns: int = Field(4, ge=1)  # answers; the last one may call no tool
    max_calls: int = Field(32, ge=1)  # of one answer; those behind are not made
    max_characters: int = Field(4000, ge=1)  # of what a tool says


class ToolsEnvironment(PromptsEnvironment):
    """Runs tools in processes of its own. A malformed call is answered with what is wrong with it.

    A sample's scores are `tool_calls` and `tool_errors`.
    """

    name = "tools"
    settings_type = ToolsSettings
    placement = Placement.PROCESS
    _settings: ToolsSettings

    def __init__(self, settings: ToolsSettings, tokenizer: TextTokenizer | None = None) -> None:
        super().__init__(settings, tokenizer)
        if settings.generate:
            raise SettingError("generate", "has no effect on an environment with steps")
        self._tools: dict[str, Tool] = {}
        for name, path in settings.tools.items():
            try:
                self._tools[name] = Tool(name, load_function(path, f"tools.{name}"))
            except ValueError as error:  # SettingError too
                raise SettingError(f"tools.{name}", str(error)) from None

    @classmethod
    def place(cls, settings: PromptsSettings) -> Placement:
        super().place(settings)  # refuses what is no grader
        return Placement.PROCESS

    @classmethod
    def functions(cls, settings: PromptsSettings) -> Mapping[str, str]:
        assert isinstance(settings, ToolsSettings)
        tools = {f"tools.{name}": path for name, path in settings.tools.items()}
        return {**super().functions(settings), **tools}

    def make_task(self, request: TaskRequest) -> Task:
        schemas = tuple(tool.schema for tool in self._tools.values())
        return replace(super().make_task(request), tools=schemas)

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        calls = parse_calls(response.text)
        if not calls or len(response.turns) + 1 >= self._settings.max_turns:
            return Step(state=state, done=True)
        most = self._settings.max_calls
        answers = [self._answer(call) for call in calls[:most]]
        left = max(0, len(calls) - most)
        errors = left + sum(answer.is_error for answer in answers)
        if left:
            message = f"error: an answer makes {most} calls at most; {left} more are not made"
            answers.append(ToolAnswer(message, is_error=True))
        counts = {
            "tool_calls": state.get("tool_calls", 0) + len(calls),
            "tool_errors": state.get("tool_errors", 0) + errors,
        }
        texts = [_whole(answer.text[: self._settings.max_characters]) for answer in answers]
        if task.messages:
            messages = tuple(
                {"role": "tool", "content": _content(text, answer.images)}
                for text, answer in zip(texts, answers, strict=True)
            )
            return Step(messages=messages, state={**state, **counts})
        text = "".join(f"\n<tool_response>\n{text}\n</tool_response>\n" for text in texts)
        return Step(text=text, state={**state, **counts})

    async def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        found = super().reward(task, responses)
        rewards = found if isinstance(found, list) else await found
        return [
            replace(reward, scores={**reward.scores, **_counts(response.state)})
            for reward, response in zip(rewards, responses, strict=True)
        ]

    def _answer(self, call: ToolCall) -> ToolAnswer:
        if call.error or call.arguments is None:
            return ToolAnswer(f"error: {call.error}", is_error=True)
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools)
            return ToolAnswer(
                f"error: there is no tool {call.name!r}; tools: {known}", is_error=True
            )
        return tool.answer(call.arguments)


def _content(text: str, images: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    if not images:
        return text
    return [*([{"type": "text", "text": text}] if text else []), *images]


def _whole(text: str) -> str:
    """What a tool said, with a question mark for half a surrogate pair."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _counts(state: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(state.get(name, 0)) for name in ("tool_calls", "tool_errors")}
