"""Each loss against its formula written out per token in float64, and its gradient."""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from services.trainer.backend import Row
from sluice.algo.losses import LossInputs, MissingColumnError, compute_loss, pack_columns
from sluice.algo.spec import ImportanceSpec, LossSpec
from tests.unit.algo.loss_inputs import COLUMNS, make_inputs


def by_hand(inputs, per_token):
    """sum_i w_i sum_t per_token(i, t) over trained tokens, in plain Python loops."""
    total = 0.0
    for t in range(len(inputs.mask)):
        if inputs.mask[t]:
            i = int(inputs.sample_index[t])
            total = total + inputs.sample_weights[i] * per_token(i, t)
    return total


def sequence_mean(inputs, values, i):
    chosen = (inputs.sample_index == i) & inputs.mask
    return values[chosen].mean()


def ppo(ratio, advantage, low, high, dual=None):
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        loss = torch.minimum(loss, -dual * advantage)
    return loss


def k3(logprob, reference):
    return (reference - logprob).exp() - 1 + logprob - reference


def column(inputs, name, t):
    return inputs.columns[name][t]


def old_ratio(x, t, name="rollout_logprobs"):
    return (x.outputs[t] - column(x, name, t)).exp()


def advantage(x, t):
    return column(x, "advantages", t)


def importance(x, t):
    return (column(x, "old_logprobs", t) - column(x, "rollout_logprobs", t)).exp()


def tis_ppo(weight):
    return lambda x, i, t: (
        weight(x, i, t) * ppo(old_ratio(x, t, "old_logprobs"), advantage(x, t), 0.2, 0.2)
    )


def log_importance(x):
    return x.columns["old_logprobs"] - x.columns["rollout_logprobs"]


def geometric(x, i):
    return sequence_mean(x, log_importance(x), i).exp()


def sequence(x, i):
    chosen = (x.sample_index == i) & x.mask
    return log_importance(x)[chosen].sum().exp()


def band(weight, low=0.7, high=1.5):
    return weight if low <= weight <= high else 0.0 * weight


def opsm(x, i, t):
    drift = sequence_mean(x, (x.columns["rollout_logprobs"] - x.outputs).detach(), i)
    dropped = advantage(x, t) < 0 and drift > 0.05
    return (0.0 if dropped else 1.0) * ppo(old_ratio(x, t), advantage(x, t), 0.2, 0.2)


def vetoed(x, i):
    chosen = (x.sample_index == i) & x.mask
    return bool((log_importance(x)[chosen].exp() < 0.6).any())


CLIP = {"name": "ppo_clip", "clip_low": 0.2}
OLD = {**CLIP, "old_logprobs": "old"}
MIS = {"mode": "mask", "low": 0.7, "high": 1.5}
FORMULAS = {
    "ppo": (CLIP, lambda x, i, t: ppo(old_ratio(x, t), advantage(x, t), 0.2, 0.2)),
    "clip_higher": (
        {**CLIP, "clip_high": 0.5},
        lambda x, i, t: ppo(old_ratio(x, t), advantage(x, t), 0.2, 0.5),
    ),
    "dual_clip": (
        {**CLIP, "dual_clip": 1.3},
        lambda x, i, t: ppo(old_ratio(x, t), advantage(x, t), 0.2, 0.2, 1.3),
    ),
    "old_column": (OLD, tis_ppo(lambda x, i, t: 1.0)),
    "importance_sampling": (
        {"name": "importance_sampling"},
        lambda x, i, t: -old_ratio(x, t) * advantage(x, t),
    ),
    "cispo": (
        {"name": "cispo", "clip_high": 0.2, "clip_low": 0.3},
        lambda x, i, t: -old_ratio(x, t).detach().clamp(0.7, 1.2) * advantage(x, t) * x.outputs[t],
    ),
    "cispo_without_low": (
        {"name": "cispo", "clip_high": 0.2},
        lambda x, i, t: -old_ratio(x, t).detach().clamp(max=1.2) * advantage(x, t) * x.outputs[t],
    ),
    "reinforce": ({"name": "reinforce"}, lambda x, i, t: -advantage(x, t) * x.outputs[t]),
    "reinforce_tis": (
        {"name": "reinforce", "importance": {"high": 1.2}},
        lambda x, i, t: -old_ratio(x, t).detach().clamp(max=1.2) * advantage(x, t) * x.outputs[t],
    ),
    "dro": (
        {"name": "dro", "dro_beta": 0.3},
        lambda x, i, t: 0.15 * old_ratio(x, t).log().square() - advantage(x, t) * x.outputs[t],
    ),
    "sft": ({"name": "sft"}, lambda x, i, t: -x.outputs[t]),
    "linear_value": ({"name": "linear_value"}, lambda x, i, t: -advantage(x, t) * x.outputs[t]),
    "value": (
        {"name": "value"},
        lambda x, i, t: 0.5 * (x.outputs[t] - column(x, "returns", t)) ** 2,
    ),
    "value_clip": (
        {"name": "value", "value_clip": 0.1},
        lambda x, i, t: torch.maximum(
            0.5 * (x.outputs[t] - column(x, "returns", t)) ** 2,
            0.5
            * (
                column(x, "values", t)
                + (x.outputs[t] - column(x, "values", t)).clamp(-0.1, 0.1)
                - column(x, "returns", t)
            )
            ** 2,
        ),
    ),
    "entropy": (
        {"name": "sft", "entropy_coefficient": 0.01},
        lambda x, i, t: -x.outputs[t] - 0.01 * x.entropy[t],
    ),
    "kl_k1_unbiased": (
        {**CLIP, "kl_coefficient": 0.1, "kl_estimator": "k1", "kl_unbiased": True},
        lambda x, i, t: (
            ppo(old_ratio(x, t), advantage(x, t), 0.2, 0.2)
            + 0.1 * old_ratio(x, t) * (x.outputs[t] - column(x, "reference_logprobs", t))
        ),
    ),
    "kl_k2": (
        {"name": "sft", "kl_coefficient": 0.1, "kl_estimator": "k2"},
        lambda x, i, t: (
            -x.outputs[t] + 0.05 * (x.outputs[t] - column(x, "reference_logprobs", t)) ** 2
        ),
    ),
    "kl_k3": (
        {"name": "sft", "kl_coefficient": 0.1},
        lambda x, i, t: -x.outputs[t] + 0.1 * k3(x.outputs[t], column(x, "reference_logprobs", t)),
    ),
    "kl_unbiased": (
        {**CLIP, "kl_coefficient": 0.1, "kl_unbiased": True},
        lambda x, i, t: (
            ppo(old_ratio(x, t), advantage(x, t), 0.2, 0.2)
            + 0.1 * old_ratio(x, t) * k3(x.outputs[t], column(x, "reference_logprobs", t))
        ),
    ),
    "kl_unbiased_on_policy": (  # the ratio is 1, its gradient is not 0
        {"name": "reinforce", "kl_coefficient": 0.1, "kl_unbiased": True},
        lambda x, i, t: (
            -advantage(x, t) * x.outputs[t]
            + 0.1
            * (x.outputs[t] - x.outputs[t].detach()).exp()
            * k3(x.outputs[t], column(x, "reference_logprobs", t))
        ),
    ),
    "tis": (
        {**OLD, "importance": {"high": 1.2}},
        tis_ppo(lambda x, i, t: importance(x, t).clamp(max=1.2)),
    ),
    "token_clip": (
        {**OLD, "importance": {"mode": "clip", "low": 0.9, "high": 1.2}},
        tis_ppo(lambda x, i, t: importance(x, t).clamp(0.9, 1.2)),
    ),
    "icepop": (
        {**OLD, "importance": MIS},
        tis_ppo(lambda x, i, t: band(importance(x, t))),
    ),
    "mis_sequence": (
        {**OLD, "importance": {**MIS, "level": "sequence"}},
        tis_ppo(lambda x, i, t: band(sequence(x, i))),
    ),
    "mis_geometric_reject": (
        {**OLD, "importance": {**MIS, "level": "geometric", "mode": "reject"}},
        tis_ppo(lambda x, i, t: torch.sign(band(geometric(x, i)))),
    ),
    "geometric_truncate": (
        {**OLD, "importance": {"level": "geometric", "high": 1.01}},
        tis_ppo(lambda x, i, t: geometric(x, i).clamp(max=1.01)),
    ),
    "veto": (
        {**OLD, "importance": {"high": 1.2, "veto": 0.6}},
        tis_ppo(lambda x, i, t: (not vetoed(x, i)) * importance(x, t).clamp(max=1.2)),
    ),
    "opsm": ({**CLIP, "opsm_delta": 0.05}, opsm),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_equal_the_formula(name, seed):
    settings, per_token = FORMULAS[name]
    inputs = make_inputs(seed)
    terms = compute_loss(inputs, LossSpec(**settings))
    expected = by_hand(inputs, lambda i, t: per_token(inputs, i, t))
    leaves = (inputs.outputs, inputs.entropy)
    found = torch.autograd.grad(terms.loss, leaves, allow_unused=True)
    wanted = torch.autograd.grad(expected, leaves, allow_unused=True)
    torch.testing.assert_close(terms.loss, expected)
    for mine, theirs in zip(found, wanted, strict=True):
        if theirs is None:
            assert mine is None or not mine.any()
        else:
            torch.testing.assert_close(mine, theirs)
    assert terms.token_count == inputs.mask.sum()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gspo_is_the_sequence_objective_when_a_sample_has_one_advantage(seed):
    """w_i tokens_i (-min(s_i A_i, clip(s_i) A_i)), s_i differentiable through every token."""
    inputs = make_inputs(seed, uniform_advantages=True)
    spec = LossSpec(name="gspo", clip_low=0.05, clip_high=0.1)
    log_ratio = inputs.outputs - inputs.columns["rollout_logprobs"]
    expected = by_hand(
        inputs,
        lambda i, t: ppo(
            sequence_mean(inputs, log_ratio, i).exp(), inputs.columns["advantages"][t], 0.05, 0.1
        ),
    )
    terms = compute_loss(inputs, spec)
    torch.testing.assert_close(terms.loss, expected)
    (found,) = torch.autograd.grad(terms.loss, inputs.outputs)
    (wanted,) = torch.autograd.grad(expected, inputs.outputs)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", [*FORMULAS, "gspo"])
def test_untrained_tokens_cannot_matter(name):
    """NaN and infinity outside the mask (absent log-probs, padding) change nothing."""
    settings = FORMULAS[name][0] if name in FORMULAS else {"name": "gspo", "clip_low": 0.1}
    inputs = make_inputs()
    poison = torch.where(torch.arange(len(inputs.mask)) % 2 == 0, torch.nan, torch.inf).double()

    def spoil(values):
        return torch.where(inputs.mask, values.detach(), poison)

    spoiled = replace(
        inputs,
        outputs=spoil(inputs.outputs).requires_grad_(),
        columns={key: spoil(value) for key, value in inputs.columns.items()},
        entropy=spoil(inputs.entropy).requires_grad_(),
    )
    spec = LossSpec(**settings)
    clean, dirty = compute_loss(inputs, spec), compute_loss(spoiled, spec)
    assert clean.loss == dirty.loss
    assert clean.metrics == dirty.metrics
    (wanted,) = torch.autograd.grad(clean.loss, inputs.outputs)
    (found,) = torch.autograd.grad(dirty.loss, spoiled.outputs)
    assert torch.equal(found, wanted)
    assert not found[~inputs.mask].any()


@pytest.mark.parametrize("name", [*FORMULAS, "gspo"])
def test_a_micro_batch_without_tokens_still_has_a_graph(name):
    settings = FORMULAS[name][0] if name in FORMULAS else {"name": "gspo", "clip_low": 0.1}
    empty = torch.empty(0, dtype=torch.float64)
    leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        outputs=leaf[:0],
        mask=empty.bool(),
        sample_index=empty.long(),
        sample_weights=empty,
        columns=dict.fromkeys(COLUMNS, empty),
        entropy=leaf[:0],
    )
    terms = compute_loss(inputs, LossSpec(**settings))
    terms.loss.backward()
    assert terms.loss == 0
    assert torch.equal(leaf.grad, torch.zeros(3, dtype=torch.float64))


def test_metrics_are_means_over_trained_tokens():
    inputs = make_inputs()
    spec = LossSpec(
        name="ppo_clip", clip_low=0.2, old_logprobs="old", importance=ImportanceSpec(high=1.1)
    )
    metrics = compute_loss(inputs, spec).metrics
    logprobs, mask = inputs.outputs.detach()[inputs.mask], inputs.mask
    old, rollout = (inputs.columns[f"{name}_logprobs"][mask] for name in ("old", "rollout"))
    advantages = inputs.columns["advantages"][mask]
    ratio = (logprobs - old).exp()
    expected = {
        "ratio": ratio.mean(),
        "clipped_low": ((ratio < 0.8) & (advantages < 0)).double().mean(),
        "clipped_high": ((ratio > 1.2) & (advantages > 0)).double().mean(),
        "kl_old_k1": (old - logprobs).mean(),
        "kl_old_k3": (ratio - 1 - ratio.log()).mean(),
        "entropy": inputs.entropy.detach()[mask].mean(),
        "rollout_mismatch": (old - rollout).abs().mean(),
        "rollout_mismatch_k3": ((old - rollout).exp() - 1 - (old - rollout)).mean(),
        "importance_weight": (old - rollout).exp().clamp(max=1.1).mean(),
        "importance_dropped": torch.tensor(0.0, dtype=torch.float64),
    }
    for name, mean in expected.items():
        total, weight = metrics[name]
        torch.testing.assert_close(total / weight, mean, msg=name)
        assert not total.requires_grad


def test_mismatch_is_of_this_pass_where_a_row_has_no_old_logprobs():
    inputs = make_inputs()
    old = inputs.columns["old_logprobs"].clone()
    without = inputs.sample_index == 0
    old[without] = torch.nan
    rollout = inputs.columns["rollout_logprobs"]
    columns = {**inputs.columns, "old_logprobs": old}
    total, weight = compute_loss(
        replace(inputs, columns=columns), LossSpec(name="reinforce")
    ).metrics["rollout_mismatch"]
    trainer = torch.where(without, inputs.outputs.detach(), old)
    assert weight == inputs.mask.sum()
    torch.testing.assert_close(total, (trainer - rollout)[inputs.mask].abs().sum())


def test_mismatch_leaves_out_rows_without_rollout_logprobs():
    inputs = make_inputs()
    rollout = inputs.columns["rollout_logprobs"].clone()
    rollout[inputs.sample_index == 0] = torch.nan
    spec = LossSpec(name="reinforce")
    columns = {"advantages": inputs.columns["advantages"], "rollout_logprobs": rollout}
    total, weight = compute_loss(replace(inputs, columns=columns), spec).metrics["rollout_mismatch"]
    present = inputs.mask & (inputs.sample_index != 0)
    assert weight == present.sum()
    torch.testing.assert_close(total, (inputs.outputs.detach() - rollout)[present].abs().sum())


@pytest.mark.parametrize("name", ["importance_sampling", "ppo_clip", "gspo", "cispo"])
def test_far_ratios_stay_finite(name):
    """A log ratio of 500 overflows float32; here loss, gradient and metrics stay numbers."""
    inputs = make_inputs()
    outputs = inputs.outputs.detach().float().requires_grad_()
    columns = {key: value.float() for key, value in inputs.columns.items()}
    columns["rollout_logprobs"] = torch.full_like(outputs, -500.0)
    clips = {"ppo_clip": {"clip_low": 0.2}, "gspo": {"clip_low": 0.2}, "cispo": {"clip_high": 0.2}}
    spec = LossSpec(name=name, **clips.get(name, {}))
    terms = compute_loss(replace(inputs, outputs=outputs, columns=columns), spec)
    terms.loss.backward()
    assert terms.loss.isfinite()
    assert outputs.grad.isfinite().all()
    assert all(total.isfinite() for total, _ in terms.metrics.values())


def test_a_missing_column_is_named():
    inputs = make_inputs()
    columns = {"advantages": inputs.columns["advantages"]}
    with pytest.raises(MissingColumnError, match="rollout_logprobs") as caught:
        compute_loss(replace(inputs, columns=columns), LossSpec(name="ppo_clip", clip_low=0.2))
    assert caught.value.columns == ("rollout_logprobs",)


def test_an_entropy_bonus_needs_the_entropy():
    with pytest.raises(ValueError, match="entropy"):
        compute_loss(
            replace(make_inputs(), entropy=None), LossSpec(name="sft", entropy_coefficient=0.1)
        )


class Joined(TorchFunctionMode):
    """Lengths of all that is joined to one tensor."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.cat:
            self.lengths += [each.shape[0] for each in args[0]]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [0, 3])
def test_rows_are_packed_end_to_end_with_nothing_empty_among_them(count):
    """For which PyTorch takes five times as long over many rows."""
    signals = [torch.arange(2.0) + 10 * index for index in range(count)]
    masks = [torch.tensor([True, index != 1]) for index in range(count)]
    rows = [
        Row(f"r{index}", "g", torch.arange(5), 3, mask, dict.fromkeys(COLUMNS, signal))
        for index, (mask, signal) in enumerate(zip(masks, signals, strict=True))
    ]
    with Joined() as joined:
        packed = pack_columns(rows, LossSpec(name="ppo_clip", clip_low=0.2))
    assert 0 not in joined.lengths
    assert bool(joined.lengths) == (count > 0)
    assert packed.mask.dtype == torch.bool
    assert packed.mask.tolist() == [kept for mask in masks for kept in mask.tolist()]
    assert len(packed.columns) > 1
    for values in packed.columns.values():
        assert values.dtype == torch.float32
        assert values.tolist() == [value for signal in signals for value in signal.tolist()]
