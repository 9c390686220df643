"""What is remembered of groups without leases, and for how long."""

from __future__ import annotations

import numpy as np

from sluice.balance.routing.groups import GroupTable

BATCH = 512


def play(table: GroupTable, names: list[str], tokens: int, now: float) -> None:
    """One sample of each group, from its lease to its end."""
    slots, _ = table.slots(names, now)
    table.hold(slots)
    table.start(slots, now)
    table.finish(slots, np.full(len(slots), tokens), now)


def test_lengths_are_known_however_many_groups_have_come_and_gone() -> None:
    table = GroupTable(idle_seconds=1.0)
    for number in range(40):
        now = 10.0 * number
        play(table, [f"old{number}/{n}" for n in range(BATCH)], 5, now)
        assert table.expire(now + 2.0) == BATCH
    play(table, ["long"], 900, 500.0)
    play(table, [f"new/{n}" for n in range(BATCH)], 5, 500.0)
    slots, is_new = table.slots(["long"], 500.1)
    assert not is_new
    assert table.expected(slots).tolist() == [900.0]


def test_the_latest_of_very_many_groups_are_remembered() -> None:
    table = GroupTable(idle_seconds=1.0)
    for number in range(40):
        play(table, [f"{number}/{n}" for n in range(BATCH)], number, 0.0)
    assert len(table) == 16_384
    kept = [not table.slots([f"{number}/0"], 0.0)[1] for number in (0, 39)]
    assert kept == [False, True]
