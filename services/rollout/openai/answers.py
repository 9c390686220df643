"""Answers in the form that OpenAI's clients read, with what Sluice adds."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.engine.interface import Delta, FinishReason
from services.rollout.openai.generation import Answer
from services.rollout.openai.requests import CommonRequest
from sluice.samples.tokenizer import TextTokenizer

Top = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Scored:
    """Tokens with log-probabilities at temperature 1, None where nothing precedes a token.

    `top` has the likeliest tokens of each place, or is empty.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    top: Top = ()


class Names:
    """Tokens as text."""

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """One text a token: several may look alike, since a token may be part of a character."""
        if self._as_ids:
            return [f"token_id:{token_id}" for token_id in token_ids]
        new = [[token_id] for token_id in set(token_ids) - self._known.keys()]
        for (token_id,), text in zip(new, self._tokenizer.decode(new, special=True), strict=True):
            self._known[token_id] = text
        return [self._known[token_id] for token_id in token_ids]


def envelope(kind: str, model: str, prefix: str) -> dict[str, Any]:
    """What every answer begins with."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, int]:
    completion = sum(len(answer.delta.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


def weights(answers: Sequence[Answer]) -> dict[str, Any]:
    """The newest weights that sampled a token."""
    spans = [span for answer in answers for span in answer.delta.spans]
    if not spans:
        return {}
    newest = max(spans, key=lambda span: span.version)
    return {
        "weight_version": newest.version,
        "system_fingerprint": f"{newest.version}-{newest.digest[:12]}",
    }


def choice_fields(request: CommonRequest, delta: Delta) -> dict[str, Any]:
    """What a finished choice has besides its text."""
    reason = "length" if delta.finish_reason is FinishReason.LENGTH else "stop"
    fields: dict[str, Any] = {
        "finish_reason": reason,
        "weight_spans": [
            {
                "version": span.version,
                "digest": span.digest,
                "first_token": span.first_token,
                "last_token": span.last_token,
            }
            for span in delta.spans
        ],
    }
    if request.return_token_ids:
        fields["token_ids"] = list(delta.token_ids)
    return fields


def chat_logprobs(names: Names, scored: Scored) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    texts = names.of(scored.token_ids)
    content = []
    for place, (text, logprob) in enumerate(zip(texts, scored.logprobs, strict=True)):
        top = scored.top[place] if scored.top else ()
        top_texts = names.of([token_id for token_id, _ in top])
        content.append(
            {
                **_entry(text, logprob),
                "top_logprobs": [
                    _entry(other, value) for other, (_, value) in zip(top_texts, top, strict=True)
                ],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(names: Names, scored: Scored) -> dict[str, Any]:
    """`logprobs` of a text choice; the token itself is always among the top ones."""
    texts = names.of(scored.token_ids)
    offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
    top: list[Mapping[str, float] | None] = []
    for place, (text, logprob) in enumerate(zip(texts, scored.logprobs, strict=True)):
        if logprob is None:
            top.append(None)
            continue
        likeliest = dict[str, float]()
        entries = scored.top[place] if scored.top else ()
        for name, (_, value) in zip(names.of([i for i, _ in entries]), entries, strict=True):
            likeliest.setdefault(name, value)
        likeliest.setdefault(text, logprob)
        top.append(likeliest)
    return {
        "tokens": texts,
        "token_logprobs": list(scored.logprobs),
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    """`bytes` is null for a token that is only part of a character."""
    data = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": data}
