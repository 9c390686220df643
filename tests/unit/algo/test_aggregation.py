"""Micro-batches, row order and data-parallel ranks never change the number."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algo.aggregation import weigh_samples
from sluice.algo.losses import MissingColumnError, compute_loss, pack_rows
from sluice.algo.spec import LossSpec

SPECS = [
    LossSpec(name="ppo_clip", clip_low=0.2, aggregation="token_mean", kl_coefficient=0.1),
    LossSpec(name="gspo", clip_low=0.01, aggregation="sample_mean"),
    LossSpec(name="cispo", clip_high=0.2, aggregation="group_mean"),
    LossSpec(
        name="ppo_clip",
        clip_low=0.2,
        aggregation="constant",
        constant_length=7.0,
        old_logprobs="old",
        importance={"level": "geometric", "mode": "mask", "low": 0.8, "high": 1.2},
        opsm_delta=0.1,
    ),
]


@dataclass(frozen=True)
class Row:
    sample_id: str
    group_id: str
    loss_mask: torch.Tensor
    columns: dict = field(default_factory=dict)
    loss_weight: float = 1.0


def make_row(i, group, length, kept):
    generator = torch.Generator().manual_seed(i)
    names = ("rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages", "outputs")
    columns = {
        name: 0.3 * torch.randn(length, generator=generator, dtype=torch.float64) for name in names
    }
    mask = torch.rand(length, generator=generator) < kept
    return Row(f"{group}/{i}", group, mask, columns)


def weighted(rows, spec):
    counts = [int(row.loss_mask.sum()) for row in rows]
    found = weigh_samples(spec, counts, [row.group_id for row in rows])
    return [
        Row(r.sample_id, r.group_id, r.loss_mask, r.columns, w)
        for r, w in zip(rows, found.weights, strict=True)
    ], found.normalizer


def run(rows, spec, scale):
    """Loss sum and the gradient of a parameter shared by all rows, as one micro-batch."""
    parts = [torch.empty(0, dtype=torch.float64), *(row.columns["outputs"] for row in rows)]
    outputs = torch.cat(parts) * scale
    terms = compute_loss(pack_rows(rows, spec, outputs), spec)
    terms.loss.backward()
    return terms


samples = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.sampled_from([0.0, 0.6, 1.0])),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.aggregation)
@settings(max_examples=25)
@given(samples, st.randoms(use_true_random=False))
def test_any_split_and_order_gives_the_same_loss_gradient_and_metrics(spec, drawn, random):
    rows = [make_row(i, *each) for i, each in enumerate(drawn)]
    rows, normalizer = weighted(rows, spec)
    whole = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    expected = run(rows, spec, whole)

    # Two data-parallel ranks of whole groups, each with its own normaliser and micro-batches.
    owner = {group: random.randrange(2) for group in "abc"}
    pieces = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    loss, tokens, summed, metrics = 0.0, 0.0, 0.0, {}
    for rank in range(2):
        mine = [row for row in random.sample(rows, len(rows)) if owner[row.group_id] == rank]
        mine, part = weighted(mine, spec)
        summed += part
        while mine:
            size = random.randint(1, len(mine))
            terms = run(mine[:size], spec, pieces)
            mine = mine[size:]
            loss, tokens = loss + terms.loss.item(), tokens + terms.token_count.item()
            for name, (total, weight) in terms.metrics.items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + total.item(), before[1] + weight.item())
        run([], spec, pieces)  # a dummy micro-batch adds nothing
    assert summed == pytest.approx(normalizer)
    assert loss == pytest.approx(expected.loss.item(), abs=1e-9)
    assert tokens == expected.token_count.item()
    assert pieces.grad.item() == pytest.approx(whole.grad.item(), abs=1e-9)
    for name, (total, weight) in expected.metrics.items():
        assert metrics[name] == pytest.approx((total.item(), weight.item()), abs=1e-9), name


def test_the_four_means_by_hand():
    """Samples of 4, 2 and 3 trained tokens and a masked one; groups {0, 1, masked} and {2}."""
    counts, groups = [4, 2, 3, 0], ["a", "a", "b", "a"]

    def found(aggregation, **extra):
        spec = LossSpec(name="sft", aggregation=aggregation, **extra)
        return weigh_samples(spec, counts, groups)

    assert found("token_mean").weights == (1, 1, 1, 1)
    assert found("token_mean").normalizer == 9
    assert found("sample_mean").weights == (1 / 4, 1 / 2, 1 / 3, 0)
    assert found("sample_mean").normalizer == 3
    assert found("group_mean").weights == (1 / 6, 1 / 6, 1 / 3, 1 / 6)
    assert found("group_mean").normalizer == 2
    assert found("constant", constant_length=5.0).weights == (1, 1, 1, 1)
    assert found("constant", constant_length=5.0).normalizer == 20
    assert found("sum").weights == (1, 1, 1, 1)
    assert found("sum").normalizer == 1


def test_a_step_without_trained_tokens_has_no_normaliser():
    for aggregation in ("token_mean", "sample_mean", "group_mean", "sum"):
        spec = LossSpec(name="sft", aggregation=aggregation)
        assert weigh_samples(spec, [0, 0], ["a", "b"]).normalizer == 0


def test_packing_names_what_is_wrong():
    row = make_row(3, "a", 4, 1.0)
    outputs = torch.zeros(4)
    spec = LossSpec(name="ppo_clip", clip_low=0.2)
    bare = Row(row.sample_id, "a", row.loss_mask)
    with pytest.raises(MissingColumnError, match=r"a/3 lacks advantages, rollout_logprobs"):
        pack_rows([bare], spec, outputs)
    with pytest.raises(ValueError, match="5 outputs for 4 response tokens"):
        pack_rows([row], spec, torch.zeros(5))
    short = {**row.columns, "advantages": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"a/3: advantages has 2 values for 4"):
        pack_rows([Row(row.sample_id, "a", row.loss_mask, short)], spec, outputs)


def test_rows_of_one_micro_batch_may_differ_in_metric_columns():
    """Presence is per row: a sample without rollout log-probs does not spoil the others."""
    full, partial = make_row(0, "a", 3, 1.0), make_row(1, "a", 2, 1.0)
    kept = {"advantages": partial.columns["advantages"]}
    partial = Row(partial.sample_id, "a", partial.loss_mask, kept)
    terms = compute_loss(
        pack_rows([partial, full], LossSpec(name="reinforce"), torch.zeros(5)),
        LossSpec(name="reinforce"),
    )
    total, weight = terms.metrics["rollout_mismatch"]
    assert weight == 3
    torch.testing.assert_close(
        total.double(),
        full.columns["old_logprobs"].sub(full.columns["rollout_logprobs"]).abs().sum(),
    )
