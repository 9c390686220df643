"""What requests may hold: rules for fields, and bounds that hold before anything is decoded."""

import random

import pytest
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2, struct_pb2

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.trainer.v1 import loss_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.messages import (
    LONGEST_SECONDS,
    SCANNED_BYTES,
    Bound,
    MalformedMessageError,
    MessageLimits,
    RequestRules,
)

RULES = RequestRules()


def refusal(message, rules=RULES) -> InvalidFieldError:
    with pytest.raises(InvalidFieldError) as caught:
        rules.check(message)
    return caught.value


def test_zero_is_a_value_where_presence_is_explicit():
    RULES.check(pb.StepOptimizerRequest(expected_step=0, part_ids=["a"]))
    with pytest.raises(InvalidFieldError, match="expected_step"):
        RULES.check(pb.StepOptimizerRequest(part_ids=["a"]))


def test_nested_fields_are_named_by_path():
    request = pb.ForwardBackwardRequest(
        batch="batches/1", loss=loss_pb2.LossSpec(clip_low=0.2), expected_step=0, part_id="a"
    )
    with pytest.raises(InvalidFieldError, match=r"loss\.name"):
        RULES.check(request)


def test_items_of_lists_are_named_by_index():
    request = rollout_pb.RolloutRequest(
        request_id="r",
        groups=[rollout_pb.GroupRequest(group_id="a"), rollout_pb.GroupRequest()],
    )
    with pytest.raises(InvalidFieldError, match=r"groups\[1\]\.group_id"):
        RULES.check(request)


@pytest.mark.parametrize("text", ["a\0b", "a\nERROR forged", "\x1b[2J", "x" * 5000])
def test_names_are_short_and_hold_no_control_characters(text):
    assert refusal(pb.DeleteBatchRequest(batch=text)).metadata["field"] == "batch"
    several = router_pb.EndSessionRequest(session_ids=["a", text])
    assert refusal(several).metadata["field"] == "session_ids"
    assert refusal(operations_pb2.GetOperationRequest(name=text)).metadata["field"] == "name"
    sample = sample_pb2.Sample(sample_id="s", group_id="g", token_ids=[1], prompt_length=1)
    sample.columns[text].scalar = 1
    assert refusal(sample).metadata["field"] == "columns"


def test_texts_of_tasks_are_free():
    request = rollout_pb.RolloutRequest(
        request_id="r",
        groups=[{"group_id": "a", "row": {"text": "line\nline\0" * 1000}}],
        environment={"name": "e"},
        sampling={"max_new_tokens": 1},
        sample_count=1,
    )
    RULES.check(request)


def test_counts_are_not_negative_and_other_numbers_may_be():
    generate = engine_pb.GenerateRequest(
        request_id="r", prompt_token_ids=[1], sampling={"max_new_tokens": 1, "seeds": [-5]}
    )
    RULES.check(generate)
    generate.sample_count = -1
    assert refusal(generate).metadata["field"] == "sample_count"
    lists = router_pb.AcquireLeasesRequest(client_id="c", cached_token_counts=[1, -1])
    assert refusal(lists).metadata["field"] == "cached_token_counts"


@pytest.mark.parametrize("seconds", [-1, LONGEST_SECONDS + 1, -(2**63), 2**63 - 1])
def test_durations_are_sensible(seconds):
    wait = duration_pb2.Duration(seconds=seconds)
    request = router_pb.AcquireLeasesRequest(client_id="c", max_wait=wait)
    assert refusal(request).metadata["field"] == "max_wait"


def test_a_bound_names_its_field_and_its_setting():
    name = "sluice.api.rollout.v1.GenerateRequest.sample_count"
    rules = RequestRules(bounds={name: Bound(8, "engine.max_samples")})
    message = engine_pb.GenerateRequest(
        request_id="r", prompt_token_ids=[1], sampling={"max_new_tokens": 1}, sample_count=8
    )
    rules.check(message)
    message.sample_count = 2**31 - 1
    error = refusal(message, rules)
    assert error.metadata == {
        "field": "sample_count",
        "limit": "8",
        "setting": "engine.max_samples",
    }


def test_a_fault_deep_in_a_message_keeps_what_it_says_and_gets_its_whole_path():
    rows = [{"sample_id": "a"}, {"sample_id": "b", "columns": {"x" * 5000: {}}}]
    request = pb.PutColumnsRequest(batch="b", rows=rows)
    assert refusal(request).metadata["field"] == "rows[1].columns"
    bounds = {"sluice.api.common.v1.WeightVersion.version": Bound(8, "there")}
    engine = router_pb.Engine(engine_id="e", address="a:1", role=1, weights={"version": 9})
    error = refusal(router_pb.RegisterEngineRequest(engine=engine), RequestRules(bounds=bounds))
    assert error.metadata == {"field": "engine.weights.version", "limit": "8", "setting": "there"}
    violation = error.details()[0].field_violations[0]
    assert violation.field == "engine.weights.version" and "there allows 8" in violation.description


LIMITED = {
    "packed numbers": (engine_pb.ScoreRequest(token_ids=[0] * 70_000), "token_ids"),
    "packed floats": (
        pb.PutColumnsRequest(
            rows=[{"columns": {"advantages": {"floats": {"values": [0] * 70_000}}}}]
        ),
        "rows.columns.value.floats.values",
    ),
    "texts": (router_pb.EndSessionRequest(session_ids=["a"] * 30_000), "session_ids"),
    "messages": (pb.PlanBatchRequest(bare_rows=[{"length": 1}] * 30_000), "bare_rows"),
    "a bound": (engine_pb.AbortRequest(request_ids=["abc"] * 15_000), "request_ids"),
}


@pytest.mark.parametrize("case", LIMITED)
def test_too_much_is_refused_before_it_is_decoded(case):
    message, field = LIMITED[case]
    name = "sluice.api.rollout.v1.AbortRequest.request_ids"
    limits = MessageLimits(items=20_000, numbers=65_000)
    rules = RequestRules(limits, {name: Bound(10_000, "here")})
    raw = message.SerializeToString()
    with pytest.raises(InvalidFieldError) as caught:
        rules.weigh(raw, type(message).FromString)
    assert caught.value.metadata["field"] == field
    wide = RequestRules(MessageLimits())
    assert wide.weigh(raw, type(message).FromString) > len(raw)
    assert wide.decode(raw, type(message).FromString) == message


def test_numbers_that_are_not_packed_count_too():
    raw = b"\x08\x01" * (SCANNED_BYTES)  # field 1, a varint each: parsers take it for a list
    with pytest.raises(InvalidFieldError, match="token_ids"):
        RequestRules(MessageLimits(numbers=1000)).weigh(raw, engine_pb.ScoreRequest.FromString)


def test_any_bytes_are_a_message_or_malformed():
    """Cut, flipped and random bytes, long enough to be looked at first."""
    dice = random.Random(0)
    whole = pb.PutColumnsRequest(
        batch="b",
        rows=[
            {"sample_id": f"s{index}", "columns": {"reward": {"scalar": 1}}}
            for index in range(4000)
        ],
    ).SerializeToString()
    for _ in range(60):
        raw = bytearray(whole)
        for _ in range(dice.randrange(1, 20)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        cut = bytes(raw[: dice.randrange(SCANNED_BYTES, len(raw))])
        for candidate in (cut, dice.randbytes(SCANNED_BYTES + 1)):
            try:
                RULES.weigh(candidate, pb.PutColumnsRequest.FromString)
                RULES.decode(candidate, pb.PutColumnsRequest.FromString)
            except (MalformedMessageError, InvalidFieldError):
                pass


def test_nesting_has_an_end():
    """The decoder takes 100 messages in one another; longer ones are looked at before."""
    value = struct_pb2.Value().SerializeToString()
    for depth in range(40_000):
        size, length = len(value), b""
        while size >= 0x80:
            length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
        value = (b"\x32" if depth % 2 else b"\x0a") + length + bytes([size]) + value
    assert len(value) > SCANNED_BYTES
    RULES.weigh(value, struct_pb2.Value.FromString)
    with pytest.raises(MalformedMessageError):
        RULES.decode(value, struct_pb2.Value.FromString)
