"""Owners, micro-batches and weights of a batch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.config import TrainerConfig
from services.trainer.controller import passes
from services.trainer.controller.planning import (
    BareRow,
    Packing,
    Planner,
    describe_bare,
    find_missing,
    limits_of,
    packing_of,
    weigh_pass,
)
from sluice.algo.aggregation import weigh_samples
from sluice.algo.layout import SequenceLayout
from sluice.algo.spec import LossSpec, loss_traits
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.balance.planner import (
    MicroBatchPlan,
    PlanLimits,
    TowerShape,
    TransformerShape,
    forward_flops,
)
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.sample import RowFacts
from tests.unit.trainer.rows import make_batch, make_samples

SHAPE = TransformerShape(
    hidden_size=16,
    layer_count=2,
    head_count=2,
    kv_head_count=2,
    head_size=8,
    feed_forward_size=32,
    vocabulary_size=50,
)
GROUPS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6)
AGGREGATIONS = ("token_mean", "sample_mean", "group_mean", "constant")


def loss_of(aggregation: str) -> LossSpec:
    length = 8.0 if aggregation == "constant" else None
    return LossSpec(name="sft", aggregation=aggregation, constant_length=length)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(groups=GROUPS, data_size=st.integers(1, 4))
def test_every_selected_row_runs_once_where_it_lies(
    groups: list[list[int]], data_size: int
) -> None:
    planner = Planner(SHAPE, PlanLimits(token_cap=24, data_size=data_size))
    samples = make_samples(groups)
    batch = make_batch(samples)
    batch.owners = planner.own(batch.facts)
    selection = np.arange(0, len(samples), 2)
    plan = planner.plan(batch, selection)
    assert len({len(rank) for rank in plan.ranks}) == 1
    for data_rank, rank in enumerate(plan.ranks):
        for micro_batch in rank:
            assert all(batch.owners[row] == data_rank for row in micro_batch)
            prompts = {int(batch.facts.prompts[row]): row for row in micro_batch}
            tokens = sum(int(batch.facts.prompt_lengths[row]) for row in prompts.values())
            tokens += sum(
                int(batch.facts.lengths[row] - batch.facts.prompt_lengths[row])
                for row in micro_batch
            )
            assert tokens <= 24
    ran = sorted(row for rank in plan.ranks for part in rank for row in part)
    assert ran == selection.tolist()


def largest_cost(facts: RowFacts, owners: Sequence[int], *, shares: bool) -> float:
    """Of a rank that encodes each of its prompts once, or that of every row."""
    costs: dict[int, float] = {}
    seen = set()
    for row, rank in enumerate(owners):
        prompt, key = int(facts.prompt_lengths[row]), (rank, int(facts.prompts[row]))
        saved = forward_flops(SHAPE, prompt) if shares and key in seen else 0.0
        seen.add(key)
        cost = forward_flops(SHAPE, int(facts.lengths[row])) - saved
        costs[rank] = costs.get(rank, 0.0) + cost
    return max(costs.values())


@settings(max_examples=60)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(1, 60), min_size=1, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    data_size=st.integers(2, 3),
    shares=st.booleans(),
)
def test_rows_go_where_ranks_are_done_soonest(
    groups: list[tuple[int, list[int]]], data_size: int, shares: bool
) -> None:
    """Beside the best of all ways to give rows to ranks, and groups kept whole."""
    rows = [
        BareRow(prompt + response, prompt, group)
        for group, (prompt, responses) in enumerate(groups)
        for response in responses
    ][:7]
    facts = describe_bare(rows)
    limits = PlanLimits(token_cap=1000, data_size=data_size)
    own = Planner(SHAPE, limits, Packing(shares_prompts=shares)).own(facts)
    found = largest_cost(facts, own.tolist(), shares=shares)
    every_way = itertools.product(range(data_size), repeat=len(rows))
    best = min(largest_cost(facts, owners, shares=shares) for owners in every_way)
    assert found <= 1.5 * best
    whole = itertools.product(range(data_size), repeat=len(groups))
    kept = min(
        largest_cost(facts, [owners[row.group or 0] for row in rows], shares=shares)
        for owners in whole
    )
    assert found <= 1.2 * kept


def sibling_rows(prompt: int, response: int, groups: int) -> RowFacts:
    """Groups of 16, of which some are ten times as long as others, siblings nearly the same."""
    random = np.random.default_rng(0)
    scale = np.repeat(random.lognormal(0, 0.8, groups).clip(0.2, 4), 16)
    lengths = (response * scale * random.uniform(0.9, 1.1, len(scale))).astype(int)
    return describe_bare(
        [BareRow(prompt + int(n), prompt, row // 16) for row, n in enumerate(lengths)]
    )


@pytest.mark.parametrize("data_size", [4, 8, 32])
@pytest.mark.parametrize("shares", [False, True])
def test_siblings_of_similar_length_are_even_over_ranks(data_size: int, shares: bool) -> None:
    facts = sibling_rows(prompt=50, response=1000, groups=64)
    limits = PlanLimits(token_cap=16384, data_size=data_size)
    planner = Planner(SHAPE, limits, Packing(shares_prompts=shares))
    plan = planner.solve(facts, planner.own(facts), np.arange(len(facts.lengths)), limits)
    assert plan.statistics.imbalance <= 1.02


def ranks_of_groups(facts: RowFacts, owners: np.ndarray) -> list[int]:
    return [len(set(owners[facts.prompts == each].tolist())) for each in set(facts.prompts)]


@pytest.mark.parametrize("shares", [False, True])
def test_groups_stay_whole_where_ranks_are_even_over_every_part_of_the_batch(shares: bool) -> None:
    """One rank reads a group's blob then, not all of them."""
    lengths = np.random.default_rng(0).integers(900, 1100, 1024 * 4)
    rows = [BareRow(50 + int(n), 50, row // 4) for row, n in enumerate(lengths)]
    facts = describe_bare(rows)
    planner = Planner(
        SHAPE, PlanLimits(token_cap=16384, data_size=4), Packing(shares_prompts=shares)
    )
    owners = planner.own(facts)
    assert ranks_of_groups(facts, owners) == [1] * 1024
    for part in np.array_split(np.arange(len(rows)), 8):
        loads = np.bincount(owners[part], facts.lengths[part])
        assert loads.max() <= 1.03 * loads.mean()
    if not shares:
        few = describe_bare(rows[: 16 * 4])  # two groups an eighth, over four ranks
        assert max(ranks_of_groups(few, planner.own(few))) > 1


def test_siblings_stay_together_where_their_prompt_is_most_of_the_work() -> None:
    facts = sibling_rows(prompt=4000, response=20, groups=64)
    limits = PlanLimits(token_cap=16384, data_size=4)
    owners = Planner(SHAPE, limits).own(facts)
    for prompt in set(facts.prompts.tolist()):
        assert len(set(owners[facts.prompts == prompt].tolist())) == 1
    facts = sibling_rows(prompt=4000, response=20, groups=8)
    apart = Planner(SHAPE, limits, Packing(shares_prompts=False)).own(facts)
    assert len(set(apart[:16].tolist())) == 4, "which is nothing to a backend that shares none"


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@settings(max_examples=40)
@given(groups=GROUPS, context=st.sampled_from([1, 2, 4]))
def test_what_is_cut_over_context_ranks_is_under_the_cap(
    backend: str, kind: Any, groups: list[list[int]], context: int
) -> None:
    """Every row repeats its prompt and is padded to the chunks of zig-zag."""
    context += backend == "fsdp" and context == 1  # which packs otherwise without
    layout = {"cp_layout": kind} if context > 1 else {}
    config = TrainerConfig.model_construct(
        backend=backend,
        megatron=MegatronConfig(context=context, **layout),
        fsdp=FsdpConfig(context=context, **layout),
        max_tokens_per_micro_batch=14,
        oversize_policy="error",
    )
    limits = limits_of(config, trainer_pb.ParallelLayout(context=context, data=2))
    planner = Planner(SHAPE, limits, packing_of(config, context))
    batch = make_batch(make_samples(groups))
    batch.owners = planner.own(batch.facts)
    plan = planner.plan(batch, np.arange(batch.row_count))
    for micro_batch in (part for rank in plan.ranks for part in rank):
        lengths = tuple(int(batch.facts.lengths[row]) for row in micro_batch)
        kept = SequenceLayout(kind=kind if context > 1 else "none", lengths=lengths, size=context)
        assert kept.local_length <= 14
    ran = sorted(row for rank in plan.ranks for part in rank for row in part)
    assert ran == list(range(batch.row_count))


@pytest.mark.parametrize(
    ("model", "shares"),
    [
        ({"model_type": "qwen3"}, True),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, True),
        ({"model_type": "qwen3_5"}, False),  # most of its layers are recurrent
    ],
    ids=lambda value: str(value),
)
def test_the_reference_backend_packs_a_prompt_once(
    tmp_path: Path, model: dict[str, Any], shares: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = TrainerConfig.model_construct(backend="reference", model=str(tmp_path))
    assert packing_of(config, 1) == Packing(shares_prompts=shares)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"model_type": []}', "\udcff"])
def test_a_model_that_ranks_will_refuse_is_no_end_of_the_controller(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    config = TrainerConfig.model_construct(backend="reference", model=str(tmp_path))
    assert packing_of(config, 1) == Packing()


def test_an_empty_selection_is_one_dummy_on_every_rank() -> None:
    planner = Planner(SHAPE, PlanLimits(token_cap=24, data_size=3, micro_batch_multiple=2))
    plan = planner.plan(make_batch(make_samples([[1]])), np.arange(0))
    assert plan.ranks == (((), ()),) * 3


@settings(max_examples=50)
@given(groups=GROUPS, aggregation=st.sampled_from(AGGREGATIONS), data=st.data())
def test_weights_and_divisors_do_not_depend_on_the_split(
    groups: list[list[int]], aggregation: str, data: st.DataObject
) -> None:
    """The step's loss is sum w l / normalizer for any split of rows into calls."""
    samples = make_samples(groups)
    for sample in samples:  # some rows share their episode
        if (episode := data.draw(st.sampled_from((None, 0.0, 1.0)))) is not None:
            sample.columns["episode"] = episode
    batch = make_batch(samples)
    loss, everything = loss_of(aggregation), np.arange(batch.row_count)
    whole = weigh_pass(batch, everything, loss)
    cut = data.draw(st.integers(0, batch.row_count))
    order = np.array(data.draw(st.permutations(range(batch.row_count))), dtype=np.int64)
    parts = [np.sort(order[:cut]), np.sort(order[cut:])]
    found = [weigh_pass(batch, part, loss) for part in parts]
    assert sum(part.normalizer for part in found) == pytest.approx(whole.normalizer)
    for part, weighed in zip(parts, found, strict=True):
        np.testing.assert_array_equal(weighed.weights, whole.weights[part])


@settings(max_examples=50)
@given(
    cuts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=5),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_an_episode_weighs_what_it_would_as_one_row(
    cuts: list[list[int]], aggregation: str
) -> None:
    """A group of episodes, each stored in rows: its losses are those of episodes in one row."""
    loss, rng = loss_of(aggregation), np.random.default_rng(sum(map(sum, cuts)))
    samples = make_samples([[length for parts in cuts for length in parts]])
    numbers = [number for number, parts in enumerate(cuts) for _ in parts]
    for sample, number in zip(samples, numbers, strict=True):
        sample.columns["episode"] = float(number)
    batch = make_batch(samples)
    found = weigh_pass(batch, np.arange(batch.row_count), loss)
    sums = rng.normal(size=batch.row_count)  # of the token losses of each row
    counts = np.bincount(numbers, batch.mask_counts).astype(int)
    whole = weigh_samples(loss, counts.tolist(), ["g"] * len(cuts))
    expected = np.dot(whole.weights, np.bincount(numbers, sums * (batch.mask_counts > 0)))
    if whole.normalizer:
        got = np.dot(found.weights, sums * (batch.mask_counts > 0)) / found.normalizer
        assert got == pytest.approx(expected / whole.normalizer)


def test_divisors_by_hand() -> None:
    # Trained tokens (every other one): group 0 has 2 and 1, group 1 has 3, group 2 none.
    batch = make_batch(make_samples([[4, 2], [5], [0]]))
    assert batch.mask_counts.tolist() == [2, 1, 3, 0]
    everything = np.arange(4)
    expected = {
        "token_mean": ([1, 1, 1, 1], 6.0),
        "sample_mean": ([1 / 2, 1, 1 / 3, 0], 3.0),
        "group_mean": ([1 / 3, 1 / 3, 1 / 3, 0], 2.0),
        "constant": ([1, 1, 1, 1], 32.0),
    }
    for aggregation, (weights, normalizer) in expected.items():
        found = weigh_pass(batch, everything, loss_of(aggregation))
        assert found.weights.tolist() == pytest.approx(weights), aggregation
        assert found.normalizer == pytest.approx(normalizer), aggregation


def test_the_first_row_that_lacks_a_column() -> None:
    batch = make_batch(make_samples([[3, 3], [3]]))
    assert find_missing(batch, np.arange(3), ["reward", "loss_mask"]) is None
    batch.mark("advantages", [0, 2])
    assert find_missing(batch, np.array([0, 2]), ["advantages"]) is None
    found = find_missing(batch, np.arange(3), ["advantages", "values", "reward"])
    assert found == (0, ["values"])
    assert find_missing(batch, np.array([1, 2]), ["advantages"]) == (1, ["advantages"])


@pytest.mark.parametrize(
    ("settings_", "skips"),
    [
        ({"name": "ppo_clip", "clip_low": 0.2}, True),
        ({"name": "reinforce"}, True),
        ({"name": "ppo_clip", "clip_low": 0.2, "kl_coefficient": 0.1}, False),
        ({"name": "ppo_clip", "clip_low": 0.2, "entropy_coefficient": 0.1}, False),
        ({"name": "dro", "dro_beta": 0.1}, False),
        ({"name": "sft"}, False),
    ],
)
def test_rows_of_zero_advantage_are_left_out_only_where_they_do_nothing(
    settings_: dict[str, object], skips: bool
) -> None:
    assert loss_traits(LossSpec(**settings_)).silent is skips  # type: ignore[arg-type]


def test_a_plan_is_at_hand_for_the_same_rows_and_limits_alone() -> None:
    planner = Planner(SHAPE, PlanLimits(token_cap=24))
    batch = make_batch(make_samples([[2, 3, 4], [5, 1]]))
    batch.owners = planner.own(batch.facts)
    rows = np.arange(batch.row_count)
    assert planner.find(batch, rows) is None
    plan = planner.plan(batch, rows)
    assert planner.find(batch, rows) is plan
    assert planner.find(batch, rows[1:]) is None
    assert planner.find(batch, rows[:0]) is not None  # nothing is to be made
    planner.lower(12)
    assert planner.find(batch, rows) is None


def test_large_passes_are_cut_into_commands_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "ROWS_PER_COMMAND", 10)
    planner = Planner(SHAPE, PlanLimits(token_cap=16, data_size=2))
    batch = make_batch(make_samples([[2, 3, 4], [5, 1], [9], [1, 1, 1], [3], [2, 2]] * 4))
    batch.owners = planner.own(batch.facts)
    plan = planner.plan(batch, np.arange(batch.row_count))
    weights = {row: float(row) for row in range(batch.row_count)}
    command = pb.FollowResponse(forward_backward=pb.GradientsCommand(normalizer=6.0))
    builds = passes.split_pass(plan, command, weights)
    assert len(builds) > 1
    shares = [build(0).forward_backward.normalizer for build in builds]
    assert sum(shares) == pytest.approx(6.0) and min(shares) > 0
    joined: list[list[tuple[int, ...]]] = [[], []]
    for build in builds:
        parts = [build(rank).forward_backward.micro_batches for rank in range(2)]
        assert len(parts[0]) == len(parts[1]), "ranks run the same count"
        for rank in range(2):
            assert sum(len(part.rows) for part in parts[rank]) <= 10
            for part in parts[rank]:
                assert list(part.loss_weights) == [weights[row] for row in part.rows]
            joined[rank] += [tuple(part.rows) for part in parts[rank]]
    assert tuple(map(tuple, joined)) == plan.ranks


def test_the_largest_command_is_below_a_mebibyte() -> None:
    rows = list(range(2**31 - passes.ROWS_PER_COMMAND, 2**31))
    part = pb.MicroBatchRows(rows=rows, loss_weights=[1.0] * len(rows))
    assert pb.GradientsCommand(micro_batches=[part]).ByteSize() < 1 << 20


SEEING = replace(
    SHAPE,
    tower=TowerShape(
        hidden_size=16,
        layer_count=2,
        feed_forward_size=32,
        feed_forward_matrices=2,
        patch_values=12,
        merged=4,
        output_size=16,
        full_layers=2,
    ),
)


def loads_of(plan: MicroBatchPlan, facts: RowFacts, *, shares: bool) -> list[float]:
    """What each rank computes, an image of a prompt once a micro-batch."""
    assert SEEING.tower is not None
    loads = []
    for rank in plan.ranks:
        total = 0.0
        for micro_batch in rank:
            seen = set[int]()
            for row in micro_batch:
                prompt, behind = facts.patches.get(row, ((), ()))
                prompts = int(facts.prompts[row])
                total += forward_flops(SEEING, int(facts.lengths[row]))
                total += sum(map(SEEING.tower.flops, behind))
                if prompts not in seen:
                    total += sum(map(SEEING.tower.flops, prompt))
                elif shares:
                    total -= forward_flops(SEEING, int(facts.prompt_lengths[row]))
                seen.add(prompts)
        loads.append(total)
    return loads


@pytest.mark.parametrize("shares", [True, False])
def test_images_move_rows_to_other_ranks(shares: bool) -> None:
    """Rows of one length, of which a few show large images: by tokens alone any split is even."""
    rows = [
        BareRow(20, 10, group, patches=(400,) if group % 4 == 0 else (), prompt_patches=(4,))
        for group in range(16)
    ]
    facts = describe_bare(rows)
    limits = PlanLimits(token_cap=60, data_size=2)
    chosen = np.arange(len(rows))

    def plan(shape: TransformerShape) -> list[float]:
        planner = Planner(shape, limits, Packing(shares_prompts=shares))
        owners = planner.own(facts)
        return loads_of(planner.solve(facts, owners, chosen, limits), facts, shares=shares)

    blind, seeing = plan(SHAPE), plan(SEEING)
    assert max(blind) > 1.5 * min(blind)
    assert max(seeing) < 1.1 * min(seeing)


@pytest.mark.parametrize("shares", [True, False])
def test_statistics_count_an_image_of_a_prompt_once_for_its_siblings(shares: bool) -> None:
    rows = [BareRow(20, 10, 0, prompt_patches=(400,)) for _ in range(4)]
    rows += [BareRow(20, 10, 1, prompt_patches=(400,), patches=(64,)) for _ in range(2)]
    facts, limits = describe_bare(rows), PlanLimits(token_cap=200, data_size=2)
    planner = Planner(SEEING, limits, Packing(shares_prompts=shares))
    plan = planner.solve(facts, np.array([0, 0, 0, 0, 1, 1]), np.arange(6), limits)
    loads = loads_of(plan, facts, shares=shares)
    assert plan.statistics.imbalance == pytest.approx(max(loads) / np.mean(loads))


@pytest.mark.parametrize("name", ["patches", "prompt_patches"])
@pytest.mark.parametrize("value", [0, -1, -(2**31)])
def test_an_image_of_no_patches_is_refused(name: str, value: int) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        describe_bare([BareRow(2, 1), BareRow(2, 1, **{name: (4, value)})])
    assert caught.value.metadata["field"] == f"bare_rows[1].{name}"
    planner = Planner(SEEING, PlanLimits(token_cap=8, data_size=2))
    huge = describe_bare([BareRow(2, 1, **{name: (2**31 - 1,) * 9})] * 4)
    assert sorted(planner.own(huge).tolist()) == [0, 0, 1, 1]
