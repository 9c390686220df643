"""Which tokens of a conversation are trained on, against expectations made by hand."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from sluice.samples.chat_template import ChatTemplate, ChatTemplateError
from sluice.samples.conversations import ConversationError, mask_answer, mask_conversation
from sluice.samples.tokenizer import TextTokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# opens a turn with reasoning, which no turn in the history has
REASONING = SMOLLM2.replace("assistant\n' }}", "assistant\n<think>\n' }}")
# the last turn alone shows its reasoning
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}"
    "{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (  # no opening of its own, as Mistral's
    "{% for message in messages %}{% if message.role == 'user' %}[{{ message.content }}]"
    "{% else %} {{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
GROUPED = (  # answers of tools that follow one another are one turn, as Qwen's
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n({{ m.content }})"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDED_BY_NEXT = (  # as GLM's: a turn ends where the user or a tool begins, with a token of theirs
    "{% for m in messages %}{{ {'user': '<|im_start|>', 'tool': '<|im_end|>'}[m.role] or ':' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes, two"},
]
TURNS = ["two<|im_end|>", "yes, two<|im_end|>"]


def make_tokenizer(directory: Path, template: str) -> TextTokenizer:
    """One token a character, and the two special ones."""
    special = ["<|im_start|>", "<|im_end|>"]
    words = [*special, *string.printable]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return TextTokenizer(directory)


def read(tokenizer: TextTokenizer, masked: Any) -> tuple[str, list[str]]:
    """The text before the first trained token, and the trained stretches."""
    ids, prompt = masked.token_ids.tolist(), masked.prompt_length
    words = {tokenizer.encode(word, special=False)[0]: word for word in string.printable}
    words |= {0: "<|im_start|>", 1: "<|im_end|>"}
    assert len(masked.loss_mask) == len(ids) - prompt
    stretches, before = [], False
    for token, trained in zip(ids[prompt:], masked.loss_mask, strict=True):
        if trained:
            stretches += [""] * (not before)
            stretches[-1] += words[token]
        before = bool(trained)
    return "".join(words[token] for token in ids[:prompt]), stretches


def test_each_turn_of_the_assistant_is_trained_on_with_its_end(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, SMOLLM2)
    (masked,) = mask_conversation(tokenizer, CHAT)
    opening = (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert read(tokenizer, masked) == (opening, TURNS)
    prompt = tokenizer.encode_chat(CHAT[:1])  # what a rollout would be given
    assert masked.token_ids[: masked.prompt_length].tolist() == prompt
    between = len("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    between -= len("<|im_start|>") * 2 + len("<|im_end|>") - 3
    hand_made = [True] * 4 + [False] * between + [True] * 9
    assert masked.loss_mask.tolist() == hand_made


def test_an_opening_that_the_history_lacks_is_no_part_of_the_turn(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, REASONING)
    (masked,) = mask_conversation(tokenizer, CHAT)
    before, turns = read(tokenizer, masked)
    assert turns == TURNS
    assert before.endswith("<|im_start|>assistant\n")
    alike = [CHAT[0], {"role": "assistant", "content": "<thing>"}]
    (masked,) = mask_conversation(tokenizer, alike)
    assert read(tokenizer, masked) == (before, ["<thing><|im_end|>"])


def test_a_template_without_an_opening(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, BRACKETS)
    (masked,) = mask_conversation(tokenizer, CHAT)
    assert read(tokenizer, masked) == ("[1+1?]", [" " + turn for turn in TURNS])


def test_turns_that_are_rewritten_later_are_sequences_of_their_own(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, FORGETFUL)
    chat = [dict(turn) for turn in CHAT]
    chat[1]["content"] = "hm</think>two"
    first, second = mask_conversation(tokenizer, chat)
    assert read(tokenizer, first)[1] == ["hm</think>two<|im_end|>"]
    before, turns = read(tokenizer, second)
    assert turns == TURNS[1:]
    assert "assistant\ntwo<|im_end|>" in before


def test_tools_and_system_are_not_trained_on(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, SMOLLM2)
    chat = [
        {"role": "system", "content": "Be brief"},
        *CHAT[:2],
        {"role": "tool", "content": "2"},
        CHAT[3],
        {"role": "user", "content": "thanks"},
    ]
    (masked,) = mask_conversation(tokenizer, chat)
    assert read(tokenizer, masked)[1] == TURNS
    assert masked.loss_mask[-1]  # nothing is kept behind the last turn


def test_answers_of_several_tools_are_not_trained_on(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, GROUPED)
    tools = [{"role": "tool", "content": each} for each in "123"]
    chat = [*CHAT[:2], *tools, CHAT[3], *tools[:2], CHAT[3]]
    (masked,) = mask_conversation(tokenizer, chat)
    assert read(tokenizer, masked)[1] == [*TURNS, TURNS[1]]
    assert masked.token_ids.tolist() == tokenizer.encode_chat(chat)[: len(masked.token_ids)]


def test_a_turn_that_the_next_one_ends_is_trained_on_with_that_token(tmp_path: Path) -> None:
    chat = [*CHAT[:2], {"role": "tool", "content": "2"}, CHAT[3], *CHAT[:2]]
    unended = make_tokenizer(tmp_path, ENDED_BY_NEXT)
    (masked,) = mask_conversation(unended, chat)
    assert read(unended, masked) == ("<|im_start|>1+1?:", ["two", "yes, two", "two"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    tokenizer = TextTokenizer(tmp_path)
    (masked,) = mask_conversation(tokenizer, chat)
    ends = ["<|im_end|>", "<|im_start|>", "<|im_start|>"]
    trained = [turn + end for turn, end in zip(["two", "yes, two", "two"], ends, strict=True)]
    assert read(tokenizer, masked) == ("<|im_start|>1+1?:", trained)
    assert masked.token_ids[:-1].tolist() == tokenizer.encode_chat(chat)[:-1]
    ended = make_tokenizer(tmp_path, SMOLLM2)
    assert read(ended, *mask_conversation(ended, CHAT))[1] == TURNS


def test_a_plain_answer_ends_with_the_end_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, SMOLLM2)
    masked = mask_answer(tokenizer, "1+1=", "2")
    assert read(tokenizer, masked) == ("1+1=", ["2<|im_end|>"])


def test_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, SMOLLM2)
    with pytest.raises(ConversationError, match="no message is the assistant's"):
        mask_conversation(tokenizer, CHAT[:1])
    with pytest.raises(ConversationError, match="nothing before it"):
        mask_conversation(tokenizer, CHAT[1:2])
    with pytest.raises(ConversationError, match="no tokens"):
        mask_answer(tokenizer, "", "2")
    refusing = make_tokenizer(tmp_path, "{{ raise_exception('no') }}")
    with pytest.raises(ChatTemplateError, match="no"):
        mask_conversation(refusing, CHAT)


def test_a_conversation_is_rendered_twice_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time up to the turn, which of hundreds of turns is all of the work."""
    rendered, render = list[int](), ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate,
        "render",
        lambda self, messages, **more: (
            rendered.append(len(messages)) or render(self, messages, **more)
        ),
    )
    tokenizer = make_tokenizer(tmp_path, SMOLLM2)
    (masked,) = mask_conversation(tokenizer, CHAT * 20)
    assert read(tokenizer, masked)[1] == TURNS * 20
    assert len(rendered) == 2 * 40
