"""Answers in OpenAI's form, where tokens look alike."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.rollout.openai.completions import Names, Scored, chat_logprobs, completion_logprobs
from sluice.samples.tokenizer import TextTokenizer


def bytes_tokenizer(directory: Path) -> tuple[TextTokenizer, int, int, int]:
    """A token a byte; two that are parts of characters, and the letter a."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    tokenizer = TextTokenizer(directory)
    first, second = tokenizer.encode("é", special=False)
    (letter,) = tokenizer.encode("a", special=False)
    return tokenizer, first, second, letter


def test_of_tokens_that_look_alike_the_likeliest_is_named(tmp_path: Path) -> None:
    tokenizer, first, second, letter = bytes_tokenizer(tmp_path)
    scored = Scored([second], [-3.0], [[(first, -0.5), (letter, -1.0), (second, -3.0)]])
    found = completion_logprobs(Names(tokenizer, as_ids=False), scored)
    assert found["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -0.5, "a": -1.0}]
    named = completion_logprobs(Names(tokenizer, as_ids=True), scored)
    assert named["tokens"] == [f"token_id:{second}"]
    assert len(named["top_logprobs"][0]) == 3


def test_part_of_a_character_has_no_bytes(tmp_path: Path) -> None:
    tokenizer, first, _, letter = bytes_tokenizer(tmp_path)
    names = Names(tokenizer, as_ids=False)
    content = chat_logprobs(names, Scored([first, letter], [-1.0, -2.0]))["content"]
    assert [entry["bytes"] for entry in content] == [None, [97]]
    assert content[1]["token"] == "a"


def test_the_first_token_of_a_text_has_no_log_probability(tmp_path: Path) -> None:
    tokenizer, _, _, letter = bytes_tokenizer(tmp_path)
    scored = Scored([letter, letter], [None, -2.0], [[], [(letter, -2.0)]])
    found = completion_logprobs(Names(tokenizer, as_ids=False), scored)
    assert found["token_logprobs"] == [None, -2.0]
    assert found["top_logprobs"] == [None, {"a": -2.0}]
    assert found["text_offset"] == [0, 1]
