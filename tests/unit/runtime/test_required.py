import pytest

from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.trainer.v1 import loss_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.interceptors import check_required


def test_zero_is_a_value_where_presence_is_explicit():
    check_required(pb.StepOptimizerRequest(expected_step=0, part_ids=["a"]))
    with pytest.raises(InvalidFieldError, match="expected_step"):
        check_required(pb.StepOptimizerRequest(part_ids=["a"]))


def test_nested_fields_are_named_by_path():
    request = pb.ForwardBackwardRequest(
        batch="batches/1", loss=loss_pb2.LossSpec(clip_low=0.2), expected_step=0, part_id="a"
    )
    with pytest.raises(InvalidFieldError, match=r"loss\.name"):
        check_required(request)


def test_items_of_lists_are_named_by_index():
    request = rollout_pb.RolloutRequest(
        request_id="r",
        groups=[rollout_pb.GroupRequest(group_id="a"), rollout_pb.GroupRequest()],
    )
    with pytest.raises(InvalidFieldError, match=r"groups\[1\]\.group_id"):
        check_required(request)
