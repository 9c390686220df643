"""What a run leaves behind where something that draws it is missing."""

from __future__ import annotations

import io
import json
import re
import resource
import sys
import threading
import weakref
from pathlib import Path

import pytest
from rich.console import Console

from sluice.loop.report import RunReport, read_metrics
from sluice.loop.tracking import RowFollower
from sluice.runtime import waits
from sluice.runtime.waits import Waits
from tests.patience import PATIENCE

ROW = {"step": 1, "reward_mean": 0.5, "response_length_mean": 4.0, "skipped": []}


def test_a_run_without_matplotlib_does_not_fail_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    with RunReport(tmp_path, 1, Console(file=said)) as report:
        report.step(ROW)
        assert report.plot() == tmp_path / "reward.png"
        (tmp_path / "reward.png").unlink()
        monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
        assert report.plot() is None
    assert not (tmp_path / "reward.png").exists()
    assert "matplotlib is not installed" in said.getvalue()


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (None, "stopped at step 3 of 9\n"),
        (3, "stopped at step 3 of 9; `--resume` goes on from there\n"),
        (2, "; `--resume` goes on after step 2, the last run checkpoint (`checkpoint_every`)\n"),
    ],
)
def test_a_run_that_is_stopped_says_where_it_would_go_on(
    tmp_path: Path, kept: int | None, told: str
) -> None:
    """Without `checkpoint_every` that is its beginning, which nobody expects."""
    said = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        RunReport(tmp_path, 9, Console(file=said)) as report,
    ):
        report.begin("train", {})
        if kept is not None:
            report.keep(kept)
        for step in range(1, 4):
            report.step({**ROW, "step": step})
        raise KeyboardInterrupt
    assert said.getvalue().endswith(told)


def test_a_run_that_goes_back_says_how_many_steps_it_makes_again(tmp_path: Path) -> None:
    said = io.StringIO()
    with RunReport(tmp_path, 9, Console(file=said)) as report:
        report.begin("train", {})
        for step in range(1, 4):
            report.step({**ROW, "step": step})
        report.truncate(3)
        assert "again" not in said.getvalue()
        report.truncate(1)
    told = "goes on after step 1, the last run checkpoint; later steps, made again: 2\n"
    assert said.getvalue().endswith(told)


def test_a_damaged_line_is_left_out_and_said(tmp_path: Path) -> None:
    """Wherever a bit flips: those behind the line stay, and nothing ends with a trace."""
    said = io.StringIO()
    with RunReport(tmp_path, 9, Console(file=said)) as report:
        for step in range(1, 4):
            report.step({**ROW, "step": step})
        path = tmp_path / "metrics.jsonl"
        data = path.read_bytes()
        left_out = 0
        for index in range(0, len(data), 7):
            path.write_bytes(data[:index] + bytes([data[index] ^ 0x84]) + data[index + 1 :])
            report.truncate(9)
            steps = [row["step"] for row in read_metrics(tmp_path)]
            assert steps in ([1, 2, 3], [1, 2], [2, 3], [1, 3], [1], [3]), index
            left_out += len(steps) < 3
        assert left_out > len(data) // 10
        for size in range(0, len(data), 20):
            path.write_bytes(data[:size])
            assert len(report.truncate(9)) == data[:size].count(b"\n")
        path.write_bytes(b"[" * 100_000 + b"\n" + data)
        assert len(report.truncate(9)) == 3
        path.write_bytes(data.replace(b"response_length_mean", b"response_length_meen"))
        assert report.plot() is None
    assert "damaged lines are left out" in said.getvalue()


def test_a_row_whose_numbers_were_changed_is_left_out(tmp_path: Path) -> None:
    """They decide what a resumed run does: a schedule is asked with them, a goal compared."""
    with RunReport(tmp_path, 9, Console(file=io.StringIO())) as report:
        for step in range(1, 4):
            report.step({**ROW, "step": step, "reward_mean": 0.25 * step})
        rows, path = read_metrics(tmp_path), tmp_path / "metrics.jsonl"
        data = path.read_bytes()
        assert [len(json.loads(line)["digest"]) for line in data.splitlines()] == [16] * 3
        for index in range(len(data)):
            path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
            follower = RowFollower(path)
            for row in (*read_metrics(tmp_path), *follower.new()):
                assert row.items() >= rows[row["step"] - 1].items(), index
        path.write_bytes(data.replace(b'"reward_mean": 0.5', b'"reward_mean": 0.9'))
        assert report.truncate(9) == [0.25, 0.75]
        path.write_bytes(data.replace(b', "digest', b', "dighst'))  # as of an earlier release
        assert report.truncate(9) == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("key", ["reward_mean", "response_length_mean", "rollout_mismatch"])
def test_a_row_of_an_earlier_release_that_makes_no_sense_is_left_out(
    tmp_path: Path, key: str
) -> None:
    row = {**ROW, "rollout_mismatch": 1e-7}
    score = {"step": 1, "evaluation": "during", "dataset": "held_out", "score": 0.5}
    rows = [row, *({**row, "step": 2, key: found} for found in (None, "", [], {}))]
    rows += [score, *({**score, name: [found]} for name, found in score.items())]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with RunReport(tmp_path, 9, Console(file=io.StringIO())) as report:
        assert report.truncate(9) == [0.5]
        assert report.last_scalars()["step"] == 1 and report.last_score("held_out") == 0.5
        assert report.plot() is not None


@pytest.mark.parametrize("left", [0, 1])
def test_rows_that_are_gone_are_said(tmp_path: Path, left: int) -> None:
    said = io.StringIO()
    with RunReport(tmp_path, 9, Console(file=said, width=500)) as report:
        for step in range(1, 4):
            report.step({**ROW, "step": step})
        report.truncate(3)
        assert "gone" not in said.getvalue()
        path = tmp_path / "metrics.jsonl"
        rows = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(rows[:left]) + rows[left][:9])
        report.truncate(2)
    assert f"metrics.jsonl: rows of {2 - left} of the steps up to 2 are gone" in said.getvalue()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunReport(tmp_path, 9, Console(file=io.StringIO())) as report:
        report.step(ROW)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(OSError, match=r"too large: .*metrics\.jsonl"):
                report.step({**ROW, "note": "x" * 200})
            assert report.plot() is None  # which would hide what went wrong before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "reward.png").exists()


@pytest.mark.parametrize(
    ("actor", "told"),
    [({"rollout_mismatch": 1.1e-7}, "  mismatch 1.1e-07"), ({}, "")],  # or the critic alone
)
def test_a_log_tells_the_step_of_how_many_and_the_time_left(
    tmp_path: Path, actor: dict[str, float], told: str
) -> None:
    said = io.StringIO()
    with RunReport(tmp_path, 9, Console(file=said)) as report:
        report.step({**ROW, **actor, "tokens": 90.0, "step_seconds": 30.0})
    (line,) = said.getvalue().splitlines()
    assert line == f"step    1  reward 0.500  length 4.0{told}  of 9  tokens/s 3  left 4m00s"


@pytest.mark.parametrize(("seconds", "lines"), [(1e9, [1, 11]), (0.0, [*range(1, 14)])])
def test_a_log_has_a_line_of_every_tenth_step_and_of_each_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, lines: list[int]
) -> None:
    monkeypatch.setattr("sluice.loop.report.LINE_SECONDS", seconds)
    said = io.StringIO()
    with RunReport(tmp_path, 20, Console(file=said)) as report:
        for step in range(1, 14):
            report.step({**ROW, "step": step})
    assert [int(line.split()[1]) for line in said.getvalue().splitlines()] == lines


def test_steps_that_have_nothing_to_learn_from_are_told_once_in_a_row(tmp_path: Path) -> None:
    said = io.StringIO()
    with RunReport(tmp_path, 9, Console(file=said)) as report:
        for step, advantage in enumerate((0.0, 0.0, 1e-9, 0.0), 1):
            report.step({**ROW, "step": step, "reward_mean": 0.0, "advantage_abs_mean": advantage})
        report.step({**ROW, "step": 5})  # supervised: it has none
    told = [line.partition(":")[0] for line in said.getvalue().splitlines() if "nothing" in line]
    assert told == ["step 1", "step 4"]


def test_a_log_tells_what_a_run_without_steps_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.loop.report.QUIET_SECONDS", 0.01)
    monkeypatch.setattr(waits, "_listed", weakref.WeakSet())  # not what other tests left
    told = threading.Event()

    class Said(io.StringIO):
        def write(self, text: str) -> int:
            told.set() if "the tide" in text else None
            return super().write(text)

    said, listed = Said(), Waits()
    with (
        RunReport(tmp_path, 9, Console(file=said)),
        listed.waiting("the tide", on=["host:1"], explain=lambda: "moon [i]behind[/i]"),
    ):
        assert told.wait(PATIENCE)
    wanted = r"waits for the tide on host:1 since \w+: moon \[i\]behind\[/i\]"
    assert re.search(wanted, said.getvalue())
