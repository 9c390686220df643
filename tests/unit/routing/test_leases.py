"""The lease columns against a dictionary, with a window so small that it slides all the time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.balance.routing import leases as module
from sluice.balance.routing.leases import FREE, NOBODY, QUEUED, LeaseTable


def ids(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


@pytest.fixture(autouse=True)
def _small_window(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_WINDOW", 8)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 2), st.integers(0, 30)),
        st.tuples(st.just("grant one"), st.integers(0, 2), st.integers(0, 6)),
        st.tuples(st.just("release"), st.integers(0, 2), st.integers(0, 2**31)),
        st.tuples(st.just("release one"), st.integers(0, 2), st.integers(0, 2**31)),
        st.tuples(st.just("adopt"), st.integers(0, 2), st.integers(0, 99)),
        st.tuples(st.just("adopt"), st.integers(0, 2), st.integers(1000, 1099)),
        st.tuples(st.just("bind"), st.integers(0, 2), st.integers(0, 2**31)),
        st.tuples(st.just("expire"), st.integers(0, 2), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=50)
@given(actions)
@example([("adopt", 0, 0), ("grant", 0, 4), ("release", 0, 139), ("adopt", 0, 0)])
@example([("grant", 0, 1), *[("grant", 1, 20), ("expire", 1, 0)] * 6, ("bind", 0, 0)])
@example([("grant", 1, 30), ("grant", 1, 30), *[("grant one", 2, 3), ("expire", 1, 0)] * 90])
def test_columns_equal_a_dictionary(steps):
    table = LeaseTable(1000)
    model: dict[int, tuple[int, int]] = {}  # id -> client, target
    for kind, client, number in steps:
        rng = np.random.default_rng(number)
        if kind == "grant":
            targets = np.where(np.arange(number) % 5 == 0, QUEUED, np.arange(number) % 7)
            first = table.grant(client, targets, -1, np.arange(number))
            assert first == table.next_id - number
            model |= {first + i: (client, int(t)) for i, t in enumerate(targets)}
        elif kind == "grant one":
            model[table.grant_one(client, number, 9)] = (client, number)
        elif kind == "release one":
            for lease in rng.permutation([*model, 500, table.next_id])[:3].tolist():
                found = table.release_one(client, lease)
                if found is None:  # it is another's, or too old
                    assert model.get(lease, (NOBODY,))[0] != client or lease < table._base
                else:
                    assert model.pop(lease) == (client, found[0])
        elif kind == "release":
            some = rng.permutation(sorted(model))[: number % 9].tolist() if model else []
            asked = ids([*some, *some[:2], 500, 10**9])  # repeats and strangers count for nothing
            released, live = table.release(client, asked)
            expected = [i for i in some if model[i][0] == client]
            assert sorted(released.ids) == sorted(expected)
            assert live.sum() == len(expected)
            assert {
                i: t for i, t in zip(released.ids.tolist(), released.targets.tolist(), strict=True)
            } == {i: model.pop(i)[1] for i in expected}
        elif kind == "adopt" and number not in model and number < table.next_id:
            table.adopt(client, ids([number]), ids([3]))
            model[number] = (client, 3)
        elif kind == "bind":
            for lease in [i for i, (_, t) in model.items() if t == QUEUED][:2]:
                table.bind(lease, 6)
                model[lease] = (model[lease][0], 6)
        elif kind == "expire":
            assert sorted(table.release_client(client).ids) == sorted(
                i for i, (owner, _) in model.items() if owner == client
            )
            model = {i: v for i, v in model.items() if v[0] != client}
        assert table.live_count == len(model)
        for client_ in range(3):
            mine = sorted(i for i, (owner, _) in model.items() if owner == client_)
            assert sorted(table.held_by(client_).tolist()) == mine
            assert table.count_of(client_) == len(mine)
    for client_ in range(3):
        mine = [owner == client_ for owner, _ in model.values()]
        asked = ids([*model, table.next_id, 500])
        assert table.is_live(client_, asked).tolist() == [*mine, False, False]
    for lease in [*model, 4, 10**9]:
        client, target = model.get(lease, (NOBODY, FREE))
        assert (table.client_of(lease), table.target_of(lease)) == (client, target)
    on_three = {i: c for i, (c, t) in model.items() if t == 3}
    found = table.bound_within(3, 4)
    assert dict(zip(found[0].tolist(), found[1].tolist(), strict=True)) == on_three


def test_memory_follows_live_leases_not_leases_ever(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_WINDOW", 4096)
    table = LeaseTable()
    oldest = table.grant(0, np.zeros(10, dtype=np.int64), -1, -1)
    for _ in range(500):
        first = table.grant(1, np.zeros(1000, dtype=np.int64), -1, -1)
        table.release(1, np.arange(first, first + 1000))
    assert table._columns.shape[1] <= 3 * 4096
    assert table.live_count == 10
    assert table.target_of(oldest) == 0


def test_memory_shrinks_after_a_crowd(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_WINDOW", 64)
    table = LeaseTable()
    crowd = table.grant(0, np.zeros(10_000, dtype=np.int64), -1, -1)
    widest = table._columns.shape[1]
    table.release(0, np.arange(crowd, crowd + 10_000))
    for _ in range(400):
        first = table.grant(1, np.full(100, 5), -1, -1)
        assert table.read(np.arange(first, first + 100)).targets.tolist() == [5] * 100
        table.release(1, np.arange(first, first + 100))
    assert table._columns.shape[1] <= widest // 16
