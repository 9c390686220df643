"""What `sluice profile` says of a trace: the time of each operation without those it called."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.api.common.v1 import profile_pb2
from sluice.profile_command import DEVICE, HOST, costs, ended, summary


def event(
    name: str, start: float, span: float, tid: int = 1, cat: str = "cpu_op"
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": span}


@pytest.mark.parametrize("seed", range(20))
def test_each_moment_of_a_thread_is_of_the_innermost_operation(seed: int) -> None:
    """Against a brute-force walk over every microsecond."""
    rng, events = random.Random(seed), []
    owner = np.full((3, 400), "", dtype=object)

    def nest(thread: int, first: int, last: int, depth: int) -> None:
        while last - first > 2 and rng.random() < 0.8:
            start = rng.randrange(first, last - 1)
            end = rng.randrange(start + 1, last + (start > first))  # less than what is around it
            name = rng.choice("abcd")
            events.append(event(name, start, end - start, thread))
            owner[thread, start:end] = name
            if depth < 4:
                nest(thread, start, end, depth + 1)
            first = end

    for thread in range(3):
        nest(thread, 0, 400, 0)
    rng.shuffle(events)
    found = costs(events, HOST)
    assert {cost.name: round(cost.seconds * 1e6) for cost in found} == {
        name: int((owner == name).sum()) for name in {each["name"] for each in events}
    }
    assert sum(cost.count for cost in found) == len(events)
    assert found == sorted(found, key=lambda cost: -cost.seconds)


def test_what_is_no_operation_of_that_kind_does_not_count() -> None:
    events = [
        event("step", 0, 100, cat="user_annotation"),
        event("aten::mm", 10, 20),
        event("gemm", 15, 40, tid=7, cat="kernel"),
        {"ph": "i", "name": "moment", "ts": 3},
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    assert [(cost.name, cost.count) for cost in costs(events, HOST)] == [("aten::mm", 1)]
    assert [(cost.name, cost.count) for cost in costs(events, DEVICE)] == [("gemm", 1)]


def written(path: Path, events: list[dict[str, Any]]) -> bytes:
    data = gzip.compress(json.dumps({"traceEvents": events}).encode())
    path.write_bytes(data)
    return data


def test_a_damaged_trace_is_told_and_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.trace.json.gz"
    data = written(path, [event(f"op{n}", n * 10, 5) for n in range(200)])
    assert "200 operations" in "\n".join(summary(path))
    rng = random.Random(0)
    for cut in (0, 1, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        assert "cannot be read" in "\n".join(summary(path))
    for _ in range(200):
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        assert list(summary(path))  # a flag of the header may change, and nothing of the numbers
    for strange in ([], 3, {"traceEvents": 3}, {"traceEvents": [3, None]}, {}):
        path.write_bytes(gzip.compress(json.dumps(strange).encode()))
        assert "cannot be read" in "\n".join(summary(path))
    path.unlink()
    assert "on the host of who recorded it" in "\n".join(summary(path))


def test_a_name_that_plays_with_a_terminal_is_shown_plainly(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.trace.json.gz"
    written(path, [event("\x1b[31m" + "x" * 5000, 0, 5)])
    text = "\n".join(summary(path))
    assert "\x1b" not in text
    assert len(text) < 400


async def test_who_waits_for_a_step_is_told_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    asked = iter([2, 2, 2, 2, 1, 1, 0])

    async def ask() -> profile_pb2.Profile:
        return profile_pb2.Profile(name="a", left_count=next(asked))

    found = await ended("trainer", ask, "a", 60.0, 0.0)
    assert (found.name, found.left_count) == ("a", 0)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("profile: trainer: 2 to come and nothing")
    asked = iter([2, 1, 0])
    await ended("trainer", ask, "a", 60.0, 60.0)
    assert not capsys.readouterr().err
