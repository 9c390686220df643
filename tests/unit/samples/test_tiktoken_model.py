"""A `tiktoken.model` is read as the code beside it would, against byte-pair merging by hand."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from sluice.config import ConfigError
from sluice.samples.tiktoken_model import PATTERN, RESERVED
from sluice.samples.tokenizer import TextTokenizer

LETTERS = "aaabcdeAB Éé ñ中文字12345 \n\r\t  '!?.,。한글éſ's't're\u0301ʰǅ😀\u2028"
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|tool_call_begin|>"}  # behind the ranks
KIMI, MOONLIGHT = "tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer"
Ranks = dict[bytes, int]


def draw_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(length))


def split(text: str) -> list[str]:
    found: list[str] = regex.findall(f"(?V1){PATTERN}", text)
    return found


def merge(piece: bytes, ranks: Ranks) -> list[int]:
    """Join the leftmost pair that is the lowest token, until none is one."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        found = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def learn(rng: random.Random) -> Ranks:
    """Ranks of byte-pair encoding over a drawn text."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    texts = [*(draw_text(rng, 40) for _ in range(120)), "a" * 40, " " * 30, "The cat's cats"]
    words = [[bytes([b]) for b in piece.encode()] for text in texts for piece in split(text)]
    for _ in range(150):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        first, second = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(first + second, len(ranks))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == (first, second):
                    word[at : at + 2] = [first + second]
                at += 1
    return ranks


def write(directory: Path, ranks: Ranks, code: Any = (KIMI, None), **settings: Any) -> Path:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    named = {
        str(len(ranks) + number): {"content": name, "special": number != 3}
        for number, name in NAMES.items()
    }
    said = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": named}
    said |= {**settings, "auto_map": {"AutoTokenizer": code}}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    return directory


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return learn(random.Random(5))


@pytest.mark.parametrize("code", [(KIMI, None), (MOONLIGHT, None), KIMI])
def test_random_texts_are_tokens_as_merged_by_hand(tmp_path: Path, ranks: Ranks, code: Any) -> None:
    rng, tokenizer = random.Random(7), TextTokenizer(write(tmp_path, ranks, code))
    for _ in range(300):
        text = draw_text(rng, rng.randrange(60))
        expected = [token for piece in split(text) for token in merge(piece.encode(), ranks)]
        assert tokenizer.encode(text, special=True) == expected
        assert tokenizer.decode([expected]) == [text]


def test_special_tokens_follow_the_ranks(tmp_path: Path, ranks: Ranks) -> None:
    tokenizer, first = TextTokenizer(write(tmp_path, ranks)), len(ranks)
    text = f"[BOS]a<|tool_call_begin|>b<|im_end|><|reserved_token_{first + RESERVED - 1}|>[EOS]"
    ids = tokenizer.encode(text, special=True)
    numbers = [0, None, 3, None, 2, RESERVED - 1, 1]
    for token, number in zip(ids, numbers, strict=True):
        assert number is None or token == first + number
    assert tokenizer.end_token_id == first + 1
    assert tokenizer.decode([ids]) == ["a<|tool_call_begin|>b"]  # a call is part of the answer


def test_a_tokenizer_json_beside_it_wins(tmp_path: Path, ranks: Ranks) -> None:
    write(tmp_path, ranks)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer"):
        TextTokenizer(tmp_path)


def _line(number: int, text: bytes) -> Callable[[list[bytes]], None]:
    def change(lines: list[bytes]) -> None:
        lines[number] = text

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_line(3, b"!!!! 3\n"), "line 4 is not a token and rank 3"),
        (_line(3, b"AA== 4\n"), "line 4 is not a token and rank 3"),
        (_line(3, b"AA==\n"), "line 4 is not a token and rank 3"),
        (_line(3, b"\xff\xfe 3\n"), "line 4 is not a token and rank 3"),
        (_line(3, b"AA== 3\n"), "a token stands twice, or a byte is none"),
        (_line(3, b" 3\n"), "line 4 is not a token and rank 3"),
        (_line(300, base64.b64encode(bytes(5000)) + b" 300\n"), "301 is a token of 5,000 bytes"),
        (lambda lines: lines.clear(), "a token stands twice, or a byte is none"),
        (lambda lines: lines.__delitem__(slice(200, None)), "or a byte is none"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, ranks: Ranks, change: Callable[[list[bytes]], None], text: str
) -> None:
    path = write(tmp_path, ranks) / "tiktoken.model"
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=text):
        TextTokenizer(tmp_path)


@pytest.mark.parametrize(
    "code", [None, "tokenization_qwen.QWenTokenizer", [], {}, [None], "../tokenization_kimi"]
)
def test_other_code_is_not_guessed_at(tmp_path: Path, ranks: Ranks, code: Any) -> None:
    with pytest.raises(ConfigError, match=r"write a tokenizer\.json"):
        TextTokenizer(write(tmp_path, ranks, code))


@pytest.mark.parametrize(
    "said", [3, "text", [], {}, {"content": 7}, {"content": None}, {"content": "[EOS]"}]
)
def test_bad_special_tokens_are_refused(tmp_path: Path, ranks: Ranks, said: Any) -> None:
    first = len(ranks)
    named = {str(first): said, str(first + 1): {"content": "[EOS]", "special": True}}
    with pytest.raises(ConfigError, match="token"):
        TextTokenizer(write(tmp_path, ranks, added_tokens_decoder=named))


def test_without_names_they_have_numbers(tmp_path: Path, ranks: Ranks) -> None:
    tokenizer = TextTokenizer(write(tmp_path, ranks, added_tokens_decoder=None))
    text = f"<|reserved_token_{len(ranks)}|>"
    assert tokenizer.encode(text, special=False) == [len(ranks)]
    assert tokenizer.end_token_id is None
