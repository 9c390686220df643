"""Rows longer than a micro-batch may be, cut to it. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sluice.samples.sample import Sample


def cut_sample(sample: Sample, length: int) -> Sample:
    """The sample's first `length` tokens, at least one of them of the response.

    Per-token columns and version spans end with it; the reward stays that of the whole sample.
    """
    if len(sample.token_ids) <= length:
        return sample
    kept = length - sample.prompt_length
    assert kept > 0, "a prompt that fills the cap is refused before"
    return replace(
        sample,
        token_ids=sample.token_ids[:length],
        columns={
            name: values[:kept] if isinstance(values, np.ndarray) else values
            for name, values in sample.columns.items()
        },
        spans=tuple(
            replace(span, last_token=min(span.last_token, kept - 1))
            for span in sample.spans
            if span.first_token < kept
        ),
        routed_experts=None
        if sample.routed_experts is None
        else sample.routed_experts[: length - 1],
    )
