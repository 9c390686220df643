"""Tool calls: found in what was sampled, streamed safely, and put back as they were sampled."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.openai.generation import CallFilter, ToolCalls

CALL = '<tool_call>{"name":"add",  "arguments":{"a":1}}</tool_call>'


def test_calls_are_found_with_what_was_said_before() -> None:
    said, calls = ToolCalls().split(f"I add.\n{CALL}\n{CALL}")
    assert said == "I add."
    assert [call["function"]["name"] for call in calls] == ["add", "add"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
    assert calls[0]["id"] != calls[1]["id"]


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        '<tool_call>{"name":',
        "<tool_call>[]</tool_call>",
        f"{CALL}<tool_call>x</tool_call>",
    ],
)
def test_what_is_no_whole_call_stays_text(text: str) -> None:
    assert ToolCalls().split(text) == (text, [])


def test_calls_that_come_back_are_the_text_as_it_was_sampled() -> None:
    tools = ToolCalls()
    text = f"I add.\n{CALL}"
    said, calls = tools.split(text)
    message = {"role": "assistant", "content": said, "tool_calls": calls}
    assert tools.restore(message, {}) == {"role": "assistant", "content": text}
    recorded = dict.fromkeys((call["id"] for call in calls), text)
    assert ToolCalls().restore(message, recorded) == {"role": "assistant", "content": text}
    foreign = {"role": "assistant", "tool_calls": [{"id": "call_of_another", "function": {}}]}
    assert tools.restore(foreign, {}) == foreign
    mixed = {"role": "assistant", "tool_calls": [*calls, *foreign["tool_calls"]]}
    assert tools.restore(mixed, {}) == mixed


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"content": None}, True),
        ({"content": [{"type": "text", "text": "I add.\n"}]}, True),
        ({"content": "I subtract."}, False),
        ({"calls": 1}, False),
        ({"arguments": '{"b": 2,"a": 1}'}, True),
        ({"arguments": {"a": 1, "b": 2}}, True),
        ({"arguments": '{"a": 1, "b": 3}'}, False),
        ({"arguments": '{"a": 1, "b": '}, False),
        ({"arguments": "[" * 100_000}, False),
        ({"arguments": None}, False),
        ({"name": "subtract"}, False),
    ],
)
def test_a_call_that_its_caller_has_rewritten_is_not_the_one_that_was_sampled(
    change: dict[str, Any], is_same: bool
) -> None:
    """The model would read, and the next turn be trained on, what nobody sent."""
    tools = ToolCalls()
    add = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    text = f"I add.\n{add}\n{CALL}"
    said, calls = tools.split(text)
    sent = {
        "role": "assistant",
        "content": change.get("content", said),
        "tool_calls": calls[: change.get("calls", 2)],
    }
    calls[0]["function"] |= {k: v for k, v in change.items() if k in ("name", "arguments")}
    restored = {"role": "assistant", "content": text}
    assert tools.restore(sent, {}) == (restored if is_same else sent)


parts = st.lists(
    st.sampled_from(["say ", "<", "<tool", "_call>", "\n", CALL, '{"name":1}', "</tool_call>"]),
    max_size=8,
)


@settings(max_examples=50)
@given(parts, st.integers(1, 7))
def test_a_stream_says_what_the_whole_answer_says(made: list[str], size: int) -> None:
    text = "".join(made)
    stream = CallFilter(ToolCalls())
    shown = "".join(stream.add(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = stream.finish()
    said, expected = ToolCalls().split(text)
    assert shown + rest == said
    names = [call["function"] for call in calls]
    assert names == [call["function"] for call in expected]


@pytest.mark.parametrize("text", ["\n", "</tool_call>"])
def test_an_answer_that_goes_on_for_ever_costs_no_more_the_longer_it_is(text: str) -> None:
    def seconds(count: int) -> float:
        stream, begun = CallFilter(ToolCalls()), time.process_time()
        for _ in range(count):
            stream.add(text)
        return time.process_time() - begun

    assert seconds(160_000) < 100 * max(seconds(10_000), 1e-3)  # quadratic: 256 times
