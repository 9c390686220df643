"""What makes a sample well formed, and what each fault is called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sluice.samples.sample import (
    COLUMNS,
    ColumnLengthError,
    InvalidSampleError,
    Sample,
    UnknownColumnError,
    VersionSpan,
    validate_sample,
)

GOOD = Sample(
    sample_id="g/0",
    group_id="g",
    token_ids=np.arange(7, dtype=np.int32),
    prompt_length=3,
    columns={"loss_mask": np.ones(4, bool), "old_logprobs": np.zeros(4, np.float32), "reward": 1.0},
    spans=(
        VersionSpan(version=1, digest="a", first_token=0, last_token=1),
        VersionSpan(version=2, digest="b", first_token=2, last_token=3),
    ),
)


def span(first: int, last: int) -> VersionSpan:
    return VersionSpan(version=1, digest="a", first_token=first, last_token=last)


def test_a_good_sample_passes() -> None:
    validate_sample(GOOD)
    nothing = {"values": np.zeros(0, np.float32)}
    validate_sample(replace(GOOD, prompt_length=7, columns=nothing, spans=()))
    validate_sample(replace(GOOD, columns={"reward": float("nan"), "weight": np.float64(2)}))
    validate_sample(replace(GOOD, spans=(span(1, 1),)))  # an observation has no version


def test_per_token_columns_have_the_length_of_the_response() -> None:
    for length in (3, 5, 7):
        columns = {"rollout_logprobs": np.zeros(length, np.float32)}
        with pytest.raises(ColumnLengthError) as failure:
            validate_sample(replace(GOOD, columns=columns))
        assert (failure.value.expected, failure.value.actual) == (4, length)
        assert failure.value.field == "columns['rollout_logprobs']"


def test_unknown_columns_are_refused_by_name() -> None:
    with pytest.raises(UnknownColumnError, match=r"'rolout_logprobs'.*known.*rollout_logprobs"):
        validate_sample(replace(GOOD, columns={"rolout_logprobs": np.zeros(4, np.float32)}))


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_refuses_another_kind(name: str) -> None:
    column = COLUMNS[name]
    wrong = [True, "1", None, np.zeros(4, np.int64), np.zeros((4, 1), column.dtype)]
    wrong.append(1.0 if column.per_token else np.zeros(4, column.dtype))
    for values in wrong:
        with pytest.raises(InvalidSampleError) as failure:
            validate_sample(replace(GOOD, columns={name: values}))
        assert failure.value.field == f"columns[{name!r}]"
    right = np.zeros(4, column.dtype) if column.per_token else 0.5
    validate_sample(replace(GOOD, columns={name: right}))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": np.arange(7)}, "token_ids"),
        ({"token_ids": [1, 2, 3, 4, 5, 6, 7]}, "token_ids"),
        ({"token_ids": np.zeros((7, 1), np.int32)}, "token_ids"),
        ({"token_ids": np.array([0, -1, 2, 3, 4, 5, 6], np.int32)}, "token_ids"),
        ({"token_ids": np.zeros(0, np.int32)}, "prompt_length"),
        ({"prompt_length": 0}, "prompt_length"),
        ({"prompt_length": 8}, "prompt_length"),
        ({"spans": (span(0, 4),)}, "spans"),
        ({"spans": (span(2, 1),)}, "spans"),
        ({"spans": (span(-1, 1),)}, "spans"),
        ({"spans": (span(0, 2), span(2, 3))}, "spans"),
        ({"spans": (span(2, 3), span(0, 1))}, "spans"),
    ],
)
def test_faults_name_their_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidSampleError) as failure:
        validate_sample(replace(GOOD, **change))  # type: ignore[arg-type]
    assert (failure.value.sample_id, failure.value.field) == ("g/0", field)


def test_a_token_goes_to_an_expert_once() -> None:
    experts = np.array([[[5, 1, 0], [2, 5, 3]]] * 6, np.int16)
    sample = replace(GOOD, token_ids=np.arange(7, dtype=np.int32), routed_experts=experts)
    validate_sample(sample)
    experts[4, 1] = [3, 2, 3]
    message = r"routed_experts.* twice for token 4, in mixture layer 1"
    with pytest.raises(InvalidSampleError, match=message):
        validate_sample(sample)
