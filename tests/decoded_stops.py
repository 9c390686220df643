"""Where a sample ends by its stop strings, the long way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


def expected(directory: Path, token_ids: Sequence[int], stops: Sequence[str]) -> int:
    """Tokens of the sample, from every prefix decoded alone; 0: no stop string."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(list(token_ids[:count]), skip_special_tokens=False)
        if any(stop in text for stop in stops):
            return count
    return 0
