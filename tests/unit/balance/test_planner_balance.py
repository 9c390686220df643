"""How good plans are: packing near the bound, costs even over ranks and over any range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.balance.planner import PlanLimits, PlanRows, assign_owners, plan_micro_batches
from sluice.balance.planner_packing import Arrangement, fill_bins, fill_empty_bins, min_bin_count


@settings(max_examples=50)
@given(
    st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=80),
    st.integers(1, 9),
    st.data(),
)
def test_any_range_of_groups_is_balanced_over_owners(
    costs: list[float], data_size: int, data: st.DataObject
):
    owners = assign_owners(costs, data_size)
    start = data.draw(st.integers(0, len(costs) - 1))
    stop = data.draw(st.integers(start + 1, len(costs)))
    chosen = owners[start:stop]
    loads = np.bincount(chosen, weights=costs[start:stop], minlength=data_size)
    assert loads.max() - loads.min() <= 4 * max(costs) + 1e-6


def test_owners_even_out_what_came_before():
    assert assign_owners([9.0, 1.0, 9.0, 1.0], 2).tolist() == [0, 1, 1, 0]
    assert assign_owners([5.0], 3).tolist() == [0]
    assert assign_owners([], 3).tolist() == []
    with pytest.raises(ValueError, match="data_size"):
        assign_owners([1.0], 0)


def fewest_bins(sizes: tuple[int, ...], cap: int) -> int:
    """The optimum by trying every bin for every item."""
    best = len(sizes)

    def place(index: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(sizes):
            best = len(rooms)
            return
        for position, room in enumerate(rooms):
            if room >= sizes[index]:
                rooms[position] -= sizes[index]
                place(index + 1, rooms)
                rooms[position] += sizes[index]
        place(index + 1, [*rooms, cap - sizes[index]])

    place(0, [])
    return best


@settings(max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_the_lower_bound_is_one(sizes: list[int]):
    optimum = fewest_bins(tuple(sorted(sizes, reverse=True)), 20)
    assert -(-sum(sizes) // 20) <= min_bin_count(sizes, 20) <= optimum
    plan = plan_micro_batches(PlanRows(lengths=sizes), PlanLimits(token_cap=20))
    assert optimum <= plan.statistics.micro_batch_count <= optimum + 1


def test_the_lower_bound_sees_more_than_the_sum():
    assert min_bin_count([11, 11, 11], 20) == 3
    assert min_bin_count([7, 7, 7, 7], 20) == 2
    assert min_bin_count([14, 14, 7, 7], 20) == 3
    assert min_bin_count([30, 5], 20) == 2
    assert min_bin_count([], 20) == 0


@settings(max_examples=50)
@given(st.lists(st.integers(1, 70), max_size=40))
def test_filled_bins_hold_every_item_under_the_cap(sizes: list[int]):
    bins = fill_bins(sizes, 50)
    assert bins is not None
    assert sorted(item for content in bins for item in content) == list(range(len(sizes)))
    assert all(len(c) == 1 or sum(sizes[item] for item in c) <= 50 for c in bins)


@pytest.mark.parametrize(
    ("lengths", "fewest"),
    [
        pytest.param([21, 33, 40, 48, 21, 41, 31, 53], 3, id="only first-fit"),
        pytest.param([38, 39, 23, 38, 40, 24, 48, 35], 3, id="only first-fit-decreasing"),
        pytest.param([33, 47, 37, 11, 54, 15], 2, id="only filling by subset sums"),
    ],
)
def test_the_best_of_three_packings_is_taken(lengths: list[int], fewest: int):
    """Each case needs one more bin by the other two methods."""
    plan = plan_micro_batches(PlanRows(lengths=lengths), PlanLimits(token_cap=100))
    assert plan.statistics.micro_batch_count == fewest


def test_every_bin_gets_a_share_of_a_packing_that_leaves_some_empty():
    arrangement = Arrangement(
        tokens=np.array([10, 20, 30, 40]),
        costs=np.array([4.0, 3.0, 2.0, 1.0]),
        bin_of=np.array([0, 0, 0, 1]),
        rooms=np.array([40, 60, 100, 100]),
        loads=np.array([9.0, 1.0, 0.0, 0.0]),
        sizes=np.array([3, 1, 0, 0]),
    )
    fill_empty_bins(arrangement)
    assert arrangement.sizes.tolist() == [1, 1, 1, 1]
    assert (arrangement.rooms == 100 - arrangement.tokens[np.argsort(arrangement.bin_of)]).all()


def quadratic(lengths: np.ndarray) -> list[float]:
    return (lengths * (1 + lengths / 4000)).tolist()


@pytest.mark.parametrize("data_size", [2, 8])
def test_ranks_are_even_on_heavy_tailed_lengths(data_size: int):
    lengths = np.random.default_rng(0).lognormal(7, 1, 512).clip(16, 8192).astype(int)
    plan = plan_micro_batches(
        PlanRows(lengths=lengths.tolist(), costs=quadratic(lengths)),
        PlanLimits(token_cap=16384, data_size=data_size),
    )
    assert plan.statistics.imbalance < 1.001
    assert plan.statistics.lockstep_imbalance < 1.05
    assert plan.statistics.fill > 0.85


def test_swaps_even_out_what_moves_cannot():
    """Moves alone leave 1.0019 on these few long rows."""
    lengths = np.random.default_rng(3).integers(100, 8192, 48)
    plan = plan_micro_batches(
        PlanRows(lengths=lengths.tolist(), costs=quadratic(lengths)),
        PlanLimits(token_cap=8192, data_size=4),
    )
    assert plan.statistics.imbalance < 1.001


def test_owned_groups_stay_near_balance():
    rng = np.random.default_rng(1)
    prompts = np.repeat(rng.integers(50, 500, 64), 8)
    lengths = prompts + rng.lognormal(6.5, 0.8, 512).clip(16, 6000).astype(int)
    groups = np.repeat(np.arange(64), 8)
    costs = quadratic(lengths)
    owners = assign_owners(np.bincount(groups, weights=costs), 4)
    plan = plan_micro_batches(
        PlanRows(
            lengths=lengths.tolist(),
            costs=costs,
            owners=[owners[group] for group in groups],
            groups=groups.tolist(),
            prompt_lengths=prompts.tolist(),
        ),
        PlanLimits(token_cap=16384, data_size=4),
    )
    assert plan.statistics.imbalance < 1.05
    assert plan.statistics.token_count < 1.05 * (lengths - prompts * 7 / 8).sum()


def test_a_rank_runs_its_costliest_micro_batches_first():
    lengths = np.random.default_rng(2).integers(10, 100, 60)
    plan = plan_micro_batches(
        PlanRows(lengths=lengths.tolist()), PlanLimits(token_cap=128, data_size=3)
    )
    for rank in plan.ranks:
        costs = [sum(lengths[row] for row in content) for content in rank]
        assert costs == sorted(costs, reverse=True)
