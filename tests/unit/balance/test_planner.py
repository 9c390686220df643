"""What every plan keeps, whatever the rows: property tests, and the cases that broke before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.balance.planner import (
    GroupTooLargeError,
    MicroBatchPlan,
    OversizePolicy,
    OversizeRowError,
    PlanLimits,
    PlanRows,
    plan_micro_batches,
)

CAP = 100


def contents(plan: MicroBatchPlan) -> list[tuple[int, ...]]:
    return [content for rank in plan.ranks for content in rank]


def placed(plan: MicroBatchPlan) -> list[int]:
    return sorted(row for content in contents(plan) for row in content)


def first_fit_count(lengths: Iterable[int], cap: int) -> int:
    rooms: list[int] = []
    for length in lengths:
        for index, room in enumerate(rooms):
            if room >= length:
                rooms[index] -= length
                break
        else:
            rooms.append(cap - length)
    return len(rooms)


def padded(count: int, limits: PlanLimits) -> int:
    step = limits.data_size * limits.micro_batch_multiple
    return max(1, -(-count // step)) * step


def shared_tokens(rows: PlanRows, content: Sequence[int]) -> int:
    assert rows.groups is not None and rows.prompt_lengths is not None
    prompts = {rows.groups[row]: rows.prompt_lengths[row] for row in content}
    return sum(prompts.values()) + sum(
        rows.lengths[row] - rows.prompt_lengths[row] for row in content
    )


limits_strategy = st.builds(
    PlanLimits,
    token_cap=st.just(CAP // 2),
    context_size=st.just(2),
    data_size=st.integers(1, 5),
    micro_batch_multiple=st.integers(1, 4),
)
lengths_strategy = st.lists(st.integers(1, CAP), max_size=60)


@st.composite
def any_rows(draw: st.DrawFn, data_size: int) -> PlanRows:
    lengths = draw(lengths_strategy)
    column = lambda values: st.lists(values, min_size=len(lengths), max_size=len(lengths))  # noqa: E731
    return PlanRows(
        lengths=lengths,
        costs=draw(st.none() | column(st.floats(0.1, 1e6))),
        owners=draw(st.none() | column(st.integers(0, data_size - 1))),
    )


@st.composite
def grouped_rows(draw: st.DrawFn, data_size: int) -> PlanRows:
    lengths: list[int] = []
    prompts: list[int] = []
    groups: list[int] = []
    owners: list[int] = []
    for group in range(draw(st.integers(0, 8))):
        prompt = draw(st.integers(1, CAP - 1))
        for response in draw(st.lists(st.integers(1, CAP - prompt), min_size=1, max_size=8)):
            lengths.append(prompt + response)
            prompts.append(prompt)
            groups.append(group)
            owners.append(draw(st.integers(0, data_size - 1)))
    return PlanRows(
        lengths=lengths,
        groups=groups,
        prompt_lengths=prompts,
        owners=draw(st.sampled_from([None, owners])),
    )


def check_shape(plan: MicroBatchPlan, limits: PlanLimits) -> None:
    counts = {len(rank) for rank in plan.ranks}
    assert len(plan.ranks) == limits.data_size
    assert counts == {plan.statistics.micro_batch_count}
    assert plan.statistics.micro_batch_count % limits.micro_batch_multiple == 0
    assert plan.statistics.micro_batch_count > 0
    assert plan.statistics.dummy_count == contents(plan).count(())
    for rank in plan.ranks:
        if () in rank:
            assert sum(map(len, rank)) < len(rank), "a dummy beside a micro-batch of two rows"


@settings(max_examples=50)
@given(st.data(), limits_strategy)
def test_every_row_once_under_the_cap_on_equal_ranks(data: st.DataObject, limits: PlanLimits):
    rows = data.draw(any_rows(limits.data_size))
    plan = plan_micro_batches(rows, limits)
    check_shape(plan, limits)
    assert placed(plan) == list(range(len(rows.lengths)))
    assert plan.leftover == ()
    assert all(sum(rows.lengths[row] for row in content) <= CAP for content in contents(plan))
    if rows.owners is not None:
        owned = {row: rank for rank, parts in enumerate(plan.ranks) for c in parts for row in c}
        assert [owned[row] for row in range(len(rows.lengths))] == list(rows.owners)
    assert plan == plan_micro_batches(rows, limits)


@settings(max_examples=50)
@given(lengths_strategy, limits_strategy)
def test_never_more_micro_batches_than_the_better_first_fit(lengths: list[int], limits: PlanLimits):
    plan = plan_micro_batches(PlanRows(lengths=lengths), limits)
    fewest = min(first_fit_count(lengths, CAP), first_fit_count(sorted(lengths, reverse=True), CAP))
    assert len(contents(plan)) <= padded(fewest, limits)


@settings(max_examples=50)
@given(st.data(), limits_strategy)
def test_a_shared_prompt_counts_once_in_a_micro_batch(data: st.DataObject, limits: PlanLimits):
    rows = data.draw(grouped_rows(limits.data_size))
    plan = plan_micro_batches(rows, limits)
    check_shape(plan, limits)
    assert placed(plan) == list(range(len(rows.lengths)))
    tokens = [shared_tokens(rows, content) for content in contents(plan)]
    assert max(tokens) <= CAP
    assert plan.statistics.token_count == sum(tokens)


def test_siblings_share_a_micro_batch_that_they_could_not_fill_alone():
    rows = PlanRows(lengths=[90] * 4, groups=[7] * 4, prompt_lengths=[80] * 4)
    plan = plan_micro_batches(rows, PlanLimits(token_cap=120))
    assert plan.ranks == (((0, 1, 2, 3),),)
    assert plan.statistics.token_count == 120
    apart = PlanRows(lengths=[90] * 4)
    assert plan_micro_batches(apart, PlanLimits(token_cap=120)).statistics.micro_batch_count == 4


def test_a_group_over_the_cap_repeats_its_prompt_as_seldom_as_possible():
    rows = PlanRows(lengths=[90] * 8, groups=[7] * 8, prompt_lengths=[80] * 8)
    plan = plan_micro_batches(rows, PlanLimits(token_cap=120))
    assert plan.ranks == (((0, 1, 2, 3), (4, 5, 6, 7)),)


@pytest.mark.parametrize(("data_size", "count", "repeats"), [(1, 5, True), (3, 6, False)])
def test_a_prompt_is_repeated_only_to_save_a_micro_batch(data_size: int, count: int, repeats: bool):
    """Groups (prompt, siblings) of responses of 10; three ranks run six micro-batches anyway."""
    groups = [(20, 4), (10, 5), (20, 4), (30, 3), (20, 5), (30, 3)]
    prompts = [prompt for prompt, siblings in groups for _ in range(siblings)]
    rows = PlanRows(
        lengths=[prompt + 10 for prompt in prompts],
        groups=[group for group, (_, siblings) in enumerate(groups) for _ in range(siblings)],
        prompt_lengths=prompts,
    )
    plan = plan_micro_batches(rows, PlanLimits(token_cap=100, data_size=data_size))
    assert len(contents(plan)) == count
    once = sum(prompt + 10 * siblings for prompt, siblings in groups)
    assert (plan.statistics.token_count > once) == repeats


def test_the_cost_of_a_shared_prompt_is_paid_once():
    rows = PlanRows(
        lengths=[10, 10, 10],
        groups=[0, 0, 1],
        prompt_lengths=[5, 5, 5],
        costs=[100.0, 100.0, 108.0],
        prompt_costs=[90.0, 90.0, 90.0],
    )
    plan = plan_micro_batches(rows, PlanLimits(token_cap=20, data_size=2))
    assert sorted(plan.ranks) == [((0, 1),), ((2,),)]
    assert plan.statistics.imbalance == pytest.approx(110 / 109)


@settings(max_examples=50)
@given(st.data(), limits_strategy, st.booleans())
def test_carried_leftovers_are_all_consumed(data: st.DataObject, limits: PlanLimits, grouped: bool):
    kind = grouped_rows if grouped else any_rows
    rows = data.draw(kind(limits.data_size))
    most = limits.micro_batch_multiple * data.draw(st.integers(1, 2)) + data.draw(st.integers(0, 1))
    limits = PlanLimits(
        token_cap=CAP,
        data_size=limits.data_size,
        micro_batch_multiple=limits.micro_batch_multiple,
        max_micro_batches=most,
    )
    waiting = list(range(len(rows.lengths)))
    done: list[int] = []
    while waiting:
        step = PlanRows(
            lengths=[rows.lengths[row] for row in waiting],
            owners=rows.owners and [rows.owners[row] for row in waiting],
            groups=rows.groups and [rows.groups[row] for row in waiting],
            prompt_lengths=rows.prompt_lengths and [rows.prompt_lengths[row] for row in waiting],
        )
        try:
            plan = plan_micro_batches(step, limits)
        except GroupTooLargeError as error:
            assert grouped and error.needed > error.allowed
            return
        check_shape(plan, limits)
        assert plan.statistics.micro_batch_count <= most
        assert sorted(placed(plan) + list(plan.leftover)) == list(range(len(waiting)))
        if step.groups is not None:
            kept = {step.groups[row] for row in placed(plan)}
            assert kept.isdisjoint(step.groups[row] for row in plan.leftover)
        assert placed(plan), "a step without progress"
        done += [waiting[row] for row in placed(plan)]
        waiting = [waiting[row] for row in plan.leftover]
    assert sorted(done) == list(range(len(rows.lengths)))


def test_leftovers_are_the_last_in_order():
    plan = plan_micro_batches(
        PlanRows(lengths=[60, 60, 60, 30]), PlanLimits(token_cap=100, max_micro_batches=2)
    )
    assert placed(plan) == [0, 1]
    assert plan.leftover == (2, 3)


def test_no_leftovers_when_everything_fits():
    limits = PlanLimits(token_cap=100, max_micro_batches=2)
    assert plan_micro_batches(PlanRows(lengths=[60, 60, 30]), limits).leftover == ()


def test_the_most_micro_batches_count_per_rank():
    limits = PlanLimits(token_cap=100, data_size=3, max_micro_batches=1)
    assert placed(plan_micro_batches(PlanRows(lengths=[60] * 4), limits)) == [0, 1, 2]


def test_a_group_that_never_fits_is_named():
    rows = PlanRows(lengths=[90] * 3, groups=[4] * 3, prompt_lengths=[1] * 3)
    with pytest.raises(GroupTooLargeError, match="group of row 0 needs 3") as caught:
        plan_micro_batches(rows, PlanLimits(token_cap=100, max_micro_batches=2))
    assert (caught.value.row, caught.value.needed, caught.value.allowed) == (0, 3, 2)


class TestOversize:
    rows = PlanRows(lengths=[10, 250, 20], prompt_lengths=[5, 50, 5])

    def test_error_names_the_row(self):
        with pytest.raises(OversizeRowError) as caught:
            plan_micro_batches(self.rows, PlanLimits(token_cap=50, context_size=2))
        assert (caught.value.row, caught.value.length, caught.value.cap) == (1, 250, 100)

    def test_the_cap_is_per_context_parallel_rank(self):
        plan = plan_micro_batches(self.rows, PlanLimits(token_cap=64, context_size=4))
        assert plan.truncated == {}
        assert placed(plan) == [0, 1, 2]

    def test_truncate_keeps_the_cap_and_says_so(self):
        limits = PlanLimits(token_cap=100, oversize=OversizePolicy.TRUNCATE)
        plan = plan_micro_batches(self.rows, limits)
        assert plan.truncated == {1: 100}
        assert sorted(contents(plan)) == [(0, 2), (1,)]
        assert plan.statistics.token_count == 130

    def test_truncate_refuses_a_prompt_without_room_for_a_response(self):
        limits = PlanLimits(token_cap=50, oversize=OversizePolicy.TRUNCATE)
        with pytest.raises(OversizeRowError, match="row 1 has 250 tokens, a micro-batch holds 50"):
            plan_micro_batches(self.rows, limits)

    def test_a_truncated_row_costs_less(self):
        limits = PlanLimits(token_cap=100, data_size=2, oversize=OversizePolicy.TRUNCATE)
        plan = plan_micro_batches(PlanRows(lengths=[200, 100], costs=[8.0, 4.0]), limits)
        assert plan.statistics.imbalance == 1.0

    def test_alone_shares_with_nobody_even_when_it_is_cheap(self):
        limits = PlanLimits(token_cap=100, oversize=OversizePolicy.ALONE)
        rows = PlanRows(lengths=[150, 40, 40, 40], costs=[1.0, 40.0, 40.0, 40.0])
        assert (0,) in contents(plan_micro_batches(rows, limits))

    @settings(max_examples=30)
    @given(st.lists(st.integers(1, 3 * CAP), max_size=40), limits_strategy)
    def test_alone_shares_with_nobody(self, lengths: list[int], limits: PlanLimits):
        limits = PlanLimits(
            token_cap=CAP,
            data_size=limits.data_size,
            micro_batch_multiple=limits.micro_batch_multiple,
            oversize=OversizePolicy.ALONE,
        )
        plan = plan_micro_batches(PlanRows(lengths=lengths), limits)
        check_shape(plan, limits)
        assert placed(plan) == list(range(len(lengths)))
        for content in contents(plan):
            assert len(content) == 1 or sum(lengths[row] for row in content) <= CAP


class TestWhereThePredecessorFailed:
    """Cases that raised AssertionError, broke the cap or lost rows in slime's planners."""

    def test_fewer_rows_than_the_pipeline_group(self):
        plan = plan_micro_batches(
            PlanRows(lengths=[50, 60, 70]), PlanLimits(token_cap=100, micro_batch_multiple=4)
        )
        assert plan.ranks == (((2,), (1,), (0,), ()),)

    def test_fewer_rows_than_ranks_times_group(self):
        limits = PlanLimits(token_cap=100, data_size=8, micro_batch_multiple=4)
        plan = plan_micro_batches(PlanRows(lengths=[40] * 16), limits)
        assert plan.statistics.micro_batch_count == 4
        assert plan.statistics.dummy_count == 16
        assert plan.statistics.imbalance == 1.0

    def test_a_batch_that_does_not_fill_a_step_is_kept(self):
        plan = plan_micro_batches(
            PlanRows(lengths=[10] * 37), PlanLimits(token_cap=100, data_size=16)
        )
        assert placed(plan) == list(range(37))

    def test_balancing_by_cost_keeps_the_cap(self):
        lengths = [90, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
        costs = [1.0] + [50.0] * 10
        plan = plan_micro_batches(PlanRows(lengths=lengths, costs=costs), PlanLimits(token_cap=100))
        assert plan.statistics.micro_batch_count == 2
        assert max(sum(lengths[row] for row in content) for content in contents(plan)) <= 100

    def test_the_count_is_rounded_up_never_down(self):
        limits = PlanLimits(token_cap=100, micro_batch_multiple=4)
        plan = plan_micro_batches(PlanRows(lengths=[60] * 5), limits)
        assert plan.statistics.micro_batch_count == 8

    def test_one_crowded_rank_sets_the_count_and_dummies_fill_the_others(self):
        rows = PlanRows(lengths=[80, 80, 80, 80], owners=[0, 0, 0, 1])
        plan = plan_micro_batches(rows, PlanLimits(token_cap=100, data_size=3))
        assert plan.ranks == (((0,), (1,), (2,)), ((3,), (), ()), ((), (), ()))


def test_balancing_ranks_never_makes_a_dummy_where_there_is_work():
    rows = PlanRows(
        lengths=[15, 27, 44, 59, 60, 9, 30], costs=[10.0, 1.0, 30.0, 5.0, 10.0, 10.0, 2.0]
    )
    plan = plan_micro_batches(rows, PlanLimits(token_cap=100, data_size=2, micro_batch_multiple=3))
    assert plan.statistics.dummy_count == 0


def test_no_rows_at_all_still_give_every_rank_a_dummy():
    plan = plan_micro_batches(
        PlanRows(lengths=[]), PlanLimits(token_cap=8, data_size=2, micro_batch_multiple=2)
    )
    assert plan.ranks == (((), ()), ((), ()))
    assert plan.statistics.imbalance == 1.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (PlanRows(lengths=[1, 2], costs=[1.0]), "costs has 1 rows, lengths has 2"),
        (PlanRows(lengths=[0]), "lengths must be positive"),
        (PlanRows(lengths=[1], costs=[0.0]), "costs must be positive"),
        (PlanRows(lengths=[1], costs=[float("nan")]), "costs must be positive"),
        (PlanRows(lengths=[1], owners=[2]), "owners must be below data_size 2"),
        (PlanRows(lengths=[1], groups=[0]), "groups need prompt_lengths"),
        (PlanRows(lengths=[1], groups=[0], prompt_lengths=[2]), "row 0 has a prompt of 2"),
        (
            PlanRows(lengths=[5, 5], groups=[3, 3], prompt_lengths=[2, 1]),
            "row 1 has another prompt length than its group 3",
        ),
    ],
)
def test_malformed_columns_are_refused(rows: PlanRows, message: str):
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(rows, PlanLimits(token_cap=8, data_size=2))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"token_cap": 0}, "token_cap must be positive"),
        ({"token_cap": 1, "data_size": 0}, "data_size must be positive"),
        ({"token_cap": 1, "micro_batch_multiple": 4, "max_micro_batches": 3}, "is below"),
    ],
)
def test_impossible_limits_are_refused(limits: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        PlanLimits(**limits)
