"""Rows that are read together are checked as each would be alone, and say of the same one why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.rank.table import RowTable
from services.trainer.rows import check_numbers, check_row, read_many, suspects
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.wire import blob_to_proto
from sluice.samples.arrow import encode_group
from sluice.samples.blobs import BlobStore
from sluice.samples.sample import Sample, VersionSpan, describe_rows
from tests.unit.trainer.rows import LIMITS, make_sample
from tests.unit.trainer.test_facts import with_facts


def good(index: int, group: str = "g") -> Sample:
    """A sample as episodes make them, of another length than its siblings."""
    length = 1 + index % 3
    sample = make_sample(
        f"{group}/{index}",
        [1, 2],
        [3 + index] * length,
        rollout_logprobs=-np.arange(1, length + 1, dtype=np.float32),
        reward=float(index),
        temperature=-1.0 if index % 2 else 0.7,
        episode=float(index),
    )
    span = VersionSpan(version=3, digest="d", first_token=0, last_token=length - 1)
    return replace(sample, spans=(span,))


def with_column(name: str, value: object) -> Callable[[Sample], Sample]:
    return lambda sample: replace(sample, columns={**sample.columns, name: value})  # type: ignore[dict-item]


def spanned(*places: tuple[int, int]) -> Callable[[Sample], Sample]:
    spans = tuple(
        VersionSpan(version=1, digest="d", first_token=first, last_token=last)
        for first, last in places
    )
    return lambda sample: replace(sample, spans=spans)


def with_tokens(change: Callable[[np.ndarray], Any]) -> Callable[[Sample], Sample]:
    return lambda sample: replace(sample, token_ids=change(sample.token_ids))


WRONG = {
    "a negative token": with_tokens(lambda tokens: np.where(tokens == 2, -1, tokens)),
    "wide tokens": with_tokens(lambda tokens: tokens.astype(np.int64)),
    "a table of tokens": with_tokens(lambda tokens: tokens[None]),
    "a list of tokens": with_tokens(list),
    "no tokens": with_tokens(lambda tokens: tokens[:0]),
    "no prompt": lambda sample: replace(sample, prompt_length=0),
    "a longer prompt": lambda sample: replace(sample, prompt_length=9),
    "no such column": with_column("nonsense", 1.0),
    "a reward that is no number": with_column("reward", float("nan")),
    "an endless reward": with_column("reward", float("inf")),
    "a huge reward": with_column("reward", -1e31),
    "a reward of words": with_column("reward", "1"),
    "a true reward": with_column("reward", True),
    "a cold sample": with_column("temperature", 0.0),
    "a negative temperature": with_column("temperature", -2.0),
    "an episode below 0": with_column("episode", -1.0),
    "half an episode": with_column("episode", 0.5),
    "a log-prob too many": with_column("rollout_logprobs", np.zeros(9, np.float32)),
    "a log-prob that is none": with_column("rollout_logprobs", np.array([-1, np.nan], np.float32)),
    "an endless log-prob": with_column("rollout_logprobs", np.array([-1, -np.inf], np.float32)),
    "wide log-probs": with_column("rollout_logprobs", np.zeros(2, np.float64)),
    "one log-prob": with_column("rollout_logprobs", -1.0),
    "a mask of numbers": with_column("loss_mask", np.ones(2, np.int32)),
    "a span behind the end": spanned((0, 2)),
    "a span before the begin": spanned((-1, 1)),
    "a span the wrong way round": spanned((1, 0)),
    "spans over each other": spanned((0, 1), (1, 1)),
    "a token named twice": with_column("teacher_top_ids/2", np.array([[1, 1], [2, 3]], np.int32)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_row_among_good_ones_is_suspected(what: str) -> None:
    wrong = WRONG[what](good(1))  # of two response tokens
    with pytest.raises(InvalidFieldError):
        check_row(wrong)
        check_numbers(wrong)
    found = suspects([good(0), good(3), wrong, good(2)])
    assert any(sample is wrong for sample in found)


def test_good_rows_are_not_looked_at_one_by_one() -> None:
    samples = [good(index) for index in range(8)]
    plain = [replace(sample, columns={"reward": 1.0}, spans=()) for sample in samples]
    several = spanned((0, 0), (1, 1))(good(1))
    assert suspects([*samples, *plain, several]) == []
    assert suspects([]) == []


def test_what_is_no_number_where_nothing_is_trained_is_no_fault(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    masked = with_column("rollout_logprobs", np.array([np.nan, -1], np.float32))(good(1))
    masked = with_column("loss_mask", np.array([False, True]))(masked)
    reference = blobs.put(encode_group([good(0), masked]))
    ((_, row),) = read_many(blobs, [(reference, None)], LIMITS)
    assert np.isnan(row.columns["rollout_logprobs"][0])


def test_rows_of_several_blobs_keep_their_order_and_nothing_of_the_store(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    groups = [[good(index, name) for index in range(4)] for name in "abc"]
    references = blobs.put_all([encode_group(group) for group in groups])
    table = RowTable(blobs, LIMITS)
    command = pb.AddRows(batch_id="b")
    for place, reference in enumerate(references):
        rows = [10 * place + 1, 10 * place]
        command.blobs.add(blob=blob_to_proto(reference), indices=[3, 1], rows=rows)
    table.add(command)
    held = table.rows("b")
    assert {row: held[row].sample_id for row in held} == {
        1: "a/3", 0: "a/1", 11: "b/3", 10: "b/1", 21: "c/3", 20: "c/1"
    }  # fmt: skip
    for row in held.values():
        sample = good(int(row.sample_id[-1]), row.group_id)
        assert row.token_ids.tolist() == sample.token_ids.tolist()
        assert row.scalars == {"reward": sample.columns["reward"], "temperature": -1.0,
                               "episode": sample.columns["episode"]}  # fmt: skip
        logprobs = np.asarray(sample.columns["rollout_logprobs"])
        assert row.columns["rollout_logprobs"].tolist() == logprobs.tolist()


def test_the_blob_that_lies_about_its_rows_is_named(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    groups = [[good(index, name) for index in range(3)] for name in "abc"]
    lies = describe_rows([groups[1][0], good(5, "b"), groups[1][2]]).to_json()
    contents = [encode_group(groups[0]), with_facts(groups[1], lies), encode_group(groups[2])]
    references = blobs.put_all(contents)
    with pytest.raises(InvalidFieldError) as caught:
        read_many(blobs, [(reference, None) for reference in references], LIMITS)
    assert caught.value.metadata["blob"] == references[1].digest
    ((first, last),) = read_many(blobs, [(references[1], [0, 2])], LIMITS)
    assert (first.sample_id, last.sample_id) == ("b/0", "b/2"), "those are as it says"


def test_a_token_of_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    high = with_tokens(lambda tokens: np.where(tokens == 2, LIMITS.vocabulary_size, tokens))
    groups = [[good(0, "a")], [high(good(0, "b"))]]
    references = blobs.put_all([encode_group(group) for group in groups])
    with pytest.raises(InvalidFieldError, match="'b/0'"):
        read_many(blobs, [(reference, None) for reference in references], LIMITS)
