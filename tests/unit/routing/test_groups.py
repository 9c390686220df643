"""What is learnt of groups, what is remembered of those without leases, and for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.balance.routing.groups import NO_GROUP, GroupTable, SessionTable

BATCH = 512
PACE = 0.05  # of a new observation in the running means


@dataclass
class Group:
    live: int = 0
    started: float = math.nan
    lengths: list[int] = field(default_factory=list)


class Learnt:
    """What a table is to know, one sample after the other."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.mean, self.pace = 0.0, 0.02

    def end(self, ended: list[tuple[str, int]], now: float) -> None:
        known = [(self.groups[key], length) for key, length in ended if key and length >= 0]
        for key, _ in ended:
            if key:
                self.groups[key].live -= 1
        if not known:
            return
        (first, length), count = known[0], len(known)
        share = 1.0 - (1.0 - PACE) ** count if self.mean else 1.0
        self.mean += share * (sum(each for _, each in known) / count - self.mean)
        age = now - first.started
        if length > 0 and age > 0 and not first.lengths:
            self.pace += PACE * (age / length - self.pace)
        for group, each in known:
            group.lengths.append(each)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 40]), st.integers(0, 2**31)), max_size=12))
def test_what_is_learnt_is_the_same_one_by_one_and_of_many(steps: list[tuple[int, int]]) -> None:
    """One lease, several of one group, and of several groups have ways of their own."""
    table, learnt, now = GroupTable(idle_seconds=1e9), Learnt(), 100.0
    for size, seed in steps:
        draw = np.random.default_rng(seed)
        keys = draw.choice(["", "a", "b", "c"][: int(draw.integers(1, 5))], size).tolist()
        slots, _ = table.slots(keys, now)
        for key in filter(None, keys):
            group = learnt.groups.setdefault(key, Group())
            group.live += 1
            group.started = now if math.isnan(group.started) else group.started
        table.hold(slots)
        if size == 1:
            table.start_one(int(slots[0]), now)
        else:
            table.start(slots, now)
        now += float(draw.integers(0, 50))
        lengths = draw.integers(-1, 30, size)
        if draw.random() < 0.2:
            lengths = np.full(size, -1)
            table.finish(slots, None, now)
        elif size == 1 and slots[0] != NO_GROUP:
            table.finish_one(int(slots[0]), 1, lengths.tolist(), now)
        else:
            table.finish(slots, lengths, now)
        learnt.end(list(zip(keys, lengths.tolist(), strict=True)), now)
    assert math.isclose(table.mean_tokens, learnt.mean, rel_tol=1e-9)
    assert math.isclose(table.seconds_per_token, learnt.pace, rel_tol=1e-9)
    for key, group in learnt.groups.items():
        slot = table.slot(key, now)
        assert table.live[slot] == group.live == 0
        assert table.started[slot] == group.started
        assert table.finished[slot] == len(group.lengths)
        assert table.tokens[slot] == sum(group.lengths)


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


def test_who_is_refused_takes_no_session_from_those_who_wait_in_it() -> None:
    table = SessionTable(idle_seconds=1.0)
    slots = np.array([table.open(key, 0.0) for key in ("waits", "refused")])
    table.hold(slots[:1])
    table.forget_unused(slots)
    assert len(table) == 1
    assert table.open("waits", 0.0) == slots[0]


def test_a_session_that_ended_keeps_its_place_in_the_table_until_its_lease_is_given_back() -> None:
    table = SessionTable(idle_seconds=1.0)
    for number in range(200):
        slot = table.open(f"ended/{number}", 0.0)
        table.hold(np.array([slot]))
        assert table.end(f"ended/{number}")
        other = table.open(f"other/{number}", 0.0)
        assert other != slot
        table.let_go(np.array([slot]), 0.0)
        assert table.end(f"other/{number}")
        assert slot < 64 > other, "places are used again"
