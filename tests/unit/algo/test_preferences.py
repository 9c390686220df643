"""The advantage of preferences is minus the derivative of a pair's loss by its log-probs."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody has it
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sluice.algo.advantages import compute_advantages
from sluice.algo.packed_rows import AdvantageRow, InvalidAdvantageError
from sluice.algo.plugins import PluginSettingError
from sluice.algo.spec import AdvantageSpec


def row(group, reward, logprobs, reference, episode=None, number=0):
    return AdvantageRow(
        sample_id=f"{group}/{reward}/{episode}/{number}",
        group_id=group,
        loss_mask=torch.ones(len(logprobs), dtype=torch.bool),
        rewards={"reward": reward},
        columns={
            "old_logprobs": torch.as_tensor(logprobs, dtype=torch.float64),
            "reference_logprobs": torch.as_tensor(reference, dtype=torch.float64),
        },
        episode=episode,
    )


def found(rows, **own):
    return compute_advantages(rows, AdvantageSpec(name="dpo", settings=own))


numbers = st.lists(st.floats(-30, 0), min_size=1, max_size=6)


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4),
    st.sampled_from([0.05, 0.5, 3.0]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.7]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["sigmoid", "ipo"]),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_advantages_are_the_derivative_by_autograd(
    pairs, beta, smoothing, sft, average, reference, form, random
):
    """Whatever order the rows come in."""
    if form == "ipo":
        smoothing = 0.0
    rows, leaves, losses = [], [], []
    for index, answers in enumerate(pairs):
        gains, sums = [], []
        for label, own in zip((1.0, 0.0), answers, strict=True):
            leaf = torch.tensor(own, dtype=torch.float64, requires_grad=True)
            other = torch.tensor([random.uniform(-30, 0) for _ in own], dtype=torch.float64)
            gain = leaf - other if reference else leaf
            gains.append(gain.mean() if average else gain.sum())
            sums.append(leaf)
            leaves.append(leaf)
            rows.append(row(str(index), label, own, other))
        z = beta * (gains[0] - gains[1])
        loss = -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)
        if form == "ipo":
            loss = (gains[0] - gains[1] - 1 / (2 * beta)) ** 2
        losses.append(loss - sft * sums[0].mean())
    sum(losses).backward()
    order = random.sample(range(len(rows)), len(rows))
    own = {"beta": beta, "label_smoothing": smoothing, "form": form, "sft_weight": sft}
    answer = found([rows[i] for i in order], average=average, reference=reference, **own)
    for place, advantages in zip(order, answer.advantages, strict=True):
        assert advantages.tolist() == pytest.approx(
            (-leaves[place].grad).tolist(), rel=1e-5, abs=1e-30
        )
    total, count = answer.metrics["preference_loss"]
    assert count == len(pairs)
    assert total == pytest.approx(sum(losses).item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("gap", [1e5, -1e5, 800.0, -800.0, 0.0])
def test_no_difference_is_too_large(gap):
    answer = found([row("a", 1.0, [gap], [0.0]), row("a", 0.0, [0.0], [0.0])], beta=1.0)
    good, bad = (each.item() for each in answer.advantages)
    assert good == -bad == pytest.approx(1.0 if gap < 0 else 0.5 if gap == 0 else 0.0)
    assert answer.metrics["preference_loss"][0] == pytest.approx(
        -min(gap, 0) if gap else math.log(2)
    )
    assert answer.metrics["accuracy"] == (float(gap > 0), 1.0)


def test_answers_of_one_reward_teach_nothing_and_are_told_by_nothing():
    rows = [row("a", 0.5, [-1.0, -2.0], [-1.0, -1.0], episode=i) for i in range(2)]
    pair = [row("b", 1.0, [-1.0], [-1.0]), row("b", 0.0, [-1.0], [-1.0])]
    answer = found([*rows, *pair], beta=1.0)
    assert [each.tolist() for each in answer.advantages] == [[0, 0], [0, 0], [0.5], [-0.5]]
    assert answer.metrics["preference_loss"] == pytest.approx((math.log(2), 1.0))


def test_an_answer_of_several_samples_is_one():
    """All its tokens have what those of one sample have."""
    parts = [
        row("a", 1.0, [-1.0, -2.0], [-3.0, -3.0], episode=0, number=0),
        row("a", 1.0, [-0.5], [-1.5], episode=0, number=1),
        row("a", 0.0, [-1.0], [-2.0], episode=1),
    ]
    whole = [row("a", 1.0, [-1.0, -2.0, -0.5], [-3.0, -3.0, -1.5]), row("a", 0.0, [-1.0], [-2.0])]
    for own in ({"average": True, "sft_weight": 0.3}, {"beta": 2.0}):
        one, other = (torch.cat(found(rows, **own).advantages) for rows in (parts, whole))
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_log_prob_that_is_no_number_is_named():
    rows = [row("a", 1.0, [math.nan], [0.0]), row("a", 0.0, [-1.0], [-1.0])]
    with pytest.raises(InvalidAdvantageError, match=r"'a/1\.0/None/0': has a score of nan"):
        found(rows)


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"beta": 0.0}, "beta"),
        ({"beta": -0.1}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"margin": -1.0}, "margin"),
        ({"form": "hinge"}, "form"),
        ({"form": "ipo", "label_smoothing": 0.1}, "label_smoothing has no effect for form ipo"),
        ({"form": "ipo", "margin": 0.1}, "margin has no effect for form ipo"),
        ({"clip_low": 0.2}, "clip_low"),
    ],
)
def test_a_setting_that_is_none_is_refused_by_name(own, named):
    with pytest.raises((ValidationError, ValueError), match=named):
        AdvantageSpec(name="dpo", settings=own)


def scored(group, reward, values, margin=None, episode=None):
    """An answer whose reward is the sum of `values`."""
    return AdvantageRow(
        sample_id=f"{group}/{reward}/{episode}",
        group_id=group,
        loss_mask=torch.ones(len(values), dtype=torch.bool),
        rewards={"reward": reward} | ({} if margin is None else {"margin": margin}),
        columns={"values": torch.as_tensor(values, dtype=torch.float64)},
        episode=episode,
    )


def ranked(rows, **own):
    return compute_advantages(rows, AdvantageSpec(name="bradley_terry", settings=own))


rewards = st.floats(-40, 40)


@given(
    st.lists(st.tuples(rewards, rewards, st.none() | st.floats(-5, 5)), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.5]),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_pulls_of_a_reward_model_are_the_derivative_by_autograd(pairs, centering, random):
    """Whatever order the rows come in."""
    rows, leaves, losses = [], [], []
    for index, (*values, margin) in enumerate(pairs):
        own = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
        good, bad = own
        loss = -F.logsigmoid(good - bad - (margin or 0.0))
        losses.append(loss + centering * (good + bad) ** 2)
        leaves += own
        for label, value in zip((1.0, 0.0), values, strict=True):
            rows.append(scored(str(index), label, [value], margin))
    sum(losses).backward()
    order = random.sample(range(len(rows)), len(rows))
    answer = ranked([rows[i] for i in order], centering=centering)
    for place, advantages in zip(order, answer.advantages, strict=True):
        assert advantages.tolist() == pytest.approx(
            [-leaves[place].grad.item()], rel=1e-5, abs=1e-30
        )
    total, count = answer.metrics["preference_loss"]
    assert count == len(pairs)
    assert total == pytest.approx(sum(losses).item(), rel=1e-9, abs=1e-12)
    right = sum(good > bad for good, bad, _ in pairs)
    assert answer.metrics["accuracy"] == (right, len(pairs))


@pytest.mark.parametrize("gap", [1e5, -1e5, 1e20, -1e20])
def test_no_difference_of_rewards_is_too_large(gap):
    answer = ranked([scored("a", 1.0, [gap]), scored("a", 0.0, [0.0])])
    good, bad = (each.item() for each in answer.advantages)
    assert good == -bad == (1.0 if gap < 0 else 0.0)
    assert answer.metrics["preference_loss"][0] == pytest.approx(max(-gap, 0.0))


def test_of_answers_of_one_reward_a_reward_model_learns_nothing():
    rows = [scored("a", 0.5, [3.0], episode=i) for i in range(2)]
    pair = [scored("b", 1.0, [2.0]), scored("b", 0.0, [2.0])]
    answer = ranked([*rows, *pair], centering=0.1)
    assert [each.item() for each in answer.advantages] == pytest.approx([0, 0, -0.3, -1.3])
    assert answer.metrics["preference_loss"] == pytest.approx((math.log(2) + 1.6, 1.0))


def test_groups_that_are_no_pairs_are_refused_by_name():
    with pytest.raises(PluginSettingError, match=r"bradley_terry is of two answers .* has 3"):
        ranked([scored("a", float(i), [0.0], episode=i) for i in range(3)])
