"""A rank of a pool that fails is told of at once, though others wait for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.patience import PATIENCE
from tests.rank_pool import JobError, Pool


def fail_alone(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    if rank == arguments["who"]:
        raise ValueError("this one has failed")
    threading.Event().wait(PATIENCE)
    return {}


def meet(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    dist.barrier()
    return {"rank": rank}


def clean_up() -> None:
    """Nothing is left."""


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(__name__)
    yield pool
    pool.close()


@pytest.mark.parametrize("who", [0, 1])
def test_others_are_not_waited_for(pool: Pool, who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Pool.__module__], "LEAVE_SECONDS", 0.5)
    with pytest.raises(JobError, match=rf"rank {who}: (?s:.*)this one has failed"):
        pool.run("fail_alone", 2, who=who)
    assert pool.run("meet", 2) == [{"rank": 0}, {"rank": 1}], "and the next job has others"
