"""What a request must satisfy before it is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Generation
from services.rollout.errors import MediaUnsupportedError, PromptTooLongError
from sluice.runtime.errors import InvalidFieldError


def check_generation(
    generation: Generation,
    vocabulary_size: int,
    max_length: int,
    config: EngineConfig,
    *,
    dp_size: int = 1,
    reads_media: bool = False,
) -> None:
    """Raises InvalidFieldError naming the field, MediaUnsupportedError or PromptTooLongError."""
    sampling = generation.sampling
    _check_tokens("prompt_token_ids", generation.prompt_token_ids, vocabulary_size)
    if generation.media and not reads_media:
        raise MediaUnsupportedError("the model that serves reads text only")
    if sampling.max_new_tokens < 1:
        raise InvalidFieldError("sampling.max_new_tokens", "must be at least 1")
    if not 0 <= sampling.temperature < float("inf"):
        raise InvalidFieldError("sampling.temperature", "must be 0 or more, and finite")
    if sampling.top_k < 0:
        raise InvalidFieldError("sampling.top_k", "must be 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise InvalidFieldError("sampling.top_p", "must be above 0 and at most 1")
    if generation.sample_count < 1:
        raise InvalidFieldError("sample_count", "must be at least 1")
    if sampling.seeds and len(sampling.seeds) != generation.sample_count:
        raise InvalidFieldError("sampling.seeds", "must be empty or one per sample")
    if any(not -(1 << 63) <= seed < 1 << 63 for seed in sampling.seeds):
        raise InvalidFieldError("sampling.seeds", "must be 64-bit integers")
    if not 0 <= generation.dp_rank < dp_size:
        raise InvalidFieldError("dp_rank", f"this engine has ranks 0..{dp_size - 1}")
    length = len(generation.prompt_token_ids)
    _check_length(length, min(max_length, config.cache_tokens) - 1)
    reserved = min(length + sampling.max_new_tokens, max_length)
    if reserved > config.cache_tokens:
        raise PromptTooLongError(
            f"prompt and response of {reserved} tokens do not fit a cache of {config.cache_tokens}",
            length=reserved,
            limit=config.cache_tokens,
        )


def check_score(
    token_ids: Sequence[int], prompt_length: int, vocabulary_size: int, max_length: int
) -> None:
    """Raises InvalidFieldError naming the field, or PromptTooLongError."""
    _check_tokens("token_ids", token_ids, vocabulary_size)
    if not 1 <= prompt_length < len(token_ids):
        raise InvalidFieldError("prompt_length", "must leave context and tokens to score")
    _check_length(len(token_ids), max_length)


def _check_tokens(field: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
    if not len(token_ids):
        raise InvalidFieldError(field, "must not be empty")
    if min(token_ids) < 0 or max(token_ids) >= vocabulary_size:
        raise InvalidFieldError(field, f"must be in 0..{vocabulary_size - 1}")


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise PromptTooLongError(
            f"{length} tokens exceed the limit of {limit}", length=length, limit=limit
        )


T = TypeVar("T")


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order. The first failure, or a cancellation, ends the others as well."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
