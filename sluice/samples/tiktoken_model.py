"""The tokenizer of a `tiktoken.model`, which Kimi and Moonlight have instead of a tokenizer.json.

The file has a line for each token: its bytes in base64, and its rank, which is its id. How a text
is split before, and how special tokens are numbered, is said by code of the model directory, which
is never run: here is what that code does.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

FILE = "tiktoken.model"
KNOWN = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
RESERVED = 256  # ids behind those of the file, for special tokens
LOOKS = 1 << 28  # bytes of the parts of all tokens, each of which is looked at by every two of its
_CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CASES}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CASES}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_tiktoken(directory: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a directory, `settings` being its tokenizer_config.json.

    Raises ValueError for a file that is none, and where the code that it needs is not known here.
    """
    texts, special = _read(directory, settings)
    merges = [
        (texts[token[:cut]], texts[token[cut:]])
        for token in texts
        for cut in range(1, len(token))
        if token[:cut] in texts and token[cut:] in texts
    ]
    vocabulary = {text: rank for rank, text in enumerate(texts.values())}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(special)
    return tokenizer


def read_vocabulary(directory: Path, settings: Mapping[str, Any]) -> dict[int, str]:
    """The tokens by id of the tokenizer that `read_tiktoken` makes, in a quarter of its time.

    Raises as it does.
    """
    texts, special = _read(directory, settings)
    return dict(enumerate([*texts.values(), *(token.content for token in special)]))


def _read(
    directory: Path, settings: Mapping[str, Any]
) -> tuple[dict[bytes, str], list[AddedToken]]:
    """Texts of the file's tokens, and the special ones behind them, each in the order of ids."""
    code = settings.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, Mapping) else None
    named = code[0] if isinstance(code, list) and code else code
    if named not in KNOWN:
        raise ValueError(
            f"{FILE} is read as by {' and '.join(KNOWN)}, not by {str(named)[:100]}: write a "
            "tokenizer.json"
        )
    texts = {token: _as_text(token) for token in _read_ranks(directory / FILE)}
    special = _special_tokens(settings, len(texts))
    apart = {*texts.values(), *(token.content for token in special)} - {""}
    if len(apart) < len(texts) + RESERVED:
        raise ValueError("two special tokens of tokenizer_config.json are alike")
    return texts, special


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Ranks by token, from 0 on, in their order."""
    ranks: dict[bytes, int] = {}
    number, looks = -1, 0
    for number, line in enumerate(path.read_bytes().splitlines()):
        token, _, rank = line.partition(b" ")
        try:
            read = base64.b64decode(token, validate=True)
        except binascii.Error:
            read = b""
        if not read or rank != str(number).encode():
            raise ValueError(f"{FILE}: line {number + 1} is not a token and rank {number}")
        looks += len(read) ** 2
        if looks > LOOKS:
            raise ValueError(f"{FILE}: its tokens are too long, at line {number + 1}")
        ranks[read] = number
    if len(ranks) <= number or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{FILE}: a token stands twice, or a byte is none")
    return ranks


def _byte_texts() -> dict[int, str]:
    """The character that stands for each byte, as in every byte-level BPE."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + n) for n, b in enumerate(others)}


_TEXTS = _byte_texts()


def _as_text(token: bytes) -> str:
    return "".join(map(_TEXTS.__getitem__, token))


def _special_tokens(settings: Mapping[str, Any], first: int) -> list[AddedToken]:
    """In the order of their ids; those that have no name are called by their number."""
    named = settings.get("added_tokens_decoder") or {}
    if not isinstance(named, Mapping):
        raise ValueError("tokenizer_config.json: added_tokens_decoder is no object")
    ids = range(first, first + RESERVED)
    if strays := named.keys() - set(map(str, ids)):
        raise ValueError(
            f"tokenizer_config.json names token {min(strays)[:20]}, and {FILE} leaves {first} to "
            f"{ids[-1]} for those: one of the files is another model's, or a part of it"
        )
    tokens = []
    for token_id in ids:
        content, is_special = f"<|reserved_token_{token_id}|>", True
        if str(token_id) in named:
            try:
                content = named[str(token_id)]["content"]
                is_special = named[str(token_id)].get("special", True)
            except (TypeError, KeyError):
                raise ValueError(f"tokenizer_config.json: token {token_id} has no text") from None
        tokens.append(AddedToken(content, special=is_special, normalized=False))
    return tokens
