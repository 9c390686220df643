"""Whatever JSON comes, a caller is told what is wrong with it: nothing of it is a bug of ours."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.rollout.engine.wire import sampling_to_proto
from services.rollout.openai.generation import ToolCalls
from services.rollout.openai.prompts import chat_prompt, plain_prompt
from services.rollout.openai.requests import ChatRequest, CompletionRequest, known_fields
from sluice.runtime.http import ApiError
from sluice.samples.tokenizer import TextTokenizer

# As Qwen's: it takes apart what it is given.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + ':' }}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role + '=' }}{{ m.content.split('</think>')[-1] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + '(' }}"
    "{% for key, value in call.function.arguments.items() %}{{ key + value }}{% endfor %}"
    "{% endfor %}{% endfor %}{% if depth %}{{ 9 // depth }}{% endif %}"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "{}", "[1]", "1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


def some(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of the fields, well made or not."""
    return st.fixed_dictionaries({}, optional={k: v | JSON for k, v in fields.items()})


CALL = some(id=JSON, type=JSON, function=some(name=st.just("f"), arguments=JSON))
MESSAGE = some(
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.just("hm") | st.lists(some(type=st.just("text"), text=st.just("x")), max_size=2),
    tool_calls=st.lists(CALL, max_size=2),
)
BODY = some(
    messages=st.lists(MESSAGE, min_size=1, max_size=3),
    tools=st.lists(some(type=JSON, function=some(name=st.just("f"))), max_size=2),
    chat_template_kwargs=some(depth=JSON),
    tool_choice=st.sampled_from(["auto", "none"]),
    stop=st.just("x"),
    prompt=st.just("x") | st.lists(st.integers(-1, 11) | st.just(1 << 70), max_size=2),
    max_tokens=st.just(3),
    top_k=st.sampled_from([-1, 0, 5, 1 << 40]),
    stop_token_ids=st.lists(st.sampled_from([-1, 3, 1 << 40]), max_size=1),
    temperature=st.sampled_from([0, 0.5, 1e308]),
    seed=st.sampled_from([-1, 3, 1 << 62]),
    echo=st.booleans(),
    logit_bias=JSON,
)


def calling(arguments: str) -> dict[str, Any]:
    """A conversation in which a tool was called."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return create_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def create_tokenizer(directory: Path, template: str) -> TextTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    return TextTokenizer(directory)


async def prepare(tokenizer: TextTokenizer, body: Any) -> None:
    chat = ChatRequest.model_validate(known_fields(body))
    messages = [ToolCalls().restore(message, {}) for message in chat.messages]
    assert (await chat_prompt(tokenizer, chat, messages)).token_ids
    sampling_to_proto(chat.sampling(3))


async def prepare_completion(tokenizer: TextTokenizer, body: Any) -> None:
    request = CompletionRequest.model_validate(known_fields(body))
    for prompt in request.prompts:
        assert (await plain_prompt(tokenizer, prompt)).token_ids
    sampling_to_proto(request.sampling(3))


@settings(max_examples=50)
@given(body=BODY | JSON)
@example(body={"messages": [{"role": "user", "tool_calls": [{"id": []}]}]})
@example(body={"messages": [{"role": "user", "tool_calls": 5}]})
@example(body=calling("[" * 100_000))
@example(body=calling('{"a": "\\ud800"}'))
@example(body=calling('{"a": NaN}'))
@example(body={"messages": [{"role": "user"}], "chat_template_kwargs": {"depth": "a"}})
@example(body={"messages": [{"role": "user"}], "top_k": 1 << 40})
@example(body={"prompt": [-1]})
@example(body={"prompt": [1 << 70]})
@example(body={"prompt": "x", "stop_token_ids": [1 << 40]})
def test_no_body_is_an_internal_error(tokenizer: TextTokenizer, body: Any) -> None:
    json.dumps(body)
    for work in (prepare, prepare_completion):
        try:
            asyncio.run(work(tokenizer, body))
        except (ApiError, ValidationError) as error:
            assert str(error)


async def test_a_long_conversation_holds_up_no_other_call(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'x' %}x{% endif %}{% endfor %}a"
    tokenizer = create_tokenizer(tmp_path, template)
    request = ChatRequest(messages=[{"role": "user", "content": "a"}] * 50_000)
    for _ in range(20):  # the thread of the loop may be stopped meanwhile, but not each time
        work = asyncio.create_task(chat_prompt(tokenizer, request, request.messages))
        turns = 0
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert work.result().text == "a"
        if turns > 10:
            break
    assert turns > 10
