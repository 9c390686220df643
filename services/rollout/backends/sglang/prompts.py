"""Whether SGLang has read the prompt that it was given.

With images it turns token ids into text, replaces the placeholders and tokenises anew (0.5.23,
`load_mm_data`): ids that do not survive this would be other ids than those trained on, and a
placeholder that it does not find in the text drops the image without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import grpc

from sluice.runtime.errors import ServiceError


class PromptAlteredError(ServiceError):
    """The engine read another prompt than the request's; metadata has both lengths."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "PROMPT_ALTERED"


def check_prompt(given: Sequence[int], read: Sequence[int], media_count: int) -> None:
    """Raise PromptAlteredError unless `read` is `given` with its placeholders repeated."""
    if not is_expansion(given, read, media_count):
        raise PromptAlteredError(
            f"the prompt of {len(given)} tokens with {media_count} images was read as "
            f"{len(read)} other tokens: the tokenizer does not give back the text's tokens, or "
            "the placeholders are not those of the model",
            given=len(given),
            read=len(read),
        )


def is_expansion(given: Sequence[int], read: Sequence[int], media_count: int) -> bool:
    """The same runs of tokens in the same order, of which 1 to `media_count` have grown.

    Only one token may grow: the placeholder.
    """
    before, after = _runs(given), _runs(read)
    if [token for token, _ in before] != [token for token, _ in after]:
        return False
    growth = [
        (token, after_length - before_length)
        for (token, before_length), (_, after_length) in zip(before, after, strict=True)
        if after_length != before_length
    ]
    grown = {token for token, _ in growth}
    return len(grown) == 1 and len(growth) <= media_count and min(by for _, by in growth) > 0


def _runs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    return [(token, len(list(run))) for token, run in groupby(tokens)]
