"""Facts about rows that plans and checks need: read in place of the tokens, and far smaller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from sluice.samples.sample import Sample

_NUMBERS = ("lengths", "prompt_lengths", "prompts", "mask_counts", "oldest_versions")


class InvalidFactsError(ValueError):
    """Text that is no facts, or facts that contradict each other."""


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """Facts about N rows, in order.

    lengths (tokens), prompt_lengths, mask_counts (trained tokens), prompts (digest of group and
    prompt: siblings that share a prompt have the same), oldest_versions (of the weights that
    sampled; -1 unknown): int64[N]. present: bool[N] by column name.
    """

    sample_ids: Sequence[str]
    group_ids: Sequence[str]
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    prompts: np.ndarray
    mask_counts: np.ndarray
    oldest_versions: np.ndarray
    present: dict[str, np.ndarray]

    def to_json(self) -> str:
        """Return the facts as text; a column that all rows have is `true`, others list rows."""
        document = {name: getattr(self, name).tolist() for name in _NUMBERS}
        present = {
            name: True if rows.all() else np.flatnonzero(rows).tolist()
            for name, rows in sorted(self.present.items())
        }
        document |= {"sample_ids": list(self.sample_ids), "group_ids": list(self.group_ids)}
        return json.dumps({**document, "present": present}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RowFacts:
        """Read what `to_json` wrote. Raises InvalidFactsError."""
        try:
            document = json.loads(text)
            sample_ids, group_ids = document["sample_ids"], document["group_ids"]
            numbers = {name: np.array(document[name], dtype=np.int64) for name in _NUMBERS}
            present = {}
            for name, rows in document["present"].items():
                present[name] = np.full(len(sample_ids), rows is True)
                if rows is not True:
                    present[name][np.array(rows, dtype=np.int64)] = True
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise InvalidFactsError(f"no facts about rows: {error}") from None
        shape = (len(sample_ids),)
        if len(group_ids) != shape[0] or any(each.shape != shape for each in numbers.values()):
            raise InvalidFactsError("facts about rows differ in their count")
        return cls(sample_ids=sample_ids, group_ids=group_ids, present=present, **numbers)

    @classmethod
    def join(cls, parts: Sequence[RowFacts]) -> RowFacts:
        """Return the facts of all parts, one behind the other."""
        names = {name for part in parts for name in part.present}
        counts = [len(part.sample_ids) for part in parts]
        empty = [np.empty(0, dtype=np.int64)]
        return cls(
            sample_ids=[sample for part in parts for sample in part.sample_ids],
            group_ids=[group for part in parts for group in part.group_ids],
            present={
                name: np.concatenate(
                    [
                        part.present[name] if name in part.present else np.zeros(count, np.bool_)
                        for part, count in zip(parts, counts, strict=True)
                    ]
                )
                for name in names
            },
            **{
                name: np.concatenate([getattr(part, name) for part in parts] or empty)
                for name in _NUMBERS
            },
        )

    def difference(self, samples: Sequence[Sample], rows: Sequence[int]) -> str:
        """Return what of the facts at `rows` is not so of these samples; empty if all is."""
        actual = describe_rows(samples)
        names = self.present.keys() | actual.present.keys()
        absent = np.zeros(len(samples), dtype=np.bool_)
        for what, expected, found in (
            ("sample_id", [self.sample_ids[row] for row in rows], actual.sample_ids),
            ("group_id", [self.group_ids[row] for row in rows], actual.group_ids),
            *((name, getattr(self, name)[rows], getattr(actual, name)) for name in _NUMBERS),
            *(
                (name, self.present[name][rows] if name in self.present else absent, held)
                for name in sorted(names)
                for held in [actual.present.get(name, absent)]
            ),
        ):
            wrong = np.flatnonzero(np.asarray(expected) != np.asarray(found))
            if len(wrong):
                return f"{what} of sample {actual.sample_ids[wrong[0]]!r}"
        return ""


def describe_rows(samples: Sequence[Sample]) -> RowFacts:
    """Gather the facts of valid samples."""
    present: dict[str, np.ndarray] = {}
    for row, sample in enumerate(samples):
        for name in sample.columns:
            present.setdefault(name, np.zeros(len(samples), dtype=np.bool_))[row] = True
    return RowFacts(
        sample_ids=[sample.sample_id for sample in samples],
        group_ids=[sample.group_id for sample in samples],
        lengths=np.array([len(sample.token_ids) for sample in samples], dtype=np.int64),
        prompt_lengths=np.array([sample.prompt_length for sample in samples], dtype=np.int64),
        prompts=np.array([_digest_prompt(sample) for sample in samples], dtype=np.int64),
        mask_counts=np.array([count_trained(sample) for sample in samples], dtype=np.int64),
        oldest_versions=np.array([_oldest(sample) for sample in samples], dtype=np.int64),
        present=present,
    )


def count_trained(sample: Sample) -> int:
    """Count the response tokens that the loss mask leaves in; all without a mask."""
    mask = sample.columns.get("loss_mask")
    return sample.response_length if mask is None else int(np.count_nonzero(mask))


def _digest_prompt(sample: Sample) -> int:
    """xxh3-64 of the group's id and the prompt, as a signed number."""
    seed = xxhash.xxh3_64_intdigest(sample.group_id.encode())
    prompt = sample.token_ids[: sample.prompt_length].tobytes()
    return xxhash.xxh3_64_intdigest(prompt, seed=seed) - (1 << 63)


def _oldest(sample: Sample) -> int:
    return min((span.version for span in sample.spans), default=-1)
