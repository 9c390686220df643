"""A batch placed at once equals picks made one by one, each charged before the next."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.balance.routing.placement import POLICIES, CacheAware, PlaceHints, create_policy
from sluice.balance.routing.waterfill import (
    Fleet,
    deal,
    pick_step_time,
    place_level,
    place_step_time,
)

BASE = 20
counts = st.one_of(st.integers(0, 3), st.integers(0, 40))


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    count = sum(sizes)
    load = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    limit = draw(st.lists(st.integers(0, 14), min_size=count, max_size=count))
    speeds = draw(st.sampled_from([[20], [20, 20, 23, 34, 60]]))
    slowdown = draw(st.lists(st.sampled_from(speeds), min_size=len(sizes), max_size=len(sizes)))
    return Fleet.create(
        np.array(load),
        np.array(limit),
        np.repeat(np.arange(len(sizes)), sizes),
        np.cumsum([0, *sizes[:-1]]),
        np.array(slowdown),
    )


def greedy_keys(fleet: Fleet, count: int, *, by_step_time: bool) -> list[tuple[int, int]]:
    """(step time, load after) of each pick when the best is taken again and again."""
    load = fleet.load.copy()
    keys = []
    for _ in range(count):
        open_ = [t for t in range(len(load)) if load[t] < fleet.limit[t]]
        if not open_:
            break

        def key(target: int) -> tuple[int, int]:
            engine = fleet.engine_of[target]
            largest = max(load[t] for t in range(len(load)) if fleet.engine_of[t] == engine)
            step = fleet.slowdown[engine] * (BASE + max(largest, load[target] + 1))
            return (int(step) if by_step_time else 0, int(load[target]) + 1)

        best = min(open_, key=key)
        keys.append(key(best))
        load[best] += 1
    return keys


def keys_of(fleet: Fleet, added: np.ndarray, *, by_step_time: bool) -> list[tuple[int, int]]:
    """The keys of the slots taken, whichever targets were drawn among ties."""
    largest = np.maximum.reduceat(fleet.load, fleet.starts)
    keys = []
    for target, number in enumerate(added):
        engine = fleet.engine_of[target]
        for level in range(fleet.load[target] + 1, fleet.load[target] + number + 1):
            step = fleet.slowdown[engine] * (BASE + max(largest[engine], level))
            keys.append((int(step) if by_step_time else 0, int(level)))
    return sorted(keys)


@settings(max_examples=100)
@given(fleets(), counts, st.integers(0, 5))
def test_step_time_batch_equals_greedy_picks(fleet, count, seed):
    added = place_step_time(fleet, BASE, count, np.random.default_rng(seed))
    assert keys_of(fleet, added, by_step_time=True) == sorted(
        greedy_keys(fleet, count, by_step_time=True)
    )
    assert (fleet.load + added <= np.maximum(fleet.limit, fleet.load)).all()
    picked = pick_step_time(fleet, BASE, count, np.random.default_rng(seed))
    again = np.bincount(picked, minlength=len(fleet.load))
    assert keys_of(fleet, again, by_step_time=True) == keys_of(fleet, added, by_step_time=True)


@settings(max_examples=100)
@given(fleets(), counts, st.integers(0, 5))
def test_level_batch_equals_greedy_picks(fleet, count, seed):
    added = place_level(fleet, count, np.random.default_rng(seed))
    assert keys_of(fleet, added, by_step_time=False) == sorted(
        greedy_keys(fleet, count, by_step_time=False)
    )


@settings(max_examples=100)
@given(fleets(), counts, st.sampled_from(sorted(POLICIES)))
def test_every_policy_fills_free_slots_and_no_others(fleet, count, name):
    placed = create_policy(name, BASE).place(fleet, count, np.random.default_rng(1))
    added = np.bincount(placed, minlength=len(fleet.load))
    assert len(placed) == min(count, fleet.free_count)
    assert (added <= fleet.room).all()


def cheapest(fleet: Fleet) -> set[int]:
    """Targets that a greedy search may take next, found by looking at all."""
    keys = {}
    for target in range(len(fleet.load)):
        if fleet.load[target] < fleet.limit[target]:
            level = int(fleet.load[target]) + 1
            engine = fleet.engine_of[target]
            largest = int(fleet.load[fleet.engine_of == engine].max())
            step = int(fleet.slowdown[engine]) * (BASE + max(largest, level))
            keys[target] = (step, level)
    return {target for target, key in keys.items() if key == min(keys.values())}


moves = st.tuples(st.sampled_from(["pick", "session", "back"]), st.integers(0, 30), st.booleans())


@settings(max_examples=300)
@given(fleets(), st.lists(moves, max_size=40))
def test_one_after_the_other_each_of_the_cheapest_may_be_drawn(fleet, moves):
    """A lease goes where is best or where its session is, or one is given back."""
    rng = np.random.default_rng(len(moves))
    for kind, place, looks_closer in moves:
        ties, target, change = cheapest(fleet), place % len(fleet.load), 1
        if kind == "back":
            change = -1
        elif kind == "pick" and fleet.free_count:
            target = int(pick_step_time(fleet, BASE, 1, rng)[0])
            assert target in ties
        if looks_closer and fleet.free_count > 1:
            drawn = {int(pick_step_time(fleet, BASE, 1, rng)[0]) for _ in range(20 * len(ties))}
            assert drawn == ties
        if fleet.load[target] + change >= 0:
            fleet.load[target] += change
            fleet.recount(target, change)
            assert fleet.room.tolist() == np.maximum(fleet.limit - fleet.load, 0).tolist()
            assert fleet.free_count == fleet.room.sum()


def test_single_picks_among_idle_ranks_are_as_often_one_as_another():
    fleet, rng = even_fleet(4, 8), np.random.default_rng(0)
    counts, out = Counter(), []
    for _ in range(3200):
        (target,) = pick_step_time(fleet, BASE, 1, rng).tolist()
        counts[target] += 1
        fleet.load[target] += 1
        fleet.recount(target, 1)
        out.append(target)
        if len(out) == 5:
            target = out.pop(int(rng.integers(5)))
            fleet.load[target] -= 1
            fleet.recount(target, -1)
    assert len(counts) == 32
    assert min(counts.values()) >= 60 and max(counts.values()) <= 140  # 100 each


def even_fleet(engines: int, ranks: int, slowdown: list[int] | None = None) -> Fleet:
    count = engines * ranks
    return Fleet.create(
        np.zeros(count, dtype=np.int64),
        np.full(count, 1 << 30),
        np.repeat(np.arange(engines), ranks),
        np.arange(0, count, ranks),
        np.array(slowdown or [20] * engines),
    )


def test_a_slow_engine_gets_work_only_when_the_others_are_as_slow():
    fleet = even_fleet(2, 1, [20, 40])
    few = place_step_time(fleet, BASE, 20, np.random.default_rng(0))
    assert few.tolist() == [20, 0]
    many = place_step_time(fleet, BASE, 23, np.random.default_rng(0))
    assert many.tolist() == [22, 1]  # 20 * (20 + 23) > 40 * (20 + 1)


@pytest.mark.parametrize("name", ["step_time", "min_count"])
def test_ties_are_random_and_follow_the_seed(name):
    fleet = even_fleet(4, 8)

    def first(seed: int) -> int:
        return int(create_policy(name).place(fleet, 1, np.random.default_rng(seed))[0])

    assert first(3) == first(3)
    counts = Counter(first(seed) for seed in range(640))
    assert len(counts) == 32 and max(counts.values()) <= 2.5 * 20


def test_ties_go_where_siblings_are_not():
    fleet = even_fleet(1, 8)
    avoid = np.array([1, 1, 1, 0, 1, 1, 1, 0])
    for seed in range(10):
        added = place_step_time(fleet, BASE, 2, np.random.default_rng(seed), avoid)
        assert added.tolist() == [0, 0, 0, 1, 0, 0, 0, 1]


def test_siblings_are_dealt_to_different_engines_where_there_are_enough():
    fleet = even_fleet(8, 4)
    for count in (8, 32, 64):
        targets = pick_step_time(fleet, BASE, count, np.random.default_rng(count))
        for start in range(0, count, 8):
            engines = fleet.engine_of[targets[start : start + 8]]
            assert sorted(engines) == list(range(8))
    crowded = deal(np.array([4] * 8), even_fleet(2, 4), np.random.default_rng(0))
    for start in range(0, 32, 8):
        assert len(set(crowded[start : start + 8])) == 8


def test_prompts_go_where_they_went_while_engines_are_about_even():
    fleet, rng = even_fleet(4, 1), np.random.default_rng(0)
    policy = CacheAware(absolute=4, relative=1.5, capacity=3)

    def place(fleet: Fleet, *keys: str) -> list[int]:
        return policy.place(fleet, len(keys), rng, PlaceHints(affinity=keys)).tolist()

    homes = dict(zip("abc", place(fleet, "a", "b", "c"), strict=True))
    assert len(set(homes.values())) == 3
    assert place(fleet, *"cabba") == [homes[key] for key in "cabba"]
    fleet.load[homes["a"]] = 4
    assert place(fleet, "a") == [homes["a"]]
    crowded = even_fleet(4, 1)
    crowded.load[homes["a"]] = 5
    moved = place(crowded, "a")
    assert moved != [homes["a"]]
    assert place(fleet, "a") == moved, "that is where its cache is now"
    full = even_fleet(4, 1)
    full.limit[homes["b"]] = 0
    (elsewhere,) = place(full, "b")
    assert elsewhere != homes["b"]
    assert place(fleet, "c") == [homes["c"]]
    place(fleet, "d")  # one more than are remembered: the one that was not seen for longest goes
    assert list(policy._last) == ["b", "c", "d"]
