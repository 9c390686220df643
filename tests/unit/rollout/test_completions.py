"""A sample on the wire: as repeated fields for any client, as columns for those that ask."""

import numpy as np
import pytest

from services.rollout.engine.interface import Delta, FinishReason, Numbers
from services.rollout.engine.wire import delta_from_proto, delta_to_proto, join_deltas
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.runtime.errors import DataLossError
from sluice.samples.sample import VersionSpan

TOKENS, LOGPROBS = (0, 127, 128, 151935, 2**31 - 1), (-0.5, -0.25, 0.0, -12.0, float("-inf"))


def delta_of(logprobs_t1=()) -> Delta:
    return Delta(
        index=3,
        token_ids=TOKENS,
        logprobs=LOGPROBS,
        logprobs_t1=logprobs_t1,
        spans=(VersionSpan(version=1, digest="d", first_token=0, last_token=4),),
        finish_reason=FinishReason.STOP,
    )


@pytest.mark.parametrize(("temperature", "plain"), [(1.0, ()), (0.5, LOGPROBS[::-1]), (0.5, ())])
def test_columns_say_what_repeated_fields_say(temperature, plain) -> None:
    sent = delta_of(plain)
    read = []
    for takes_columns in (False, True):
        message = delta_to_proto(sent, temperature=temperature, takes_columns=takes_columns)
        assert bool(message.token_ids) is not takes_columns
        wire = pb.Completion.FromString(message.SerializeToString())
        read.append(delta_from_proto(wire, temperature=temperature))
    repeated, columns = read
    assert repeated == columns
    assert columns.token_ids == TOKENS
    assert columns.logprobs == LOGPROBS
    assert columns.logprobs_t1 == (LOGPROBS if temperature == 1 else plain)
    arrays = [np.asarray(each) for each in (columns.token_ids, columns.logprobs)]
    assert [array.dtype for array in arrays] == [np.int32, np.float32]


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "logprobs_t1"])
@pytest.mark.parametrize("cut", [1, 4])
def test_columns_that_do_not_fit_are_no_sample(field: str, cut: int) -> None:
    message = delta_to_proto(delta_of(LOGPROBS), temperature=0.5, takes_columns=True)
    setattr(message.columns, field, getattr(message.columns, field)[:-cut])
    with pytest.raises(DataLossError, match="differ in length"):
        delta_from_proto(message, temperature=0.5)


def test_what_came_in_parts_is_one_array() -> None:
    first, second = delta_of(), delta_of()
    (joined,) = join_deltas([first, second])
    assert joined.token_ids == TOKENS * 2
    assert np.asarray(joined.logprobs).dtype == np.float32
    assert joined.logprobs == LOGPROBS * 2


def test_an_array_reads_as_the_tuple_of_its_numbers() -> None:
    numbers = Numbers(np.array(TOKENS, np.int32))
    assert numbers == TOKENS
    assert numbers != TOKENS[:-1]
    assert hash(numbers) == hash(TOKENS)
    assert [type(number) for number in numbers] == [int] * 5
    assert type(numbers[1]) is int
    assert numbers[1:3] == (127, 128)
    before, after = (1,), (2,)
    assert before + numbers + after == (1, *TOKENS, 2)
    assert 128 in numbers
    assert not Numbers(np.array([], np.int32))
