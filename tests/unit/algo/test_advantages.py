import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algo.advantages import compute_advantages
from sluice.algo.aggregation import Moments
from sluice.algo.losses import MissingColumnError
from sluice.algo.packed_rows import AdvantageRow
from sluice.algo.spec import AdvantageSpec


def make_row(sample, group, reward, *, length=4, mask=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    names = ("rollout_logprobs", "reference_logprobs", "teacher_logprobs", "values", "advantages")
    return AdvantageRow(
        sample_id=sample,
        group_id=group,
        loss_mask=torch.ones(length, dtype=torch.bool) if mask is None else mask,
        rewards={"reward": reward, "raw_reward": 10 * reward},
        columns={name: torch.randn(length, generator=generator) for name in names},
    )


def scores(rows, spec):
    """The advantage of each sample's trained tokens, which must be one number."""
    found = []
    for row, column in zip(rows, compute_advantages(rows, spec).advantages, strict=True):
        values = column[row.loss_mask].unique()
        assert len(values) == 1
        found.append(values.item())
    return found


def test_uneven_interleaved_groups_are_told_apart_by_id():
    """Sizes 3, 1 and 2 in mixed order; a position-based or whole-batch norm gives other numbers."""
    rows = [
        make_row("a/0", "a", 1.0),
        make_row("b/0", "b", 5.0),
        make_row("c/0", "c", 2.0),
        make_row("a/1", "a", 0.0),
        make_row("c/1", "c", 4.0),
        make_row("a/2", "a", 2.0),
    ]
    root = math.sqrt(2)
    grpo = [0.0, 0.0, -1 / root, -1.0, 1 / root, 1.0]
    assert scores(rows, AdvantageSpec(name="grpo")) == pytest.approx(grpo, abs=1e-5)
    centered = [0.0, 0.0, -1.0, -1.0, 1.0, 1.0]
    dr_grpo = AdvantageSpec(name="grpo", scale_by_std=False)
    assert scores(rows, dr_grpo) == pytest.approx(centered)
    rloo = [1 - 1.0, 0.0, 2 - 4.0, 0 - 1.5, 4 - 2.0, 2 - 0.5]
    assert scores(rows, AdvantageSpec(name="rloo")) == pytest.approx(rloo)
    baseline = AdvantageSpec(name="reinforce_plus_plus_baseline", whiten=False)
    assert scores(rows, baseline) == pytest.approx(centered)
    raw = AdvantageSpec(name="grpo", scale_by_std=False, reward="raw_reward")
    assert scores(rows, raw) == pytest.approx([10 * x for x in centered])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_or_of_equals_has_no_signal(name):
    rows = [make_row("a/0", "a", 0.7), *(make_row(f"b/{i}", "b", 0.1) for i in range(3))]
    assert scores(rows, AdvantageSpec(name=name)) == [0.0] * 4


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gae",
        "distillation",
        "provided",
    ],
)
def test_fully_masked_empty_and_absent_rows_are_safe(name):
    spec = AdvantageSpec(name=name, whiten=True)
    masked = make_row("a/0", "a", 1.0, mask=torch.zeros(4, dtype=torch.bool))
    empty = make_row("a/1", "a", 0.0, length=0)
    poisoned = masked._replace(columns={k: v * torch.nan for k, v in masked.columns.items()})
    columns = compute_advantages([poisoned, empty, make_row("a/2", "a", 3.0)], spec)
    assert torch.equal(columns.advantages[0], torch.zeros(4))
    assert columns.advantages[1].shape == (0,)
    assert columns.advantages[2].isfinite().all()
    assert columns.advantages[0].dtype == torch.float32
    alone = compute_advantages([poisoned], spec)
    assert torch.equal(alone.advantages[0], torch.zeros(4))
    assert compute_advantages([], spec).advantages == []


def loop_gae(rewards, values, gamma, lam):
    advantages, carry = [0.0] * len(values), 0.0
    for t in reversed(range(len(values))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        carry = rewards[t] + gamma * following - values[t] + gamma * lam * carry
        advantages[t] = carry
    return advantages


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.integers(1, 400),
    st.sampled_from([1.0, 0.99, 0.5]),
    st.sampled_from([1.0, 0.95, 0.0]),
)
def test_gae_is_the_loop_over_trained_tokens(seed, length, gamma, lam):
    """Observations are no steps: cutting them out beforehand gives the same advantages."""
    mask = torch.rand(length, generator=torch.Generator().manual_seed(seed)) > 0.4
    row = make_row("a/0", "a", 2.5, length=length, mask=mask, seed=seed)
    spec = AdvantageSpec(name="gae", gamma=gamma, gae_lambda=lam, kl_coefficient=0.1)
    columns = compute_advantages([row], spec)
    c = {name: values[mask].double() for name, values in row.columns.items()}
    rewards = (-0.1 * (c["rollout_logprobs"] - c["reference_logprobs"])).tolist()
    if rewards:
        rewards[-1] += 2.5
    expected = torch.tensor(loop_gae(rewards, c["values"].tolist(), gamma, lam))
    torch.testing.assert_close(columns.advantages[0][mask], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        columns.returns[0][mask], expected + c["values"].float(), atol=1e-5, rtol=1e-5
    )
    assert not columns.advantages[0][~mask].any()


def test_gae_of_a_long_response_carries_over_many_chunks():
    length = 700
    row = make_row("a/0", "a", 1.0, length=length)
    spec = AdvantageSpec(name="gae", gamma=0.999, gae_lambda=0.998)
    rewards = [0.0] * (length - 1) + [1.0]
    expected = loop_gae(rewards, row.columns["values"].tolist(), 0.999, 0.998)
    found = compute_advantages([row], spec).advantages[0]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_gae_discounts_nothing_unless_told_to():
    row = make_row("a/0", "a", 2.5)
    found = compute_advantages([row], AdvantageSpec(name="gae"))
    torch.testing.assert_close(found.advantages[0], 2.5 - row.columns["values"])
    torch.testing.assert_close(found.returns[0], torch.full((4,), 2.5))


def test_reinforce_plus_plus_whitens_over_the_batch():
    """Two samples of returns 1 and 4: no other batch gives these means and deviations."""
    rows = [make_row("a/0", "a", 1.0, length=3), make_row("b/0", "b", 4.0, length=1)]
    returns = torch.tensor([1.0, 1.0, 1.0, 4.0])
    expected = (returns - returns.mean()) / returns.std()
    found = compute_advantages(rows, AdvantageSpec(name="reinforce_plus_plus"))
    torch.testing.assert_close(torch.cat(found.advantages), expected)
    assert found.moments.mean == pytest.approx(1.75), "of what was whitened"
    plain = compute_advantages(rows, AdvantageSpec(name="reinforce_plus_plus", whiten=False))
    assert torch.equal(torch.cat(plain.advantages), returns)


@pytest.mark.parametrize("name", ["grpo", "rloo", "provided"])
def test_untrained_tokens_have_no_advantage(name):
    mask = torch.tensor([True, False, True, False])
    rows = [make_row(f"a/{i}", "a", float(i), mask=mask, seed=i) for i in range(2)]
    for column in compute_advantages(rows, AdvantageSpec(name=name)).advantages:
        assert not column[~mask].any()
        assert column[mask].all()


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_kl_in_reward_is_the_estimator_over_trained_tokens(name):
    """k2 is never negative, k1 of these rows is; what stands on an observation is not counted."""
    mask = torch.tensor([True, True, False, True])
    rows = [make_row(f"a/{i}", "a", float(i), mask=mask, seed=i) for i in range(2)]
    scaled = {"scale_by_std": False} if name == "grpo" else {"whiten": False}
    spec = AdvantageSpec(name=name, kl_coefficient=0.5, kl_estimator="k2", **scaled)
    found = compute_advantages(rows, spec)
    gaps = [row.columns["rollout_logprobs"] - row.columns["reference_logprobs"] for row in rows]
    penalties = [torch.where(mask, 0.25 * gap.square(), 0.0) for gap in gaps]
    without = spec.model_copy(update={"kl_coefficient": None, "kl_estimator": None})
    assert "kl_in_reward" not in compute_advantages(rows, without).metrics
    total, weight = found.metrics["kl_in_reward"]
    assert total == pytest.approx(float(sum(p.sum() for p in penalties)))
    assert weight == 6
    shaped = [float(i - penalties[i].sum()) for i in range(2)]
    for i, column in enumerate(found.advantages):
        if name == "grpo":
            assert column[0] == pytest.approx(shaped[i] - sum(shaped) / 2, abs=1e-6)
        else:
            assert column[0] == pytest.approx(shaped[i], abs=1e-6)


def test_a_lone_episode_of_several_samples_has_no_rloo_baseline():
    rows = [make_row(f"g/{i}", "g", float(i))._replace(episode=0) for i in range(2)]
    assert scores(rows, AdvantageSpec(name="rloo")) == [0.0, 0.0]


def test_terminal_reward_is_on_the_last_trained_token():
    """The trailing observation gets none of it; discounted backwards from the last action."""
    mask = torch.tensor([True, False, True, False])
    row = make_row("a/0", "a", 8.0, mask=mask)
    spec = AdvantageSpec(name="reinforce_plus_plus", gamma=0.5, whiten=False)
    column = compute_advantages([row], spec).advantages[0]
    assert column.tolist() == [4.0, 0.0, 8.0, 0.0]


def test_kl_in_reward_reaches_grpo_and_rloo():
    """Per sample: reward - coefficient x KL summed over trained tokens, before comparing."""
    mask = torch.tensor([True, False, True, True])
    rows = [make_row(f"a/{i}", "a", float(i), seed=i, mask=mask) for i in range(3)]
    adjusted = []
    for i, row in enumerate(rows):
        kl = (row.columns["rollout_logprobs"] - row.columns["reference_logprobs"])[mask]
        adjusted.append(i - 0.2 * kl.sum().item())
        row.columns["reference_logprobs"][1] = torch.nan  # an observation has none
    expected = [r - (sum(adjusted) - r) / 2 for r in adjusted]
    spec = AdvantageSpec(name="rloo", kl_coefficient=0.2)
    assert scores(rows, spec) == pytest.approx(expected, abs=1e-5)
    centered = [r - sum(adjusted) / 3 for r in adjusted]
    spec = AdvantageSpec(name="grpo", scale_by_std=False, kl_coefficient=0.2)
    assert scores(rows, spec) == pytest.approx(centered, abs=1e-5)


def test_distillation_is_the_gap_to_the_teacher():
    rows = [make_row("a/0", "a", 1.0, mask=torch.tensor([True, True, False, True]))]
    gap = rows[0].columns["teacher_logprobs"] - rows[0].columns["rollout_logprobs"]
    alone = compute_advantages(rows, AdvantageSpec(name="distillation"))
    torch.testing.assert_close(alone.advantages[0], gap * rows[0].loss_mask)
    added = compute_advantages(
        rows, AdvantageSpec(name="reinforce_plus_plus", whiten=False, teacher_coefficient=0.5)
    )
    torch.testing.assert_close(added.advantages[0], (1.0 + 0.5 * gap) * rows[0].loss_mask)
    assert alone.metrics["kl_teacher"] == pytest.approx(
        (-(gap * rows[0].loss_mask).sum().item(), 3), abs=1e-5
    )


batches = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.floats(-5, 5).map(lambda x: round(x, 3)),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=40)
@given(
    batches,
    st.randoms(use_true_random=False),
    st.sampled_from(["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]),
)
def test_row_order_and_data_parallel_split_change_nothing(batch, random, name):
    """Whole groups on ranks, in any order; whitening merges the ranks' moments."""
    spec = AdvantageSpec(name=name, whiten=True, kl_coefficient=0.05)
    rows = [
        make_row(f"{group}/{i}", group, reward, length=length, seed=i)
        for i, (group, reward, length) in enumerate(batch)
    ]
    whole = compute_advantages(rows, spec)
    wanted = {r.sample_id: a for r, a in zip(rows, whole.advantages, strict=True)}
    ranks = [[], [], []]
    owner = {group: random.randrange(3) for group in "abcdef"}
    for row in random.sample(rows, len(rows)):
        ranks[owner[row.group_id]].append(row)
    moments = Moments()
    for part in ranks:
        moments = compute_advantages(part, spec).moments.merge(moments)
    for part in ranks:
        columns = compute_advantages(part, spec, lambda _: moments)
        for row, column in zip(part, columns.advantages, strict=True):
            torch.testing.assert_close(column, wanted[row.sample_id], atol=1e-4, rtol=1e-4)


def test_a_group_relative_estimate_does_not_depend_on_row_order_at_all():
    rewards = [0.1, 0.7, 0.3, 1e9, -1e9, 0.2]
    rows = [make_row(f"a/{i}", "a", reward) for i, reward in enumerate(rewards)]
    spec = AdvantageSpec(name="grpo", scale_by_std=False)
    forward = compute_advantages(rows, spec).advantages
    backward = compute_advantages(rows[::-1], spec).advantages[::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))


def test_merge_is_called_once_and_only_when_whitening():
    calls = []

    def merge(moments):
        calls.append(moments)
        return moments

    compute_advantages([], AdvantageSpec(name="gae", whiten=True), merge)
    assert calls == [Moments()]
    compute_advantages([make_row("a/0", "a", 1.0)], AdvantageSpec(name="grpo"), merge)
    assert len(calls) == 1


@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(-100, 100), max_size=8), min_size=1, max_size=5))
def test_merged_moments_are_those_of_all_values(parts):
    merged = Moments()
    for part in parts:
        merged = merged.merge(Moments.of_tensor(torch.tensor(part, dtype=torch.float64)))
    whole = Moments.of_values(value for part in parts for value in part)
    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean, abs=1e-9)
    assert merged.m2 == pytest.approx(whole.m2, abs=1e-7)


def test_moments_survive_a_mean_far_from_zero():
    """E[x^2] - E[x]^2 in float32 answers 0 or a negative number here."""
    values = 1e6 + torch.tensor([0.0, 1.0, 2.0, 3.0])
    halves = [Moments.of_tensor(part) for part in values.split(2)]
    assert halves[0].merge(halves[1]).standard_deviation == pytest.approx(math.sqrt(5 / 3))
    naive = values.square().mean() - values.mean().square()
    assert naive.item() != pytest.approx(1.25, rel=0.1)


def test_bad_rows_are_named():
    row = make_row("a/7", "a", 1.0)
    with pytest.raises(MissingColumnError, match=r"a/7 lacks values"):
        bare = row._replace(columns={})
        compute_advantages([bare], AdvantageSpec(name="gae"))
    for missing in ("teacher_logprobs", "rollout_logprobs"):
        columns = {k: v for k, v in row.columns.items() if k != missing}
        with pytest.raises(MissingColumnError, match=rf"a/7 lacks {missing}"):
            compute_advantages([row._replace(columns=columns)], AdvantageSpec(name="distillation"))
    with pytest.raises(MissingColumnError, match=r"a/7 lacks reward"):
        compute_advantages([row._replace(rewards={})], AdvantageSpec(name="grpo"))
    with pytest.raises(ValueError, match=r"a/7: reward is not finite"):
        compute_advantages([row._replace(rewards={"reward": math.nan})], AdvantageSpec(name="grpo"))
    with pytest.raises(ValueError, match=r"a/7: values has 3 values for 4"):
        compute_advantages(
            [row._replace(columns={"values": torch.zeros(3)})], AdvantageSpec(name="gae")
        )


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_an_episode_counts_once_however_many_samples_it_has(name):
    """The good one gave three samples: counted by row, it would look like the average."""
    single = [make_row("g/0", "g", 1.0), make_row("g/1", "g", 0.0), make_row("g/2", "g", 0.0)]
    fan_out = [
        *(single[0]._replace(sample_id=f"g/{i}", episode=0) for i in range(3)),
        single[1]._replace(sample_id="g/3", episode=1),
        single[2]._replace(sample_id="g/4", episode=2),
    ]
    spec = AdvantageSpec(name=name)
    one, several = scores(single, spec), scores(fan_out, spec)
    assert several == pytest.approx([one[0]] * 3 + one[1:], abs=1e-6)
    by_row = scores([row._replace(episode=None) for row in fan_out], spec)
    assert by_row != pytest.approx(several, abs=1e-3)


def test_samples_of_one_episode_may_be_rewarded_apart():
    rows = [
        make_row("g/0", "g", 1.0)._replace(episode=0),
        make_row("g/1", "g", 3.0)._replace(episode=0),
        make_row("g/2", "g", 5.0)._replace(episode=1),
    ]
    centered = scores(rows, AdvantageSpec(name="grpo", scale_by_std=False))
    assert centered == pytest.approx([1 - 3.5, 3 - 3.5, 5 - 3.5])
    others = scores(rows, AdvantageSpec(name="rloo"))
    assert others == pytest.approx([1 - 5, 3 - 5, 5 - 2])
    spread = math.sqrt((2.5**2 + 0.5**2) / 2 + 1.5**2)  # each episode's samples weigh one
    scaled = scores(rows, AdvantageSpec(name="grpo"))
    assert scaled == pytest.approx([each / spread for each in centered], rel=1e-5)


def test_episodes_of_one_mean_do_not_blow_up_what_their_samples_differ_by():
    """A draft that is wrong and a revision that is right, in every episode of the group."""
    rows = [
        make_row(f"g/{e}{i}", "g", float(i))._replace(episode=e) for e in range(4) for i in range(2)
    ]
    found = scores(rows, AdvantageSpec(name="grpo"))
    assert found == pytest.approx([-0.5 / math.sqrt(1 / 3), 0.5 / math.sqrt(1 / 3)] * 4, rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg", "opo", "reinforce_plus_plus_baseline"])
def test_samples_that_got_one_reward_have_no_advantage_at_all(name):
    """No rounding is left over: a row of zeros is not computed."""
    reward = 0.007180650969716157  # five of it by five are another number
    rows = [
        make_row(f"g/{e}{i}", "g", reward)._replace(episode=e) for e in range(3) for i in range(5)
    ]
    assert scores(rows, AdvantageSpec(name=name)) == [0.0] * len(rows)


def test_equal_values_are_whitened_to_zero():
    for reward, count in ((1e10 / 3, 1000), (0.1, 997), (-1e-7 / 3, 313)):
        rows = [make_row(f"g/{i}", f"g{i}", reward) for i in range(count)]
        found = scores(rows, AdvantageSpec(name="reinforce_plus_plus"))
        assert found == [0.0] * count, reward
