"""Rows and batches without blobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.controller.state import Batch, StoredRows
from services.trainer.rows import RowLimits
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample, describe_rows

LIMITS = RowLimits(vocabulary_size=50, max_tokens=1000)


def make_sample(
    sample_id: str, prompt: Sequence[int], response: Sequence[int], **columns: object
) -> Sample:
    return Sample(
        sample_id=sample_id,
        group_id=sample_id.split("/")[0],
        token_ids=np.array([*prompt, *response], dtype=np.int32),
        prompt_length=len(prompt),
        columns=columns,  # type: ignore[arg-type]
    )


def make_samples(group_sizes: Sequence[Sequence[int]]) -> list[Sample]:
    """Groups of responses of the given lengths; half of every response is masked out."""
    return [
        make_sample(
            f"g{group}/{index}",
            [1] * (1 + group % 5),
            [2] * length,
            loss_mask=np.arange(length) % 2 == 0,
            reward=float(index),
        )
        for group, lengths in enumerate(group_sizes)
        for index, length in enumerate(lengths)
    ]


def make_batch(samples: Sequence[Sample], owners: Sequence[int] | None = None) -> Batch:
    facts = describe_rows(samples)
    held = np.zeros(len(samples), dtype=np.int64) if owners is None else np.array(owners)
    stored = (StoredRows(BlobReference("0" * 32, 1), 0, len(samples)),)
    return Batch(batch_id="b", stored=stored, facts=facts, owners=held)
