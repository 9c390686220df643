"""What the loop says of a trainer that it waits for."""

from __future__ import annotations

import time

import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.config import ConfigError
from sluice.loop.training import check_lengths, why_not_active
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
