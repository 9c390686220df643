"""Media of a sample: where they lie, and what is never trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sluice.samples.sample import InvalidSampleError, MediaSpan, Sample, truncate_sample
from sluice.samples.sample import validate_sample as validate

PAD, PROMPT = 9, 5
IDS = [1, PAD, PAD, 2, 3, 4, 5, PAD, PAD, PAD, 6, 7]  # an image in the prompt, one in turn 1
MASK = [True, True, False, False, False, True, True]


def span(first: int, count: int, **changes: Any) -> MediaSpan:
    values: dict[str, Any] = {
        "digest": "0" * 31 + "a",
        "size": 100,
        "kind": "image",
        "first_token": first,
        "token_count": count,
        "grid_thw": (1, 2, 4),
    }
    return MediaSpan(**{**values, **changes})


def sample(*media: MediaSpan, mask: list[bool] | None = MASK) -> Sample:
    columns = {} if mask is None else {"loss_mask": np.array(mask)}
    return Sample(
        sample_id="g/0",
        group_id="g",
        token_ids=np.array(IDS, np.int32),
        prompt_length=PROMPT,
        columns=columns,
        media=media,
    )


FIRST, SECOND = span(1, 2), span(7, 3, turn=1)
HUGE = 2**31 - 1


def test_media_in_the_prompt_and_in_a_turn_are_taken() -> None:
    validate(sample(FIRST, SECOND))
    validate(sample())
    validate(sample(FIRST, mask=None))


@pytest.mark.parametrize(
    ("media", "field"),
    [
        ((SECOND, FIRST), "media[1]"),
        ((FIRST, FIRST), "media[1]"),
        ((span(1, 1), span(1, 2)), "media[1]"),
        ((span(0, 2),), "media[0]"),  # not equal tokens
        ((span(1, 3),), "media[0]"),
        ((span(-1, 2),), "media[0]"),
        ((span(1, 0),), "media[0]"),
        ((span(1, -1),), "media[0]"),
        ((span(11, 2),), "media[0]"),
        ((span(1, HUGE),), "media[0]"),
        ((span(HUGE, HUGE),), "media[0]"),
        ((span(10, 1),), "media[0]"),  # trained on
        ((span(1, 2, turn=HUGE + 1),), "media[0]"),
        ((span(1, 2, size=HUGE + 1),), "media[0]"),
        ((span(1, 2, grid_thw=(1, HUGE + 1, 2)),), "media[0].grid_thw"),
        ((span(5, 1),), "media[0]"),  # the first response token
        ((span(4, 2),), "media[0]"),
        ((span(1, 2, kind="7"),), "media[0].kind"),
        ((span(1, 2, digest="../../etc/passwd"),), "media[0].blob"),
        ((span(1, 2, digest="0" * 32 + "\n"),), "media[0].blob"),
        ((span(1, 2, digest=""),), "media[0].blob"),
        ((span(1, 2, grid_thw=(1, 2)),), "media[0].grid_thw"),
        ((span(1, 2, grid_thw=(1, 0, 4)),), "media[0].grid_thw"),
        ((span(1, 2, grid_thw=()),), "media[0].grid_thw"),
        ((span(1, 2, turn=-1),), "media[0]"),
        ((span(1, 2, size=-1),), "media[0]"),
    ],
)
def test_what_does_not_fit_is_refused(media: tuple[MediaSpan, ...], field: str) -> None:
    with pytest.raises(InvalidSampleError) as caught:
        validate(sample(*media))
    assert caught.value.field == field


def test_no_medium_hides_the_first_response_token() -> None:
    """Such a row could not be cut before it."""
    ids, mask = np.full(8, PAD, np.int32), np.zeros(3, np.bool_)
    row = replace(sample(), token_ids=ids, columns={"loss_mask": mask})
    for good in (span(0, 5), span(6, 2)):
        validate(replace(row, media=(good,)))
    for bad in (span(5, 1), span(4, 2), span(0, 8)):
        with pytest.raises(InvalidSampleError, match="first response token"):
            validate(replace(row, media=(bad,)))


def test_an_image_in_a_turn_needs_a_mask() -> None:
    """Placeholders that were trained on would teach the policy to write them."""
    with pytest.raises(InvalidSampleError, match="loss_mask"):
        validate(sample(FIRST, SECOND, mask=None))
    for place in (2, 4):
        with pytest.raises(InvalidSampleError, match="loss_mask"):
            validate(sample(SECOND, mask=[i == place or kept for i, kept in enumerate(MASK)]))


@pytest.mark.parametrize(
    ("cap", "kept", "media"),
    [(12, 12, 2), (11, 11, 2), (10, 10, 2), (9, 7, 1), (8, 7, 1), (7, 7, 1), (6, 6, 1)],
)
def test_no_medium_is_cut(cap: int, kept: int, media: int) -> None:
    cut = truncate_sample(sample(FIRST, SECOND), cap)
    validate(cut)
    assert (len(cut.token_ids), len(cut.media)) == (kept, media)
    assert len(cut.columns["loss_mask"]) == kept - PROMPT  # type: ignore[arg-type]
