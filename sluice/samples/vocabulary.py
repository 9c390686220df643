"""What a model's token ids mean, in a digest: two models that share it can score each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from sluice.config import ConfigError


def vocabulary_digest(directory: Path) -> str:
    """Returns a digest of the tokens by id, added ones too; empty where there is no fast tokenizer.

    Chat template, normalisation and what a model puts around a text are no part of it, nor is which
    file says so, a tokenizer.json or a tiktoken.model.
    """
    path = directory / "tokenizer.json"
    try:
        if path.is_file():
            tokens = _tokens(json.loads(path.read_bytes()))
        else:
            from sluice.samples.tiktoken_model import read_vocabulary  # few have such a file

            settings = json.loads((directory / "tokenizer_config.json").read_bytes())
            tokens = read_vocabulary(directory, settings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""  # who encodes texts refuses the file by name
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(tokens.items())).encode())


def check_same(who: str, theirs: str, own: str) -> None:
    """Raises ConfigError for another vocabulary than the trainer's, where both are known."""
    if own and theirs and own != theirs:
        raise ConfigError(
            f"{who} has another vocabulary than the trainer's model (digests {theirs} and {own}): "
            "the same ids are other tokens"
        )


def _tokens(tokenizer: Any) -> dict[int, str]:
    """Texts by id, of the layout that the package `tokenizers` writes."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {int(number): str(token) for token, number in vocabulary.items()}
    else:  # of unigram models: pairs of token and score
        tokens = {number: str(token) for number, (token, _) in enumerate(vocabulary)}
    for added in tokenizer.get("added_tokens", ()):
        tokens[int(added["id"])] = str(added["content"])
    return tokens
