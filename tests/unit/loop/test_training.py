"""What the loop says of a trainer that it waits for."""

from __future__ import annotations

import time

import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.config import ConfigError
from sluice.loop.config import AlgorithmConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.training import check_lengths, mini_batches, why_not_active
from sluice.runtime.wire import timestamp_of


def test_a_trainer_that_loads_is_told_with_its_ranks_and_what_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    trainer = pb.Trainer(state=pb.Trainer.STATE_LOADING)
    assert why_not_active(trainer) == "STATE_LOADING; no rank has reported yet"
    for rank, (activity, age) in enumerate([("loading", 3), ("", 200)]):
        heartbeat = timestamp_of(time.time() - age)
        trainer.ranks.add(rank=rank, activity=activity, heartbeat_time=heartbeat)
    loading = "rank 0 in loading, heard of 3 s ago; rank 1 in idle, heard of 200 s ago"
    assert why_not_active(trainer) == f"STATE_LOADING; {loading}"
    trainer.restart_count, trainer.failure = 2, "rank 1 was killed by SIGKILL"
    lost = "its ranks were lost 2 times: rank 1 was killed by SIGKILL"
    assert why_not_active(trainer) == f"STATE_LOADING; {lost}; {loading}"


def test_a_rank_whose_clock_is_ahead_was_not_heard_of_in_the_future() -> None:
    trainer = pb.Trainer(state=pb.Trainer.STATE_LOADING)
    trainer.ranks.add(rank=0, activity="loading", heartbeat_time=timestamp_of(time.time() + 60))
    assert why_not_active(trainer).endswith("rank 0 in loading, heard of 0 s ago")


def test_samples_are_no_longer_than_a_trainer_takes_them() -> None:
    assert check_lengths("trainer", pb.Trainer(max_row_tokens=16), longest=16, response=16) == ""
    assert check_lengths("trainer", pb.Trainer(), longest=1 << 20, response=1 << 20) == ""
    noted = check_lengths("critic", pb.Trainer(max_row_tokens=15), longest=16, response=14)
    assert noted.startswith("the critic takes 15 tokens of a sample at most, and engines go to 16")
    with pytest.raises(ConfigError, match=r"sampling.max_new_tokens: 15, and the critic takes 15"):
        check_lengths("critic", pb.Trainer(max_row_tokens=15), longest=16, response=15)


def shares(epochs: int, lot: str = "0/step-0", group_count: int = 7, count: int = 3) -> list:
    """The positions of the groups of each optimizer step, by epoch."""
    groups = [
        LedgerGroup(position=number, group_id=f"g{number}", state="generated", issue_step=0)
        for number in range(group_count)
    ]
    algorithm = AlgorithmConfig(mini_batches=count, epochs=epochs)
    steps = [[group.position for group in share] for share in mini_batches(groups, algorithm, lot)]
    assert len(steps) == epochs * count
    return [steps[i : i + count] for i in range(0, len(steps), count)]


def test_each_epoch_has_every_group_once_in_mini_batches_of_its_own() -> None:
    first, *others = shares(epochs=16)
    assert first == [[0, 1], [2, 3], [4, 5, 6]]  # as they come
    for epoch in others:
        assert sorted(number for share in epoch for number in share) == list(range(7))
        assert [len(share) for share in epoch] == [2, 2, 3]
    sets = {tuple(frozenset(share) for share in epoch) for epoch in others}
    assert len(sets) > 10


def test_epochs_are_drawn_again_for_each_step_and_alike_in_each_run() -> None:
    assert shares(epochs=3) == shares(epochs=3)
    assert shares(epochs=4)[:3] == shares(epochs=3)
    for lot in ("0/step-1", "1/step-0"):
        assert shares(epochs=3, lot=lot)[0] == shares(epochs=3)[0]
        assert shares(epochs=3, lot=lot)[1:] != shares(epochs=3)[1:]
    assert all(len(epoch) == 1 for epoch in shares(epochs=3, count=1))
