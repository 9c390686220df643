"""`tools`: rows of a prompt file that a model may use functions on, before it gives its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

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
from services.rollout.environments.paths import load_function
from services.rollout.environments.prompts import PromptsEnvironment, PromptsSettings
from services.rollout.environments.tool_calls import Tool, ToolAnswer, ToolCall, parse_calls


class ToolsSettings(PromptsSettings):
    """`tools`: a user's function `package.module:name` by the name the model calls it by."""

    tools: Mapping[str, str] = Field(min_length=1)
    max_turns: int = Field(4, ge=1)  # answers; the last one may call no tool
    max_characters: int = Field(4000, ge=1)  # of what a tool says


class ToolsEnvironment(PromptsEnvironment):
    """In processes of its own. A call that makes no sense is answered with what is wrong with it.

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
        answers = [self._answer(call) for call in calls]
        counts = {
            "tool_calls": state.get("tool_calls", 0) + len(calls),
            "tool_errors": state.get("tool_errors", 0) + sum(a.is_error for a in answers),
        }
        texts = [answer.text[: self._settings.max_characters] for answer in answers]
        if task.messages:
            messages = tuple({"role": "tool", "content": text} for text in texts)
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


def _counts(state: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(state.get(name, 0)) for name in ("tool_calls", "tool_errors")}
