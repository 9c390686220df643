"""The worker's tokenizer agrees with transformers, token for token."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.config import ConfigError
from sluice.samples.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    NoChatTemplateError,
)
from sluice.samples.tokenizer import TextTokenizer

TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- if loop.index0 > 8 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ '=' + message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim }}={{ message | tojson | length }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}={% endif %}"""
CHAT = [
    {"role": "system", "content": " 12 "},
    {"role": "user", "content": "3 4"},
    {"role": "assistant", "content": "34"},
    {"role": "user", "content": "é<5>"},
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("plain"), 0)


@pytest.fixture
def chatty(plain: Path, tmp_path: Path) -> Path:
    """With a chat template, and a beginning-of-sequence token around plain texts."""
    tokenizer = AutoTokenizer.from_pretrained(plain)
    backend = tokenizer.backend_tokenizer
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(
        single="= $A", special_tokens=[("=", tokenizer.convert_tokens_to_ids("="))]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", bos_token="="
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", ["0123=", "", "  9 9\n", "1<end>2", "abc7"])
def test_plain_texts_are_encoded_as_by_transformers(chatty: Path, text: str) -> None:
    ours, theirs = TextTokenizer(chatty), AutoTokenizer.from_pretrained(chatty)
    assert ours.encode(text, special=True) == theirs(text).input_ids
    bare = theirs(text, add_special_tokens=False).input_ids
    assert ours.encode(text, special=False) == bare
    assert ours.end_token_id == theirs.eos_token_id


def test_its_directory_may_be_a_text_as_for_transformers(chatty: Path) -> None:
    """As a program writes it that copies an example."""
    theirs = AutoTokenizer.from_pretrained(str(chatty))
    assert TextTokenizer(str(chatty)).encode("12=", special=True) == theirs.encode("12=")
    with pytest.raises(ConfigError, match=r"nowhere/tokenizer\.json does not exist"):
        TextTokenizer("nowhere")


def test_conversations_are_rendered_as_by_transformers(chatty: Path) -> None:
    ours, theirs = TextTokenizer(chatty), AutoTokenizer.from_pretrained(chatty)
    expected: Any = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == expected
    assert len(expected) > 10
    text = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    special = {"bos_token": "=", "eos_token": "<end>", "pad_token": "<pad>"}
    assert ChatTemplate(TEMPLATE, special).render(CHAT) == text


def test_variables_of_a_template_are_given_as_by_transformers(chatty: Path) -> None:
    path = chatty / "chat_template.jinja"
    path.write_text(path.read_text() + "{% if think is defined and not think %}99{% endif %}")
    ours, theirs = TextTokenizer(chatty), AutoTokenizer.from_pretrained(chatty)
    for options in ({"think": False}, {"think": True}, {}):
        expected: Any = theirs.apply_chat_template(
            CHAT, add_generation_prompt=True, return_dict=False, **options
        )
        assert ours.encode_chat(CHAT, options=options) == expected
    assert ours.encode_chat(CHAT, options={"think": False}) != ours.encode_chat(CHAT)


@pytest.mark.parametrize("name", ["thinks", "messages", "add_generation_prompt", "bos_token"])
def test_a_variable_that_a_template_has_not_is_refused(chatty: Path, name: str) -> None:
    """It would change nothing, or be another's: special tokens and messages are given."""
    path = chatty / "chat_template.jinja"
    path.write_text(path.read_text() + "{% if think is defined %}9{% endif %}")
    told = f"no variable '{name}'; its own: think"
    with pytest.raises(ChatTemplateError, match=told):
        TextTokenizer(chatty).encode_chat(CHAT, options={name: False})


def test_responses_lose_their_special_tokens_only(plain: Path) -> None:
    ours, theirs = TextTokenizer(plain), AutoTokenizer.from_pretrained(plain)
    ids = [[1, 2, 11], [12, 3], [], [10, 10]]
    assert ours.decode(ids) == theirs.batch_decode(ids, skip_special_tokens=True)
    assert ours.decode(ids)[0] == "12"


def test_marks_of_tool_calls_are_text_though_a_model_has_them_as_special_tokens(
    plain: Path, tmp_path: Path
) -> None:
    """Its calls were seen by no environment and no client."""
    made = PreTrainedTokenizerFast.from_pretrained(plain)
    marks = ["<tool_call>", "</tool_call>", "<other>"]
    made.add_special_tokens({"additional_special_tokens": marks})
    made.save_pretrained(tmp_path)
    text = "1<tool_call>23</tool_call><other>=<end>"
    ids = TextTokenizer(tmp_path).encode(text, special=True)
    assert ids == made.encode(text) and len(ids) == 8
    assert made.decode(ids, skip_special_tokens=True) == "123="
    assert TextTokenizer(tmp_path).decode([ids]) == ["1<tool_call>23</tool_call>="]
    add = TextTokenizer(tmp_path).decoder(special=False)
    assert "".join(map(add, ids)) == "1<tool_call>23</tool_call>="
    assert TextTokenizer(tmp_path).decode([ids], special=True) == [text]


def test_a_template_in_the_configuration_file_counts_too(chatty: Path) -> None:
    expected = TextTokenizer(chatty).encode_chat(CHAT)
    path = chatty / "tokenizer_config.json"
    values = json.loads(path.read_text())
    source = (chatty / "chat_template.jinja").read_text()
    (chatty / "chat_template.jinja").unlink()
    for given in (source, [{"name": "default", "template": source}]):
        path.write_text(json.dumps({**values, "chat_template": given}))
        assert TextTokenizer(chatty).encode_chat(CHAT) == expected


def test_what_cannot_be_rendered_is_refused(plain: Path, chatty: Path) -> None:
    with pytest.raises(NoChatTemplateError):
        TextTokenizer(plain).encode_chat(CHAT)
    with pytest.raises(ChatTemplateError, match="unknown role judge"):
        TextTokenizer(chatty).encode_chat([{"role": "judge", "content": "1"}])


def test_a_number_too_large_for_a_template_is_refused() -> None:
    template = ChatTemplate("{{ 'think ' * budget }}", {})
    for budget in (10**18, 10**400):
        with pytest.raises(ChatTemplateError):
            template.render([], options={"budget": budget})


def test_a_schema_nested_too_deep_for_the_macros_of_a_template_is_refused() -> None:
    macro = "{% macro show(p) %}[{% if p.of %}{{ show(p.of) }}{% endif %}]{% endmacro %}"
    template = ChatTemplate(macro + "{{ show(tools[0]) }}", {})
    assert template.render(CHAT, tools=[{"of": {"of": {}}}]) == "[[]]"  # an empty one is not shown
    schema: dict[str, Any] = {}
    for _ in range(1000):
        schema = {"of": schema}
    with pytest.raises(ChatTemplateError, match="recursion"):
        template.render(CHAT, tools=[schema])


def test_a_template_that_python_cannot_compile_is_an_error_of_the_configuration(
    chatty: Path,
) -> None:
    loops = 30  # Python nests 20 at most
    source = "{% for _ in messages %}" * loops + "{% endfor %}" * loops
    (chatty / "chat_template.jinja").write_text(source)
    with pytest.raises(ConfigError, match="nested"):
        TextTokenizer(chatty)


def test_a_directory_without_tokenizer_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(ConfigError):
        TextTokenizer(tmp_path)


def test_an_unknown_token_that_the_vocabulary_has_not_is_an_error_of_the_configuration(
    plain: Path, tmp_path: Path
) -> None:
    """The first text with a character of no other token failed with it."""
    told = json.loads((plain / "tokenizer.json").read_text())
    for model in ("WordLevel", "WordPiece"):
        vocabulary = {"a": 0, "[UNK]": 1}
        told["model"] = {"type": model, "vocab": vocabulary, "unk_token": "[UNK]"}
        if model == "WordPiece":
            told["model"] |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
        (tmp_path / "tokenizer.json").write_text(json.dumps(told))
        TextTokenizer(tmp_path)
        del vocabulary["[UNK]"]
        (tmp_path / "tokenizer.json").write_text(json.dumps(told))
        with pytest.raises(ConfigError, match=r"unknown token '\[UNK\]' is not in its vocabulary"):
            TextTokenizer(tmp_path)


def test_a_long_text_is_encoded_as_a_short_one_and_holds_up_no_other_thread(chatty: Path) -> None:
    tokenizer = TextTokenizer(chatty)
    text = "12=3 " * 40_000
    per_short = tokenizer.encode(text[:5], special=False)
    passed, ended = 0, threading.Event()

    def count() -> None:
        nonlocal passed
        while not ended.is_set():
            passed += 1
            ended.wait(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    tokenizer.encode("1", special=False)
    for _ in range(20):  # the thread that counts may be stopped meanwhile, but not each time
        before = passed
        ids = tokenizer.encode(text, special=True)
        during = passed - before
        if during > 5:
            break
    ended.set()
    counter.join()
    assert ids == [tokenizer.encode("", special=True)[0], *per_short * 40_000]
    assert during > 5, "the interpreter was held all the while"
