"""Tool calls: understood, or answered with what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.environments.environment import (
    Environment,
    Response,
    SettingError,
    Step,
    TaskRequest,
    Turn,
)
from services.rollout.environments.registry import ENVIRONMENTS, create_environment
from services.rollout.environments.tools import parse_calls

HERE = "tests.unit.rollout.test_tools"


def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


def divide(a: float, b: float) -> float:
    return a / b


def anything(*values: int) -> None:
    pass


class LibraryError(Exception):
    """As many libraries have."""


def calculate(expression: str) -> Any:
    """Whatever the model writes."""
    if expression == "loop":
        found: list[Any] = []
        found.append(found)
        return found
    if expression == "library":
        raise LibraryError("no such table")
    if expression == "exit":
        sys.exit("usage: calculate N")
    return eval(expression, {"__builtins__": {}})


async def later(a: int) -> int:
    return a


def environment(**values: Any) -> Environment:
    tools = {"add": f"{HERE}:add", "divide": f"{HERE}:divide"}
    return create_environment(ENVIRONMENTS["tools"], {"tools": tools, **values})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(text: str, *, chat: bool = True, state: Mapping[str, Any] | None = None) -> Step:
    made = environment(chat=chat)
    task = made.make_task(TaskRequest(row={"prompt": "1+1", "answer": "2"}))
    found = made.step(task, state or {}, Response(text=text, finish_reason="stop"))
    assert isinstance(found, Step)
    return found


def test_the_template_is_told_what_tools_there_are() -> None:
    task = environment().make_task(TaskRequest(row={"prompt": "1+1", "answer": "2"}))
    schema = task.tools[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "Adds two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    assert schema["parameters"]["properties"]["b"]["default"] == 1


def test_calls_are_answered_in_order() -> None:
    found = step(f"Let me see. {call('add', a=1, b=2)} and {call('add', a=5)}")
    assert [message["content"] for message in found.messages] == ["3", "6"]
    assert {message["role"] for message in found.messages} == {"tool"}
    assert found.state == {"tool_calls": 2, "tool_errors": 0} and not found.done
    plain = step(call("add", a=1, b=2), chat=False)
    assert "3" in plain.text and not plain.messages


def test_an_answer_without_calls_ends_the_episode() -> None:
    assert step("2").done


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>{", "must end with"),
        ("<tool_call>{</tool_call>", "one JSON object"),
        ("<tool_call>[]</tool_call>", "with a name"),
        ('<tool_call>{"name": 3}</tool_call>', "with a name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments must be"),
        (call("subtract", a=1), "there is no tool 'subtract'; tools: add, divide"),
        (call("add"), "add: a: Field required"),
        (call("add", a="x"), "add: a: Input should be a valid integer"),
        (call("add", a=1, c=2), "add: c: Extra inputs"),
        (call("divide", a=1, b=0), "ZeroDivisionError"),
    ],
)
def test_a_call_that_makes_no_sense_is_an_observation(text: str, told: str) -> None:
    found = step(text)
    (message,) = found.messages
    assert message["content"].startswith("error: ") and told in message["content"]
    assert found.state == {"tool_calls": 1, "tool_errors": 1}


@given(st.text(alphabet='<>/tool_call{}"name:argumts[]', max_size=60))
@settings(max_examples=50)
def test_no_text_breaks_the_parser(text: str) -> None:
    body = parse_calls(f"<tool_call>{text}")
    assert body and all(call.error or call.name or call.arguments is not None for call in body)


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        '{"name": "f", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}",
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "\\udfff"}',
        '{"name": "f", "arguments": {"a": NaN}}',
    ],
    ids=["deep", "rather deep", "half a pair", "name", "NaN"],
)
def test_what_no_reader_of_json_takes_is_an_error_not_a_crash(body: str) -> None:
    (found,) = parse_calls(f"<tool_call>{body}</tool_call>")
    assert found.error


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("1+", "SyntaxError"),
        ("pi", "NameError"),
        ("1/0", "ZeroDivisionError"),
        ("library", "LibraryError: no such table"),
        ("exit", "SystemExit: usage: calculate N"),
        ("loop", "ValueError"),
        ("{(1,): 2}", "TypeError"),
    ],
)
def test_whatever_a_function_raises_the_model_is_told(expression: str, told: str) -> None:
    """None of it is a reason to give up its group."""
    made = environment(tools={"calculate": f"{HERE}:calculate"})
    task = made.make_task(TaskRequest(row={"prompt": "1+1", "answer": "2"}))
    found = made.step(task, {}, Response(text=call("calculate", expression=expression)))
    assert isinstance(found, Step) and f"error: {told}" in found.text
    assert found.state == {"tool_calls": 1, "tool_errors": 1}


def test_turns_are_bounded_and_long_answers_cut() -> None:
    made = environment(max_turns=2, max_characters=3)
    task = made.make_task(TaskRequest(row={"prompt": "1+1", "answer": "2"}))
    asking = Response(text=call("divide", a=1, b=3))
    first = made.step(task, {}, asking)
    assert isinstance(first, Step) and "0.3\n" in first.text
    last = made.step(task, first.state, Response(text=asking.text, turns=(Turn(text="x"),)))
    assert isinstance(last, Step) and last.done


def test_a_model_that_repeats_its_call_has_so_many_answered() -> None:
    made = environment(max_calls=2)
    task = made.make_task(TaskRequest(row={"prompt": "1+1", "answer": "2"}))
    found = made.step(task, {}, Response(text=call("add", a=1) * 1000))
    assert isinstance(found, Step)
    assert found.text.count("<tool_response>") == 3
    assert "2 calls at most; 998 more are not made" in found.text
    assert found.state == {"tool_calls": 1000, "tool_errors": 998}


async def test_the_last_answer_is_graded_and_calls_are_scores() -> None:
    made = environment(reward_settings={"answer_tag": "answer"})
    task = made.make_task(TaskRequest(row={"prompt": "1+1", "answer": "2"}))
    state = {"tool_calls": 3, "tool_errors": 1}
    responses = [Response(text="<answer>2</answer>", state=state), Response(text="2")]
    first, second = await made.reward(task, responses)  # type: ignore[misc]
    assert (first.reward, dict(first.scores)) == (1.0, {"tool_calls": 3.0, "tool_errors": 1.0})
    assert (second.reward, dict(second.scores)) == (0.0, {"tool_calls": 0.0, "tool_errors": 0.0})


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": {"x": f"{HERE}:nothing"}}, "tools.x"),
        ({"tools": {"x": f"{HERE}:HERE"}}, "tools.x"),
        ({"tools": {"x": f"{HERE}:anything"}}, "tools.x"),
        ({"tools": {"x": f"{HERE}:later"}}, "tools.x"),
        ({"max_turns": 0}, "max_turns"),
        ({"generate": f"{HERE}:add"}, "generate"),
        ({"reward": "fuzzy"}, "reward"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingError) as caught:
        environment(**values)
    assert caught.value.key == key
