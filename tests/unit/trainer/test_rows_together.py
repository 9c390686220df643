"""Rows that are read together are checked as each would be alone, and say of the same one why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from services.trainer.rank.table import RowTable
from services.trainer.rows import OpenGroup, check_samples, read_columns, read_rows
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import DataLossError, InvalidFieldError, ServiceError
from sluice.runtime.wire import blob_to_proto
from sluice.samples.arrow import encode_group, open_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.columns import RowColumns
from sluice.samples.sample import Sample, VersionSpan, describe_rows
from tests.unit.trainer.rows import LIMITS, make_sample
from tests.unit.trainer.test_facts import old_blob, with_facts


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


def with_second(sample: Sample) -> Sample:
    """Two columns more a token; of the first one nothing is trained."""
    logprobs = np.asarray(sample.columns["rollout_logprobs"])
    mask = np.arange(len(logprobs)) > 0
    more = {"old_logprobs": logprobs - 1, "loss_mask": mask}
    return replace(sample, columns={**sample.columns, **more})


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
    "no tokens": with_tokens(lambda tokens: tokens[:0]),
    "no prompt": lambda sample: replace(sample, prompt_length=0),
    "a longer prompt": lambda sample: replace(sample, prompt_length=9),
    "a reward that is no number": with_column("reward", float("nan")),
    "an endless reward": with_column("reward", float("inf")),
    "a huge reward": with_column("reward", -1e31),
    "a cold sample": with_column("temperature", 0.0),
    "a sample all but cold": with_column("temperature", 1e-40),
    "a sample without bounds": with_column("temperature", 1e9),
    "a negative temperature": with_column("temperature", -2.0),
    "an episode below 0": with_column("episode", -1.0),
    "half an episode": with_column("episode", 0.5),
    "a log-prob too many": with_column("rollout_logprobs", np.zeros(9, np.float32)),
    "a log-prob that is none": with_column("rollout_logprobs", np.array([-1, np.nan], np.float32)),
    "an endless log-prob": with_column("rollout_logprobs", np.array([-1, -np.inf], np.float32)),
    "a span behind the end": spanned((0, 2)),
    "a span before the begin": spanned((-1, 1)),
    "a span the wrong way round": spanned((1, 0)),
    "spans over each other": spanned((0, 1), (1, 1)),
    "a token named twice": with_column("teacher_top_ids/2", np.array([[1, 1], [2, 3]], np.int32)),
    "a token of another vocabulary": with_tokens(
        lambda tokens: np.where(tokens == 2, LIMITS.vocabulary_size, tokens)
    ),
    "more tokens than fit": with_tokens(lambda tokens: np.repeat(tokens, LIMITS.max_tokens)),
}
TYPES = {
    "token_ids": pa.list_(pa.int64()),
    "rollout_logprobs": pa.list_(pa.float64()),
    "loss_mask": pa.list_(pa.int32()),
}


def stored(*samples: Sample) -> OpenGroup:
    data = encode_group(samples)
    facts, batch = open_group(data)
    return OpenGroup(BlobReference("0" * 32, len(data)), batch, None, facts)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_row_among_good_ones_is_refused(what: str) -> None:
    group = stored(good(0), good(3), WRONG[what](good(1)), good(2))  # of two response tokens
    assert read_columns([stored(good(4)), group], LIMITS) is None
    with pytest.raises(ServiceError):
        check_samples(group, LIMITS)


@pytest.mark.parametrize("name", TYPES)
def test_a_column_of_another_type_is_refused(name: str) -> None:
    mask = with_column("loss_mask", np.array([True, False]))
    group = stored(mask(good(1)), mask(good(4)))
    place = group.batch.schema.get_field_index(name)
    column = group.batch.column(place).cast(TYPES[name])
    wrong = replace(group, batch=group.batch.set_column(place, name, column))
    assert read_columns([group], LIMITS) is not None
    assert read_columns([wrong], LIMITS) is None
    with pytest.raises(InvalidFieldError, match=name):
        check_samples(wrong, LIMITS)


def test_columns_are_what_their_samples_say() -> None:
    mask = with_column("loss_mask", np.array([True, False]))
    samples = [mask(good(1)), mask(good(4)), mask(spanned((0, 0), (1, 1))(good(7)))]
    others = [mask(replace(good(1, "other"), spans=())), mask(good(4, "other"))]
    columns = read_columns([stored(*samples), stored(*others)], LIMITS)
    assert columns is not None
    assert columns.per_token["loss_mask"].tolist() == [True, False] * 5
    assert columns.per_token["rollout_logprobs"].tolist() == [-1, -2] * 5
    facts, expected = columns.facts(), describe_rows([*samples, *others])
    assert not expected.difference(facts, range(5)) and facts.mask_counts.tolist() == [1] * 5
    assert facts.to_json() == expected.to_json()
    assert facts.oldest_versions.tolist() == [3, 3, 1, -1, 3]
    swapped = replace(expected, prompts=expected.prompts[::-1])
    assert swapped.difference(facts, range(5)), "no check otherwise"


def test_good_rows_are_read_together() -> None:
    plain = [replace(good(index), columns={"reward": 1.0}, spans=()) for index in range(8)]
    several = spanned((0, 0), (1, 1))(good(1))
    assert read_columns([stored(good(0), several), stored(good(2))], LIMITS) is not None
    assert read_columns([stored(*plain)], LIMITS) is not None
    part = RowColumns.read([(stored(good(0), several, good(5)).batch, [2, 1])])
    assert part is not None and part.sample_ids == ["g/5", "g/1"]
    assert part.token_ids.tolist() == [1, 2, 8, 8, 8, 1, 2, 4, 4]
    assert part.per_token["rollout_logprobs"].tolist() == [-1, -2, -3, -1, -2]
    assert part.per_sample["reward"].tolist() == [5, 1]
    assert part.span_versions.tolist() == [3, 1, 1]
    with pytest.raises(IndexError):
        RowColumns.read([(stored(good(0)).batch, [1])])


def test_what_is_no_number_where_nothing_is_trained_is_no_fault(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    masked = with_column("rollout_logprobs", np.array([np.nan, -1], np.float32))(good(1))
    masked = with_column("loss_mask", np.array([False, True]))(masked)
    reference = blobs.put(encode_group([good(0), masked]))
    _, row = read_rows(blobs, reference, LIMITS)
    assert np.isnan(row.columns["rollout_logprobs"][0])


def test_a_flipped_byte_of_one_blob_of_many_is_found(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    references = [
        blobs.put(encode_group([good(index, name) for index in range(4)])) for name in "ab"
    ]
    command = pb.AddRows(batch_id="b")
    for place, reference in enumerate(references):
        rows = range(4 * place, 4 * place + 4)
        command.blobs.add(blob=blob_to_proto(reference), indices=range(4), rows=rows)
    table = RowTable(blobs, LIMITS)
    table.add(command)
    path = tmp_path / "blobs" / references[1].digest
    data = bytearray(path.read_bytes())
    at = data.find(np.float32(-3).tobytes())  # a log-prob, which no other check would miss
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataLossError):
        table.add(command)


def test_rows_of_several_blobs_keep_their_order_and_nothing_of_the_store(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    plain = [[good(index, name) for index in range(4)] for name in "abc"]
    groups = [[with_second(sample) for sample in group] for group in plain]
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
        assert row.columns["old_logprobs"].tolist() == (logprobs - 1).tolist()
        assert row.loss_mask.tolist() == [place > 0 for place in range(len(logprobs))]


@pytest.mark.parametrize("beside", [encode_group, old_blob], ids=["facts", "none"])
def test_the_blob_that_lies_about_its_rows_is_named(
    tmp_path: Path, beside: Callable[[Sequence[Sample]], bytes]
) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    groups = [[good(index, name) for index in range(3)] for name in "abc"]
    lies = describe_rows([groups[1][0], good(5, "b"), groups[1][2]]).to_json()
    contents = [encode_group(groups[0]), with_facts(groups[1], lies), beside(groups[2])]
    references = blobs.put_all(contents)
    command = pb.AddRows(batch_id="b")
    for place, reference in enumerate(references):
        command.blobs.add(blob=blob_to_proto(reference), indices=[1], rows=[place])
    with pytest.raises(InvalidFieldError) as caught:
        RowTable(blobs, LIMITS).add(command)
    assert caught.value.metadata["blob"] == references[1].digest
    first, last = read_rows(blobs, references[1], LIMITS, [0, 2])
    assert (first.sample_id, last.sample_id) == ("b/0", "b/2"), "those are as it says"
