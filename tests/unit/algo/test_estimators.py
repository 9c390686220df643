"""Shipped estimators against their formulas, in plain Python."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algo.advantages import compute_advantages
from sluice.algo.packed_rows import AdvantageRow
from sluice.algo.plugins import PluginSettingError
from sluice.algo.spec import AdvantageSpec, OverlongSpec


def rows_of(groups, columns=(), lengths=None):
    """Rows of groups of rewards; a reward may be a mapping of per-sample columns."""
    rows = []
    for group, rewards in groups.items():
        for index, reward in enumerate(rewards):
            length = 3 if lengths is None else lengths[group][index]
            own = reward if isinstance(reward, dict) else {"reward": float(reward)}
            rows.append(
                AdvantageRow(
                    sample_id=f"{group}/{index}",
                    group_id=group,
                    loss_mask=torch.ones(length, dtype=torch.bool),
                    rewards=own,
                )
            )
    return rows


def scores(rows, **spec):
    """One number a sample: all its tokens have it."""
    found = compute_advantages(rows, AdvantageSpec(**spec)).advantages
    for each in found:
        assert len(set(each.tolist())) <= 1
    return [each[0].item() if len(each) else None for each in found]


def test_opo_weighs_the_baseline_by_length():
    lengths = {"a": [2, 5, 1], "b": [4, 4]}
    rows = rows_of({"a": [1, 0, 0.5], "b": [1, 1]}, lengths=lengths)
    baseline = (2 * 1 + 5 * 0 + 1 * 0.5) / 8
    wanted = [1 - baseline, -baseline, 0.5 - baseline, 0, 0]
    assert scores(rows, name="opo") == pytest.approx(wanted)
    assert scores(rows_of({"a": [1.0]}), name="opo") == [0.0]


def test_remax_subtracts_the_greedy_reward():
    rows = rows_of({"a": [{"reward": 1.0, "score/baseline": 0.25}]})
    assert scores(rows, name="remax") == [0.75]
    other = rows_of({"a": [{"reward": 1.0, "score/greedy": 0.5}]})
    assert scores(other, name="remax", settings={"baseline": "score/greedy"}) == [0.5]


def pass_at_k(rewards, k):
    """By enumeration of all subsets of k answers: each has its best reward."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in subset) for subset in subsets]
    mean, deviation = np.mean(best), np.std(best)
    if deviation == 0:
        return [0.0] * len(rewards)
    return [
        np.mean([(b - mean) / deviation for b, s in zip(best, subsets, strict=True) if i in s])
        for i in range(len(rewards))
    ]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=7), st.data())
@settings(max_examples=60)
def test_pass_at_k_is_the_mean_advantage_of_all_subsets(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    found = scores(rows_of({"a": rewards}), name="pass_at_k", settings={"k": k})
    assert found == pytest.approx(pass_at_k(rewards, k), abs=1e-6)


def test_more_answers_than_there_are_are_refused_by_name():
    with pytest.raises(PluginSettingError, match=r"settings\.k: is 3, above the 2 answers"):
        scores(rows_of({"a": [0, 1]}), name="pass_at_k", settings={"k": 3})


def test_pass_at_k_counts_a_reward_from_its_threshold_on():
    rows = rows_of({"a": [0.4, 0.6, 0.1]})
    found = scores(rows, name="pass_at_k", settings={"k": 2, "threshold": 0.5})
    assert found == pytest.approx(pass_at_k([0, 1, 0], 2), abs=1e-6)


def test_gpg_makes_up_for_silent_groups():
    rows = rows_of({"a": [1, 0], "b": [1, 1], "c": [0, 0]})
    assert scores(rows, name="gpg") == pytest.approx([1.5, -1.5, 0, 0, 0, 0])
    assert scores(rows_of({"a": [1, 1]}), name="gpg") == [0, 0]


def test_gpg_counts_episodes_not_samples():
    told_apart = [row._replace(episode=index) for index, row in enumerate(rows_of({"a": [1, 0]}))]
    in_parts = [row._replace(episode=0) for row in rows_of({"b": [1, 1, 1, 1]})]
    other = [
        row._replace(episode=0) for row in rows_of({"c": [0]})
    ]  # 0 is another one in each group
    rows = [*told_apart, *in_parts, *other]
    assert scores(rows, name="gpg") == pytest.approx(
        [1.0, -1.0, 0, 0, 0, 0, 0]
    )  # 4 episodes, 2 speak


def gdpo(table, weights):
    total = np.zeros(len(table["g"]))
    groups = np.array(table["g"])
    for name, weight in weights.items():
        values = np.array(table[name])
        for group in set(table["g"]):
            own = groups == group
            spread = values[own].std(ddof=1)
            total[own] += weight * (values[own] - values[own].mean()) / (spread + 1e-6)
    return total


def test_gdpo_normalises_each_reward_by_itself():
    table = {
        "g": ["a", "a", "a", "b", "b"],
        "score/right": [1.0, 0.0, 0.0, 1.0, 1.0],
        "score/short": [90.0, 10.0, 50.0, 3.0, 4.0],
    }
    weights = {"score/right": 1.0, "score/short": 0.5}
    groups = {
        group: [
            {name: table[name][i] for name in weights} for i in range(5) if table["g"][i] == group
        ]
        for group in "ab"
    }
    rows = rows_of(groups)
    plain = scores(rows, name="gdpo", settings={"rewards": weights}, whiten=False)
    wanted = gdpo(table, weights)
    assert plain == pytest.approx(wanted, abs=1e-6)
    tokens = np.repeat(wanted, 3)  # whitened over tokens, of which each row has three
    whitened = (wanted - tokens.mean()) / tokens.std(ddof=1)
    found = scores(rows, name="gdpo", settings={"rewards": weights})
    assert found == pytest.approx(whitened, abs=1e-5)


@given(st.integers(0, 40))
def test_soft_overlong_punishment(length):
    spec = OverlongSpec(max_length=20, buffer=5, penalty=0.5)
    if length <= 15:
        wanted = 0.0
    elif length <= 20:
        wanted = 0.5 * (15 - length) / 5
    else:
        wanted = -0.5
    assert spec.punish(length) == pytest.approx(wanted)


def test_overlong_is_added_to_the_reward_of_any_estimator():
    rows = rows_of({"a": [1, 1]}, lengths={"a": [4, 10]})
    overlong = {"max_length": 10, "buffer": 4}
    found = scores(rows, name="grpo", scale_by_std=False, overlong=overlong)
    assert found == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "pass_at_k"}, r"settings\.k: is required by advantage pass_at_k"),
        ({"name": "pass_at_k", "settings": {"k": 0}}, r"settings\.k"),
        ({"name": "pass_at_k", "settings": {"k": 1.5}}, r"settings\.k"),
        ({"name": "opo", "settings": {"k": 1}}, r"settings\.k: has no effect"),
        ({"name": "gdpo"}, r"settings\.rewards: is required"),
        ({"name": "gdpo", "settings": {"rewards": {}}}, r"settings\.rewards"),
        ({"name": "gdpo", "settings": {"rewards": {"../x": 1.0}}}, "no column"),
        ({"name": "gdpo", "settings": {"rewards": {"score/a": math.nan}}}, "finite"),
        ({"name": "gdpo", "settings": {"rewards": {"score/a": 0}}}, "no effect with weight 0"),
        (
            {"name": "gdpo", "reward": "raw_reward", "settings": {"rewards": {"reward": 1}}},
            "reward",
        ),
        ({"name": "remax", "settings": {"baseline": "values"}}, "no column of one number"),
        ({"name": "grpo", "overlong": {"max_length": 3, "buffer": 4}}, "buffer is longer"),
        ({"name": "grpo", "settings": {"scale_by_std": True}, "scale_by_std": True}, "is given as"),
        ({"name": "provided", "overlong": {"max_length": 3, "buffer": 1}}, "overlong has no"),
        ({"name": "x" * 5000}, "is no advantage; known"),
        ({"name": "../x"}, "is no advantage; known"),
        ({"name": "a\0:b"}, "is no advantage; known"),
        ({"name": ""}, "is no advantage; known"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(spec, message):
    with pytest.raises(ValueError, match=message):
        AdvantageSpec(**spec)
