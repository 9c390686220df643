"""pass@k by enumeration, means of tasks."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algo.evaluation import TaskScores, pass_at_k, summarise


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n: int, data: st.DataObject) -> None:
    passes, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    samples = [index < passes for index in range(n)]
    draws = [any(draw) for draw in itertools.combinations(samples, k)]
    assert pass_at_k(n, passes, k) == pytest.approx(statistics.fmean(draws))


@pytest.mark.parametrize(("n", "passes", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_what_cannot_be_is_refused(n: int, passes: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, passes, k)


def test_the_plug_in_estimate_is_biased_and_is_not_used() -> None:
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pytest.approx(0.4375) == 1 - (1 - 1 / 4) ** 2


def test_each_task_counts_once_however_many_episodes_it_has() -> None:
    many = TaskScores(rewards=[0.0] * 6, passes=[False] * 6)
    few = TaskScores(rewards=[1.0, 0.5], passes=[True, False])
    summary = summarise([many, few], [1, 2])
    assert summary.reward_mean == pytest.approx(0.375)
    assert summary.reward_std == pytest.approx(statistics.pstdev([0.0] * 6 + [1.0, 0.5]))
    assert summary.reward_error == pytest.approx(statistics.stdev([0.0, 0.75]) / math.sqrt(2))
    assert summary.pass_at == {1: 0.25, 2: 0.5}


def test_no_task_is_no_number() -> None:
    summary = summarise([], [1])
    assert summary.task_count == 0
    assert math.isnan(summary.reward_mean) and math.isnan(summary.pass_at[1])
    one = summarise([TaskScores(rewards=[1.0], passes=[True])], [1])
    assert math.isnan(one.reward_error) and one.pass_at == {1: 1.0}
