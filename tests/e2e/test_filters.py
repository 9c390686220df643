"""A real run that asks for more groups than it wants, and filters them."""

from sluice.loop.filters import GeneratedGroup
from tests.e2e.conftest import Stack
from tests.patience import PATIENCE


def of_even_number(group: GeneratedGroup) -> bool:
    return int(group.group_id.removeprefix("g")) % 2 == 0


def none(group: GeneratedGroup) -> bool:
    return False


def test_groups_are_filtered_and_surplus_is_trained_on_later(stack: Stack) -> None:
    training = stack.train(
        "filtered",
        steps=4,
        over_sampling=1.5,
        filters=[{"name": "tests.e2e.test_filters:of_even_number"}],
    )
    training.finish()
    consumed = training.groups("consumed")
    assert len(consumed) == 16
    assert all(group.position % 2 == 0 for group in consumed)
    assert all(group.consumed_step - 1 == group.oldest_step for group in consumed)
    dropped = {group.position for group in training.groups("dropped")}
    assert dropped and all(position % 2 for position in dropped)
    rows = training.rows()
    assert sum(row["filtered_groups"] for row in rows) >= 12
    left = {g.position for state in ("issued", "generated") for g in training.groups(state)}
    seen = {group.position for group in consumed} | dropped | left
    assert seen == set(range(max(seen) + 1)), "no prompt is lost"


def test_a_run_whose_filters_keep_nothing_ends_with_how_many_they_took(stack: Stack) -> None:
    training = stack.train(
        "fruitless",
        max_filtered_in_a_row=6,
        filters=[{"name": "tests.e2e.test_filters:none"}],
    )
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode != 0
    assert "6 groups in a row were filtered" in output
    assert "max_filtered_in_a_row" in output
    assert len(training.groups("dropped")) >= 6 and not training.groups("consumed")
