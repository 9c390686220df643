"""Prompts with images for engines, and what plain transformers says about what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.rollout.engine.interface import Delta, Engine, Generation, Media, MediaKind, Sampling
from services.trainer.backend import Row
from sluice.samples.images import PreparedImage
from tests.vision.cases import (
    IMAGE,
    MAX_LOGPROB_DIFF,
    Model,
    Oracle,
    digest_of,
    draw_image,
    make_row,
    record,
)


def shown(image: PreparedImage, data: bytes | None = None) -> Media:
    view = memoryview(image.png if data is None else data)
    return Media(MediaKind.IMAGE, digest_of(image), view)


def request(
    row: Row, images: Sequence[PreparedImage], length: int = 6, **fields: Any
) -> Generation:
    """Asks for what follows all of a row, whose images the engine is to make tokens of."""
    prompt, end = list[int](), 0
    tokens = row.token_ids.tolist()
    for span in row.media:
        prompt += [*tokens[end : span.first_token], IMAGE]
        end = span.end
    return Generation(
        request_id=fields.pop("request_id", row.sample_id),
        prompt_token_ids=[*prompt, *tokens[end:]],
        sampling=Sampling(max_new_tokens=length, temperature=1.0, **fields.pop("sampling", {})),
        media=tuple(shown(image) for image in images),
        **fields,
    )


async def sample(engine: Engine, generation: Generation) -> list[Delta]:
    deltas = [delta async for delta in engine.generate(generation)]
    return sorted(deltas, key=lambda delta: delta.index)


def followed(row: Row, delta: Delta) -> Row:
    """The row with what was drawn behind it as its response."""
    tokens = torch.cat([row.token_ids, torch.tensor(list(delta.token_ids))])
    return row._replace(token_ids=tokens, prompt_length=len(row.token_ids))


def check(oracle: Oracle, row: Row, layout: str, deltas: Sequence[Delta]) -> None:
    """Log-probs are those of transformers."""
    for delta in deltas:
        expected = oracle.logprobs(followed(row, delta)).detach()
        difference = (torch.tensor(list(delta.logprobs)) - expected).abs().max().item()
        assert record("logprob", difference, layout) <= MAX_LOGPROB_DIFF, row.sample_id


def rows_and_images(model: Model) -> list[tuple[Row, list[PreparedImage]]]:
    """Text alone, one image, two, an image in a later turn, and one twice.

    They are framed: SGLang overlooks a placeholder of Qwen2.5-VL that is not (0.5.23).
    """
    wide, small = draw_image(model.rules, 1, 2, 3), draw_image(model.rules, 2, 3, 1)
    return [
        (make_row("text/0", [9], [1], seed=1), []),
        (make_row("one/0", [2, wide, 5], [1], seed=2, framed=True), [wide]),
        (make_row("two/0", [2, wide, 1, small, 2], [1], seed=3, framed=True), [wide, small]),
        (make_row("turn/0", [2, wide, 3], [4, small, 2], seed=4, framed=True), [wide, small]),
        (make_row("again/0", [2, wide, 1, wide, 2], [1], seed=5, framed=True), [wide, wide]),
    ]
