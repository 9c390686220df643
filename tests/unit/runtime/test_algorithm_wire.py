"""Losses and estimators there and back: what a client writes is what a trainer reads."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import loss_pb2
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.wire import (
    advantage_from_proto,
    advantage_to_proto,
    loss_from_proto,
    loss_to_proto,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SETTINGS = st.none() | st.dictionaries(st.text(), JSON, max_size=4)


@given(SETTINGS, st.lists(st.dictionaries(st.text(), JSON, max_size=2), max_size=3), SETTINGS)
@settings(max_examples=50)
def test_a_users_loss_comes_as_it_was_sent(own, stages, form):
    corrections = [{"name": f"a.b:C{i}", "settings": each} for i, each in enumerate(stages)]
    spec = LossSpec(
        name="package.module:Name",
        settings=own,
        corrections=corrections or None,
        kl_coefficient=0.5,
        kl_settings=form,
    )
    assert loss_from_proto(loss_to_proto(spec)) == spec


@given(SETTINGS)
@settings(max_examples=25)
def test_a_users_estimator_comes_as_it_was_sent(own):
    overlong = {"max_length": 100, "buffer": 20, "penalty": 0.5}
    spec = AdvantageSpec(name="package.module:Name", settings=own, overlong=overlong, gamma=0.5)
    assert advantage_from_proto(advantage_to_proto(spec)) == spec


def test_fields_from_before_say_what_settings_say():
    old = loss_pb2.LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.3)
    new = loss_pb2.LossSpec(name="ppo_clip")
    new.settings.update({"clip_low": 0.2, "clip_high": 0.3})
    assert loss_from_proto(old).loss.settings == loss_from_proto(new).loss.settings


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0, "x", True, None, [1]])
def test_a_setting_that_is_no_number_is_refused_by_its_path(value):
    message = loss_pb2.LossSpec(name="sapo")
    message.settings.update({"tau_positive": value})
    with pytest.raises(InvalidFieldError) as caught:
        loss_from_proto(message)
    assert caught.value.metadata["field"].startswith("loss.settings.tau_positive")


def test_stages_and_unknown_settings_are_refused_by_their_path():
    message = loss_pb2.LossSpec(name="gpg")
    message.corrections.add(name="tis")
    message.corrections.add(name="reject").settings.update({"high": 1, "cap": 2})
    with pytest.raises(InvalidFieldError) as caught:
        loss_from_proto(message)
    assert caught.value.metadata["field"] == "loss.corrections.1.settings.cap"


@pytest.mark.parametrize(
    "name", ["", "..", "../../x", "a\0b:c", "a:b:c", "x" * 5000, "a b:c", ":x"]
)
def test_a_name_that_is_none_is_refused_by_its_field(name):
    for message, read in (
        (loss_pb2.LossSpec(name=name), loss_from_proto),
        (loss_pb2.AdvantageSpec(name=name), advantage_from_proto),
    ):
        with pytest.raises(InvalidFieldError) as caught:
            read(message)
        assert caught.value.metadata["field"].endswith(".name")
        assert len(str(caught.value)) < 1000
