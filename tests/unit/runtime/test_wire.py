import numpy as np
import pytest

from sluice.algo.spec import AdvantageSpec, ImportanceSpec, LossSpec
from sluice.api.common.v1 import sample_pb2
from sluice.api.trainer.v1 import loss_pb2
from sluice.runtime import wire
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.sample import MediaSpan, Sample, VersionSpan


def test_a_sample_survives_the_wire_with_presence():
    sample = Sample(
        sample_id="g/0",
        group_id="g",
        token_ids=np.array([1, 2, 3, 4], dtype=np.int32),
        prompt_length=2,
        finish_reason="stop",
        columns={
            "loss_mask": np.array([True, False]),
            "rollout_logprobs": np.array([-0.5, 0.0], dtype=np.float32),
            "reward": 0.0,
        },
        spans=(VersionSpan(version=3, digest="d", first_token=0, last_token=1),),
        media=(
            MediaSpan(
                digest="0" * 32,
                size=9,
                kind="image",
                first_token=0,
                token_count=1,
                grid_thw=(1, 2, 4),
                turn=3,
            ),
        ),
    )
    back = wire.sample_from_proto(wire.sample_to_proto(sample))
    assert back.columns.keys() == sample.columns.keys()  # a reward of 0 is a reward
    for name, value in sample.columns.items():
        np.testing.assert_array_equal(back.columns[name], value)
    np.testing.assert_array_equal(back.token_ids, sample.token_ids)
    assert (back.sample_id, back.prompt_length, back.finish_reason) == ("g/0", 2, "stop")
    assert (back.spans, back.media) == (sample.spans, sample.media)


def test_a_medium_of_a_kind_that_came_later_is_not_taken_for_an_image():
    message = sample_pb2.MediaSpan(kind=7)
    assert wire.media_from_proto([message])[0].kind == "7"


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28, kl_coefficient=0.0),
        LossSpec(
            name="gspo",
            clip_low=3e-4,
            old_logprobs="old",
            importance=ImportanceSpec(high=2.0),
            kl_coefficient=0.1,
            kl_unbiased=False,
        ),
    ],
)
def test_a_loss_survives_the_wire(spec):
    assert wire.loss_from_proto(wire.loss_to_proto(spec)) == spec


def test_an_estimator_survives_the_wire():
    spec = AdvantageSpec(name="grpo", scale_by_std=False)
    assert wire.advantage_from_proto(wire.advantage_to_proto(spec)) == spec


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (loss_pb2.LossSpec(name="pop_clip"), r"loss\.name"),
        (loss_pb2.LossSpec(name="ppo_clip", clip_low=0.2, dro_beta=1.0), "dro_beta has no effect"),
        (loss_pb2.LossSpec(name="ppo_clip"), "clip_low is required"),
    ],
)
def test_a_wrong_loss_is_refused_by_name(message, path):
    with pytest.raises(InvalidFieldError, match=path):
        wire.loss_from_proto(message)
