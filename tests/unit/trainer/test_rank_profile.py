"""A rank that has no memory to record more of its steps writes what it has, and says so."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from services.trainer.rank.profile import RankProfile
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from tests.apart import apart


class Rank:
    """Makes steps of two commands each, in a profile of three."""

    def __init__(self, directory: Path) -> None:
        self.profile = RankProfile(0, directory)
        self.profile.begin(pb.ProfileCommand(name="long", step_count=3, ranks=[0]))

    def command(self, name: str) -> pb.RankProfile:
        result = pb.CommandResult()
        with self.profile.command(name, result):
            one = torch.ones(8)
            for _ in range(300):
                one.add(1)
        return result.profile

    def step(self) -> pb.RankProfile:
        self.command("forward_backward")
        return self.command("step")


def commands(file: Path) -> list[str]:
    with gzip.open(file) as trace:
        events = json.load(trace)["traceEvents"]
    return [each["name"] for each in events if each.get("cat") == "user_annotation"]


def crowd() -> None:
    """Have the host no memory left, as far as this process knows."""
    host = psutil.virtual_memory()._replace(available=0)
    psutil.virtual_memory = lambda: host


def all_steps(directory: Path) -> None:
    rank = Rank(directory)
    assert [rank.step().left_count for _ in range(2)] == [2, 1]
    assert rank.step() == pb.RankProfile(name="long", files=["rank-0.trace.json.gz"])
    assert len(commands(directory / "long/rank-0.trace.json.gz")) == 6
    assert rank.step() == pb.RankProfile(), "it is over"


def crowded_in_the_second_step(directory: Path) -> None:
    rank, file = Rank(directory), directory / "long/rank-0.trace.json.gz"
    assert rank.step().left_count == 2
    crowd()
    rank.command("forward_backward")
    assert commands(file) == ["forward_backward", "step", "forward_backward"]
    told = rank.command("step")
    assert (told.name, told.left_count, list(told.files)) == ("long", 0, [file.name])
    assert told.failure.startswith("rank 0: ended early, after 1 of 3 steps: what is recorded may ")
    assert "GiB of the host's memory" in told.failure
    assert rank.step() == pb.RankProfile(), "it is over"
    assert len(commands(file)) == 3


def crowded_at_the_end(directory: Path) -> None:
    rank = Rank(directory)
    rank.step()
    rank.step()
    rank.command("forward_backward")
    crowd()
    told = rank.command("step")
    assert (told.left_count, told.failure, len(told.files)) == (0, "", 1)


@pytest.mark.parametrize("case", [all_steps, crowded_in_the_second_step, crowded_at_the_end])
def test_a_profile_ends_early_where_there_is_no_memory_for_more(
    tmp_path: Path, case: Callable[[Path], None]
) -> None:
    apart(case, tmp_path)
