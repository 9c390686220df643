"""Log-probabilities of given tokens, by reading them as a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from services.rollout.backends.sglang.client import RefusedError, refusal
from services.rollout.backends.sglang.jobs import Line
from services.rollout.engine import Scores
from services.rollout.errors import EngineFailedError

RANK = 0


async def score(line: Line, token_ids: Sequence[int], prompt_length: int, top_count: int) -> Scores:
    """Of token_ids[prompt_length:] at temperature 1. Takes a slot, as a sample does."""
    await line.gate.enter(RANK, 1)
    try:
        meta = await _read(line, token_ids, prompt_length, top_count)
    except RefusedError as error:
        raise refusal(error, "token_ids") from error
    finally:
        line.gate.leave(RANK)
    rows = meta["input_token_logprobs"][1:]  # the first is the last of the context
    if len(rows) != len(token_ids) - prompt_length:
        raise EngineFailedError(
            f"SGLang scored {len(rows)} of {len(token_ids) - prompt_length} tokens"
        )
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    if top_count:
        places = meta["input_top_logprobs"][1:]
        top = tuple(tuple((token, value) for value, token, _ in place) for place in places)
    return Scores(logprobs=tuple(row[0] for row in rows), top=top)


async def _read(
    line: Line, token_ids: Sequence[int], prompt_length: int, top_count: int
) -> Mapping[str, Any]:
    body = line.request(RANK) | {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "logprob_start_len": prompt_length - 1,
        "top_logprobs_num": top_count,
        "stream": True,
    }
    meta: Mapping[str, Any] = {}
    async with contextlib.aclosing(line.client.stream(body)) as stream:
        async for message in stream:
            meta = message["meta_info"]
    if "input_token_logprobs" not in meta:
        raise EngineFailedError("SGLang scored nothing")
    return meta
