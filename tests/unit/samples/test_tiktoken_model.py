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
from tokenizers import Tokenizer, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sluice.config import ConfigError
from sluice.samples.tiktoken_model import PATTERN, RESERVED
from sluice.samples.tokenizer import TextTokenizer
from sluice.samples.vocabulary import vocabulary_digest

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


def byte_level(ranks: Ranks) -> Tokenizer:
    """The ranks by texts as transformers write bytes."""
    letters = bytes_to_unicode()
    texts = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    return Tokenizer(models.BPE(texts, []))


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
        (_line(300, base64.b64encode(bytes(99_999)) + b" 300\n"), "tokens are too long"),
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


def test_many_long_tokens_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    """Each is looked at by every two parts of it: of these they are four million, of kilobytes."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for length in range(2, 3000):
        ranks[b"a" * length] = len(ranks)
    with pytest.raises(ConfigError, match="tokens are too long"):
        TextTokenizer(write(tmp_path, ranks))


@pytest.mark.parametrize("lost", [300, -300])
def test_special_tokens_elsewhere_than_behind_the_file_are_refused(
    tmp_path: Path, ranks: Ranks, lost: int
) -> None:
    """A download that ended at a line's end, or a file of another model, is whole by itself."""
    named = {str(len(ranks) + lost): {"content": "[BOS]"}}
    with pytest.raises(ConfigError, match=f"names token {len(ranks) + lost}, and tiktoken.model"):
        TextTokenizer(write(tmp_path, ranks, added_tokens_decoder=named))


@pytest.mark.parametrize("said", [[1], "text", 3])
def test_special_tokens_that_are_no_object_are_refused(
    tmp_path: Path, ranks: Ranks, said: Any
) -> None:
    with pytest.raises(ConfigError, match="added_tokens_decoder is no object"):
        TextTokenizer(write(tmp_path, ranks, added_tokens_decoder=said))


def test_its_vocabulary_is_that_of_the_tokenizer_json_made_of_it(
    tmp_path: Path, ranks: Ranks
) -> None:
    """Workers and trainers are compared by it, whichever file they read."""
    own, other, made = (tmp_path / name for name in ("own", "other", "made"))
    for directory in (own, other, made):
        directory.mkdir()
    write(own, ranks)
    write(other, ranks, added_tokens_decoder=None)
    first = len(ranks)
    document = json.loads(byte_level(ranks).to_str())
    document["added_tokens"] = [
        {"id": first + number, "content": NAMES.get(number, f"<|reserved_token_{first + number}|>")}
        for number in range(RESERVED)
    ]
    (made / "tokenizer.json").write_text(json.dumps(document))
    assert vocabulary_digest(own) == vocabulary_digest(made) != ""
    assert vocabulary_digest(other) not in ("", vocabulary_digest(own))
    (other / "tiktoken.model").write_text("damaged")
    assert vocabulary_digest(other) == ""


@pytest.mark.parametrize(
    "code", [None, "tokenization_qwen.QWenTokenizer", [], {}, [None], "../tokenization_kimi"]
)
def test_other_code_is_not_guessed_at(tmp_path: Path, ranks: Ranks, code: Any) -> None:
    with pytest.raises(ConfigError, match=r"write a tokenizer\.json"):
        TextTokenizer(write(tmp_path, ranks, code))


@pytest.mark.parametrize(
    "said",
    [
        3,
        "text",
        [],
        {},
        {"content": 7},
        {"content": None},
        {"content": ""},
        {"content": "a"},
        {"content": "[EOS]"},
    ],
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
